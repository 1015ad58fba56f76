"""One commit or none."""

from perl.run.old_paths import forwarded

__getattr__ = forwarded(__name__, "perl.hub.push.publish")
