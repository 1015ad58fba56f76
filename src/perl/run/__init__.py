"""The folder of a run, how far it is, and what it runs on: device, threads, processes."""

from perl.run.old_paths import forwarded

__getattr__ = forwarded(__name__, "perl.run.folder")
