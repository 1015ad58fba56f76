"""A world without a Hub: ``sandbox:base``, a tiny model that sometimes reasons, and tasks it can learn to solve.

Names that start with ``sandbox:`` resolve wherever the name of a model or of a data set does.
"""

from pathlib import Path

from perl.errors import DataError, ModelError, did_you_mean
from perl.sandbox.tasks import HELDOUT_COUNT, TASKS, TRAIN_COUNT, Problem, Split, problems

PREFIX = "sandbox:"
BASE_NAME = "sandbox:base"
BASE_FOLDER = Path(__file__).parent / "base"


def is_sandbox(name: str) -> bool:
    """Whether a model or data set name belongs to the sandbox."""
    return name.startswith(PREFIX)


def model_folder(name: str) -> Path:
    """The folder of a sandbox model.

    Raises:
        ModelError: There is no such model.
    """
    if name != BASE_NAME:
        raise ModelError(f"the sandbox has no model {name!r}", "model.name", f"did you mean {BASE_NAME}?")
    return BASE_FOLDER


def load_problems(name: str, split: Split) -> list[Problem]:
    """All problems of one split of ``sandbox:TASK``, always the same.

    Raises:
        DataError: There is no such task.
    """
    task = name.removeprefix(PREFIX)
    if task not in TASKS:
        raise DataError(f"the sandbox has no task {task!r}", "data", did_you_mean(task, TASKS))
    return problems(task, split, count=TRAIN_COUNT if split == "train" else HELDOUT_COUNT)
