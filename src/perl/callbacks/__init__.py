"""The public door to trainer callbacks: what a recipe's run does beside its steps, for scripts too.

``from perl.callbacks import BenchmarkScores, LearningCurves, ...``; each name is loaded when it is first used.
``docs/callbacks.md`` has an example of each, and says which work with TRL's and transformers' own trainers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perl.trainer.callbacks.alarms import FlatRewards as FlatRewards
    from perl.trainer.callbacks.alarms import HealthAlarms as HealthAlarms
    from perl.trainer.callbacks.step_logs import LearningCurves as LearningCurves
    from perl.trainer.callbacks.step_logs import SamplesLog as SamplesLog
    from perl.training.callbacks.benchmark_scores import BenchmarkScores as BenchmarkScores
    from perl.training.callbacks.graceful_stop import GracefulStop as GracefulStop
    from perl.training.callbacks.hub_checkpoints import HubCheckpoints as HubCheckpoints
    from perl.training.callbacks.live_progress import LiveProgress as LiveProgress

_HOMES = {
    "BenchmarkScores": "perl.training.callbacks.benchmark_scores",
    "FlatRewards": "perl.trainer.callbacks.alarms",
    "GracefulStop": "perl.training.callbacks.graceful_stop",
    "HealthAlarms": "perl.trainer.callbacks.alarms",
    "HubCheckpoints": "perl.training.callbacks.hub_checkpoints",
    "LearningCurves": "perl.trainer.callbacks.step_logs",
    "LiveProgress": "perl.training.callbacks.live_progress",
    "SamplesLog": "perl.trainer.callbacks.step_logs",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:  # noqa: ANN401 (PEP 562)
    if name not in _HOMES:
        raise AttributeError(f"module 'perl.callbacks' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
