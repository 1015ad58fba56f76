"""Why a step is fast: rows without padding, a shared prompt once, as many tokens at a time as memory holds."""

from perl.run.old_paths import forwarded

__getattr__ = forwarded(__name__, "perl.packing.rows")
