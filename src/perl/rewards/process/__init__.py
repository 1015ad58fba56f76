"""A reward for each step of a completion, which another model gives."""

from perl.run.old_paths import forwarded

__getattr__ = forwarded(__name__, "perl.rewards.process.reward")
