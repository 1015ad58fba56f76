"""What a model card says, and whether it is true."""

from perl.run.old_paths import forwarded

__getattr__ = forwarded(__name__, "perl.hub.card.render")
