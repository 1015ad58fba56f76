"""What several tests of this folder look at."""

import pytest

from perl.trainer.trainer import PeftGRPOTrainer


@pytest.fixture
def trainers(monkeypatch):
    """The trainers that are made, in order."""
    made, original = [], PeftGRPOTrainer.__init__

    def noted(self, *args, **kwargs):
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(PeftGRPOTrainer, "__init__", noted)
    return made
