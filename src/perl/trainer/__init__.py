"""PeftGRPOTrainer; the only room that knows the private methods of TRL and transformers."""

from perl.run.old_paths import forwarded

__getattr__ = forwarded(__name__, "perl.trainer.trainer")
