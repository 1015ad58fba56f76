"""What may leave this machine."""

from perl.run.old_paths import forwarded

__getattr__ = forwarded(__name__, "perl.hub.gate.gate")
