"""perl-rl: parameter-efficient reinforcement learning for language models.

Importing this package imports nothing heavy; each public name is loaded when it is first used.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perl import callbacks as callbacks
    from perl import rewards as rewards
    from perl.evaluation.evaluate import evaluate as evaluate
    from perl.hub.push.publish import push as push
    from perl.recipe import Recipe as Recipe
    from perl.reports.comparison.table import compare as compare
    from perl.reports.page import report as report
    from perl.reports.plan_table import plan as plan
    from perl.reports.spectrum import spectrum as spectrum
    from perl.run.folder import Run as Run
    from perl.trainer.arguments.config import PeftRLConfig as PeftRLConfig
    from perl.trainer.trainer import PeftGRPOTrainer as PeftGRPOTrainer
    from perl.training.new_recipe import new_recipe as new_recipe
    from perl.training.stages import train as train
    from perl.training.studies.run_study import study as study

__version__ = "0.2.0"

# On the import of its kernels for GPUs that are not here it warns, which is nothing that a user can act on.
logging.getLogger("torchao").setLevel(logging.ERROR)

# Public name -> module that defines it. No module may bear the name of a function here: importing it would hide it.
_HOMES = {
    "PeftGRPOTrainer": "perl.trainer.trainer",
    "PeftRLConfig": "perl.trainer.arguments.config",
    "Recipe": "perl.recipe",
    "Run": "perl.run.folder",
    "callbacks": "perl.callbacks",
    "compare": "perl.reports.comparison.table",
    "evaluate": "perl.evaluation.evaluate",
    "new_recipe": "perl.training.new_recipe",
    "plan": "perl.reports.plan_table",
    "push": "perl.hub.push.publish",
    "report": "perl.reports.page",
    "rewards": "perl.rewards",
    "spectrum": "perl.reports.spectrum",
    "study": "perl.training.studies.run_study",
    "train": "perl.training.stages",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:  # noqa: ANN401 (PEP 562)
    if name not in _HOMES:
        raise AttributeError(f"module 'perl' has no attribute {name!r}")
    module = importlib.import_module(_HOMES[name])
    value = module if _HOMES[name] == f"perl.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
