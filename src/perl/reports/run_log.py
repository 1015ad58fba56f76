"""What a run, finished or not, has written so far.

folder -> RunLog

The folder of a recipe's run has a ``run.json``; the output folder of a script has a ``perl_run.json``, or logs alone.
Lines that a kill or a running training cut short are left out, and counted.
"""

import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from perl.errors import PerlError, RunFolderError
from perl.reports.script_log import checkpoint_rows, checkpoints_of, is_script, script_facts
from perl.run.facts import CARD_FACTS
from perl.run.folder import LOCK, Run
from perl.run.folder_check import is_held
from perl.run.logs import log_rows

if TYPE_CHECKING:
    from perl.evaluation.results import Results

# A training that has logged nothing for so many of its steps, and for so many seconds, may have been killed.
_SILENT_STEPS, _SILENT_SECONDS = 20, 120.0
# One whose folder nobody holds any more has been, once nothing was logged for so long: a disk that is shared between
# machines may tell late who holds what.
_LOCKLESS_SECONDS = 20.0


@dataclass(frozen=True)
class RunLog:
    """A run as its folder tells of it.

    Attributes:
        path: The folder.
        facts: Of ``run.json``, or of a script's ``perl_run.json``; empty where there is neither.
        rows: Of ``metrics.jsonl``, in order; of a script without one those of its newest checkpoint.
        alarms: Of ``alarms.jsonl``.
        recipe: The text of ``recipe.yaml``; None where there is none.
        results: Of ``eval/results.json``; None where there is none, or where it cannot be read.
        planned: Steps that the training is to have; None: not known.
        modified: When ``metrics.jsonl`` was last written, in seconds since 1970.
        notes: What could not be read, a line each.
    """

    path: Path
    facts: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    alarms: tuple[Mapping[str, Any], ...] = ()
    recipe: str | None = None
    results: "Results | None" = None
    planned: int | None = None
    modified: float = 0.0
    notes: tuple[str, ...] = field(default=())

    @property
    def samples(self) -> Path:
        """The log of completions."""
        return self.path / "samples.jsonl"

    @property
    def step(self) -> int:
        """The last that was logged."""
        logged = max((int(row["step"]) for row in self.rows if "step" in row), default=0)
        return max(logged, int(self.facts.get("steps", 0))) if self.is_script else logged

    @property
    def is_script(self) -> bool:
        """Whether a script's trainer wrote it, and no recipe's run."""
        return "status" not in self.facts

    @cached_property
    def status(self) -> str:
        """``running``, ``done``, ``failed``, ``interrupted`` or ``killed``; of a script ``done`` by its steps."""
        known = str(self.facts.get("status", ""))
        lock = self.path / LOCK
        if known == "running" and lock.is_file() and self._silent > _LOCKLESS_SECONDS and not is_held(lock):
            return "killed"  # its process had no time to write that it ends
        if known:
            return known
        return "done" if self.planned is not None and self.step >= self.planned else "running"

    @property
    def state(self) -> str:
        """For a person: ``running, step 12 of 50``."""
        of_all = f" of {self.planned:,}" if self.planned else ""
        text = f"{self.status}, step {self.step:,}{of_all}"
        silent = self._silent
        if self.status == "killed":
            text += "; its process is gone, and the same command goes on"
        if self.status == "running" and silent > max(_SILENT_SECONDS, _SILENT_STEPS * (self.seconds_per_step or 0.0)):
            text += f"; nothing logged for {_age(silent)}"
        return text

    @property
    def _silent(self) -> float:
        """Seconds since something was logged."""
        return time.time() - self.modified

    @property
    def seconds_per_step(self) -> float | None:
        """Median of the last steps; None: not logged."""
        seconds = sorted(number(row.get("step_time")) or 0.0 for row in self.rows[-50:] if "step_time" in row)
        return seconds[len(seconds) // 2] if seconds else None

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The recipe's sections as values; empty without a readable recipe."""
        with contextlib.suppress(yaml.YAMLError, RecursionError):
            found = yaml.safe_load(self.recipe or "")
            return found if isinstance(found, dict) else {}
        return {}


def read_run(path: str | Path, *, begun: bool = True, scored: bool = True) -> RunLog:
    """What is in a run's folder.

    Args:
        path: The folder.
        begun: Whether a step must be logged.
        scored: Whether the results at the end are read too.

    Raises:
        RunFolderError: It is absent, holds no run, or its metrics cannot be read.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise RunFolderError("is a file, not a folder" if folder.exists() else "no such folder", str(path))
    metrics = folder / "metrics.jsonl"
    facts = _facts(folder, metrics)
    if is_script(folder) and not metrics.exists():
        rows, notes = [row for row in checkpoint_rows(folder) if number(row.get("step")) is not None], list[str]()
        modified = (folder / CARD_FACTS).stat().st_mtime
    else:
        has_rows = begun or (metrics.is_file() and metrics.stat().st_size > 0)
        rows, modified, notes = _metrics(metrics) if has_rows else ([], time.time(), [])
    alarms, left_out = _rows_of(folder / "alarms.jsonl")
    notes += [f"alarms.jsonl: {_lines(left_out)} left out"] if left_out else []
    recipe, results = _recipe(folder, notes), _results(folder, notes) if scored else None
    log = RunLog(folder, facts, tuple(rows), tuple(alarms), recipe, results, None, modified)
    planned = _planned(log)
    return RunLog(folder, facts, tuple(rows), tuple(alarms), recipe, results, planned, modified, tuple(notes))


def read_runs(paths: Sequence[str | Path]) -> list[RunLog]:
    """Several runs.

    Raises:
        RunFolderError: As :func:`read_run`; or one is given twice, or none is.
    """
    if not paths:
        raise RunFolderError("no run is given", hint="name at least one run folder")
    seen: set[Path] = set()
    for path in paths:
        real = Path(path).resolve()
        if real in seen:
            raise RunFolderError("is given twice", str(path))
        seen.add(real)
    return [read_run(path) for path in paths]


def number(value: Any) -> float | None:  # noqa: ANN401 (JSON)
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with contextlib.suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def _facts(folder: Path, metrics: Path) -> Mapping[str, Any]:
    if (folder / "run.json").exists():
        return Run.read(folder).facts
    if is_script(folder):
        return script_facts(folder)
    if not metrics.exists():
        raise RunFolderError("holds no run: it has neither run.json nor metrics.jsonl", str(folder))
    return {}


def _metrics(path: Path) -> tuple[list[dict[str, Any]], float, list[str]]:
    """Rows, when they were written, and what is to be said of them."""
    if not path.exists():
        raise RunFolderError("no step is logged yet: it has no metrics.jsonl", str(path.parent))
    try:
        rows, left_out = _rows_of(path)
        modified = path.stat().st_mtime
    except OSError as error:
        raise RunFolderError(f"cannot be read: {error.strerror or error}", str(path)) from None
    if not rows:
        broken = f"is malformed: none of its {left_out:,} lines is a row" if left_out else "no step is logged yet"
        raise RunFolderError(broken, str(path))
    with_steps = [row for row in rows if number(row.get("step")) is not None]
    if not with_steps:
        raise RunFolderError("is malformed: no row has a step", str(path))
    left_out += len(rows) - len(with_steps)
    return with_steps, modified, [f"metrics.jsonl: {_lines(left_out)} left out"] if left_out else []


def _rows_of(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a log, and how many lines are none; a last line that is being written does not count."""
    if not path.is_file():
        if path.exists():
            raise OSError("it is no regular file")
        return [], 0
    text = path.read_bytes().decode("utf-8", errors="replace")
    whole, _, rest = text.rpartition("\n")
    lines = [line for line in whole.split("\n") if line.strip()]
    rows = [row for line in lines for row in log_rows(line)]
    left_out = len(lines) - len(rows)
    last = log_rows(rest)
    return rows + last, left_out + (1 if rest.strip() and not last and not lines else 0)


def _lines(count: int) -> str:
    return "1 malformed line" if count == 1 else f"{count:,} malformed lines"


def _recipe(folder: Path, notes: list[str]) -> str | None:
    path = folder / "recipe.yaml"
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    except OSError as error:
        notes.append(f"recipe.yaml: {error.strerror or error}")
        return None


def _results(folder: Path, notes: list[str]) -> "Results | None":
    if not (folder / "eval" / "results.json").exists():
        return None
    from perl.evaluation.results import read_results  # with torch, which a run that is not scored yet can do without

    try:
        return read_results(folder / "eval" / "results.json")
    except PerlError as error:
        notes.append(f"eval/results.json: {error.mistakes[0].message}")
        return None


def _planned(log: RunLog) -> int | None:
    """Steps in all: as recorded, as the recipe says, as a checkpoint knows, or from how much of an epoch is done."""
    recorded = log.facts.get("planned_steps")
    if isinstance(recorded, int) and recorded > 0:
        return recorded
    train = log.settings.get("train")
    train = train if isinstance(train, dict) else {}
    if isinstance(most := train.get("max_steps"), int) and most > 0:
        return most
    for folder in checkpoints_of(log.path):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["max_steps"]) or None
    epochs, epoch = (
        number(train.get("num_train_epochs", 3.0 if train else None)),
        number(log.rows[-1].get("epoch")) if log.rows else None,
    )
    return max(log.step, round(log.step * epochs / epoch)) if epochs and epoch else None


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:.0f} s"
