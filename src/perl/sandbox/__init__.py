"""Everything without a Hub: tiny models, one that sometimes reasons and one that only copies, and tasks to learn.

``sandbox:NAME`` -> model folder, problems

Such a name is accepted wherever the name of a model or of a data set is.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from perl.errors import DataError, ModelError, did_you_mean
from perl.sandbox.tasks import HELDOUT_COUNT, TASKS, TRAIN_COUNT, Problem, Split, problems

PREFIX = "sandbox:"
BASE_NAME = "sandbox:base"
BASE_FOLDER = Path(__file__).parent / "base"
COPYIST_NAME, CALLER_NAME = "sandbox:copyist", "sandbox:caller"
MODELS: Mapping[str, Path] = MappingProxyType(
    {
        BASE_NAME: BASE_FOLDER,
        COPYIST_NAME: Path(__file__).parent / "copyist",
        CALLER_NAME: Path(__file__).parent / "caller",
    }
)


def is_sandbox(name: str) -> bool:
    """Whether the name of a model or data set starts with ``sandbox:``."""
    return name.startswith(PREFIX)


def model_folder(name: str) -> Path:
    """The folder of a sandbox model.

    Raises:
        ModelError: The sandbox has no model of this name.
    """
    if name not in MODELS:
        raise ModelError(f"the sandbox has no model {name!r}", "model.name", did_you_mean(name, MODELS))
    return MODELS[name]


def model_name(place: str) -> str:
    """The name of a sandbox model whose folder this is; any other name or folder as it was given."""
    return next((name for name, folder in MODELS.items() if place == str(folder)), place)


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
