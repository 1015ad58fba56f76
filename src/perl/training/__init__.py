"""recipe -> run; `stages.py` has the whole on one screen."""

from perl.run.old_paths import forwarded

__getattr__ = forwarded(__name__, "perl.training.stages")
