"""Everything without a Hub: ``sandbox:base``, a tiny model that sometimes reasons, and tasks that it can learn.

``sandbox:NAME`` -> model folder, problems

Such a name is accepted wherever the name of a model or of a data set is.
"""

from pathlib import Path

from perl.errors import DataError, ModelError, did_you_mean
from perl.sandbox.tasks import HELDOUT_COUNT, TASKS, TRAIN_COUNT, Problem, Split, problems

PREFIX = "sandbox:"
BASE_NAME = "sandbox:base"
BASE_FOLDER = Path(__file__).parent / "base"


def is_sandbox(name: str) -> bool:
    """Whether the name of a model or data set starts with ``sandbox:``."""
    return name.startswith(PREFIX)


def model_folder(name: str) -> Path:
    """The folder of a sandbox model.

    Raises:
        ModelError: The sandbox has no model of this name.
    """
    if name != BASE_NAME:
        raise ModelError(f"the sandbox has no model {name!r}", "model.name", f"did you mean {BASE_NAME}?")
    return BASE_FOLDER


def load_problems(name: str, split: Split) -> list[Problem]:
    """All problems of one split of a task, the same at every call.

    Args:
        name: ``sandbox:TASK``, or the task alone.
        split: ``train`` (4,000 problems) or ``heldout`` (500).

    Raises:
        DataError: The sandbox has no task of this name.
    """
    task = name.removeprefix(PREFIX)
    if task not in TASKS:
        raise DataError(f"the sandbox has no task {task!r}", "data", did_you_mean(task, TASKS))
    return problems(task, split, count=TRAIN_COUNT if split == "train" else HELDOUT_COUNT)
