"""What ``run.json`` and ``best.json`` must hold: each may have been cut, edited or written by another version.

text -> facts, or what is wrong with them

Whatever is wrong is a ``ValueError`` of one line. What is absent is not looked at: a run that was stopped knows less.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from perl.run.files import parse_mapping

BEST = "best.json"
RECIPE, RUN_FACTS = "recipe.yaml", "run.json"
"""Files by which a folder is known as a run's."""
CARD_FACTS = "perl_run.json"
"""Beside a card: facts of the training of the adapter there. A script's output folder has it, and no ``run.json``."""


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's."""
    return (folder / RECIPE).is_file() and (folder / RUN_FACTS).is_file()


def run_above(path: Path, levels: int) -> Path | None:
    """The run that a path lies in; None: it lies in none.

    Args:
        path: Of a folder or a file, which need not be a run's itself.
        levels: How many folders up a run is looked for.
    """
    return next((folder for folder in list(path.resolve().parents)[:levels] if is_run(folder)), None)


class _Facts(BaseModel, extra="allow", strict=True):
    status: str = "new"
    steps: int = Field(0, ge=0)
    method: str | None = None
    base: str | None = None
    revision: str | None = None
    quantization: str | None = None
    base_dtype: str | None = None
    repo_id: str | None = None
    seed: int | None = None
    trainable_parameters: int | None = None
    total_parameters: int | None = None
    fingerprint: dict[str, str] = {}
    settings: dict[str, Any] = {}
    loss: str | None = None
    ratio_level: str | None = None
    algorithm: str | None = None
    overridden: dict[str, Any] = {}
    rewards: dict[str, float] = {}
    reward: dict[str, float | None] = {}
    data: dict[str, str | None] = {}
    hardware: dict[str, str | int] = {}
    reload_difference: float | None = None
    seconds: float = Field(0.0, ge=0)
    versions: dict[str, str] = {}
    eval: dict[str, dict[str, Any]] = {}
    created: str = ""
    error: str = ""


class _Best(BaseModel, extra="allow", strict=True):
    step: int = Field(ge=0)
    metric: str
    value: float
    metrics: dict[str, float]
    sha256: str | None = None


def parse_run_facts(text: bytes) -> dict[str, Any]:
    """The facts in a ``run.json``.

    Raises:
        ValueError: It holds none, or one of another type.
    """
    return _checked(_Facts, parse_mapping(text, finite=False))


def read_best(folder: Path) -> dict[str, Any]:
    """Step, metric and value of the best adapter in a folder.

    Raises:
        FileNotFoundError: None is kept there.
        OSError: It cannot be read.
        ValueError: It is not what we write.
    """
    return _checked(_Best, parse_mapping((folder / BEST).read_bytes(), finite=False))


def averages(metrics: Mapping[str, float]) -> dict[str, float]:
    """Of the scores of one step, by the names they are logged under, the avg@k of each task."""
    return {name: value for name, value in metrics.items() if "/avg@" in name and not name.endswith("_stderr")}


def best_disagreement(best: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], *, done: bool) -> str:
    """How a best adapter's record contradicts itself or the run's log; empty: not at all.

    A row of a log of every third step holds the scores of three steps in one: only where each step has a row, the
    scores of one can be told.

    Args:
        best: From :func:`read_best`.
        rows: Of ``metrics.jsonl``; none with scores contradict nothing.
        done: Whether the training has ended. One that was killed may have kept an adapter before it logged the step.
    """
    scores, step = best["metrics"], best["step"]
    means = averages(scores)
    mean = fmean(means.values()) if means else math.nan
    if best["value"] != scores.get(f"eval/{best['metric']}", mean):
        return f"{BEST}: value is not the {best['metric']} of its own metrics"
    logged: dict[Any, dict[str, Any]] = {}
    for row in rows:  # of a script's last step there are two
        logged.setdefault(row.get("step"), {}).update(row)
    last = max((one for one in logged if isinstance(one, int)), default=0)
    if not any(name in row for row in rows for name in scores):
        return ""
    alone = step in logged and (step == 1 or step - 1 in logged)
    differs = alone and any(logged[step].get(name) != value for name, value in scores.items())
    beyond = last - 1 in logged and step > (last if done else last + 1)
    return f"{BEST} and metrics.jsonl differ in the scores of step {step}" if differs or beyond else ""


def _checked(kind: type[BaseModel], facts: dict[str, Any]) -> dict[str, Any]:
    try:
        kind.model_validate(facts)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part)[:60] for part in first["loc"])
        raise ValueError(f"{place}: {first['msg']}") from None
    return facts
