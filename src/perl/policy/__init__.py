"""Base and adapter: how they are loaded, joined, compared, saved and named."""

from perl.run.old_paths import forwarded

__getattr__ = forwarded(__name__, "perl.trainer.policy_setup")
