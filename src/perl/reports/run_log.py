"""What a run, finished or not, has written so far.

folder -> RunLog

The folder of a recipe's run has a ``run.json``; the output folder of a script has a ``perl_run.json``, or logs alone.
Lines that a kill or a running training cut short are left out, and counted.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from perl.errors import PerlError, RunFolderError, first_line
from perl.run.facts import CARD_FACTS, RUN_FACTS
from perl.run.files import parse_mapping, read_regular
from perl.run.folder import LOCK, Run, is_held
from perl.run.logs import log_rows
from perl.run.progress import duration

if TYPE_CHECKING:
    from perl.evaluation.scoring.results import Results

METRICS = "metrics.jsonl"
_STATE = "trainer_state.json"
_LARGEST_STATE = 100_000_000
# Of a script's ``perl_run.json``, by the names that ``run.json`` has for them.
_FACTS = (
    *("base", "revision", "quantization", "method", "seed", "loss", "ratio_level", "algorithm", "overridden"),
    *("settings", "rewards", "trainable_parameters", "total_parameters", "seconds", "versions"),
)
# A training that has logged nothing for so long is in a long step, or was killed.
_SILENT_SECONDS = 120.0
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
        return known or ("done" if self.planned is not None and self.step >= self.planned else "running")

    @property
    def state(self) -> str:
        """For a person: ``running, step 12 of 50``."""
        of_all = f" of {self.planned:,}" if self.planned else ""
        text = f"{self.status}, step {self.step:,}{of_all}"
        if self.status == "killed":
            text += "; its process is gone, and the same command goes on"
        if self.status == "running" and self._silent > _SILENT_SECONDS:
            text += f"; nothing logged for {duration(self._silent)}"
        return text

    @property
    def _silent(self) -> float:
        """Seconds since something was logged."""
        return time.time() - self.modified

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The recipe's sections as values; empty without a readable recipe."""
        with contextlib.suppress(yaml.YAMLError, RecursionError):
            return mapping(yaml.safe_load(self.recipe or ""))
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
    metrics = folder / METRICS
    facts = _facts(folder)
    if _is_script(folder) and not metrics.exists():
        known = next((state.get("log_history") for state in _states(folder)), None)
        rows = [row for row in known if isinstance(row, dict)] if isinstance(known, list) else []
        rows = [row for row in rows if number(row.get("step")) is not None]
        modified, notes = (folder / CARD_FACTS).stat().st_mtime, list[str]()
    elif begun or (metrics.is_file() and metrics.stat().st_size > 0):
        rows, modified, notes = _metrics(metrics)
    else:
        rows, modified, notes = [], time.time(), []
    alarms, left_out = _rows_of(folder / "alarms.jsonl")
    notes += [f"alarms.jsonl: {lines_text(left_out)} left out"] if left_out else []
    results = _results(folder, notes) if scored else None
    recipe = None
    with contextlib.suppress(OSError):
        recipe = (folder / "recipe.yaml").read_text(encoding="utf-8", errors="replace")
    log = RunLog(folder, facts, tuple(rows), tuple(alarms), recipe, results, None, modified, tuple(notes))
    # Steps in all: as recorded, as the recipe says, or as a checkpoint knows.
    planned = (log.facts.get("planned_steps"), mapping(log.settings.get("train")).get("max_steps"))
    steps = (*planned, next((state.get("max_steps") for state in _states(folder)), None))
    return replace(log, planned=next((one for one in steps if isinstance(one, int) and one > 0), None))


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


def names_of(runs: Sequence[RunLog]) -> list[str]:
    """The folders' names; with as much of the path as tells them apart."""
    parts = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(run.path) for run in runs]


def number(value: Any) -> float | None:  # noqa: ANN401 (JSON)
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with contextlib.suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def mapping(value: Any) -> Mapping[str, Any]:  # noqa: ANN401 (JSON)
    """The value, or an empty mapping where it is none."""
    return value if isinstance(value, Mapping) else {}


def lines_text(count: int) -> str:
    """How many lines of a log cannot be read."""
    return "1 malformed line" if count == 1 else f"{count:,} malformed lines"


def _is_script(folder: Path) -> bool:
    """Whether a folder is the output folder of a script's trainer."""
    return (folder / CARD_FACTS).is_file() and not (folder / RUN_FACTS).exists()


def _facts(folder: Path) -> Mapping[str, Any]:
    if (folder / RUN_FACTS).exists():
        return Run.read(folder).facts
    if not _is_script(folder):
        if not (folder / METRICS).exists():
            raise RunFolderError(f"holds no run: it has neither {RUN_FACTS} nor {METRICS}", str(folder))
        return {}
    from perl.hub.card.facts import read_run_facts  # with PEFT, which a recipe's run can be watched without

    try:
        known = asdict(read_run_facts((folder / CARD_FACTS).read_bytes()))
    except (OSError, PerlError) as error:
        raise RunFolderError(first_line(error), str(folder)) from None
    facts = {name: known[name] for name in _FACTS if known.get(name) is not None}
    return facts | ({"steps": known["step"]} if known["step"] is not None else {})


def _states(folder: Path) -> Iterator[Mapping[str, Any]]:
    """What transformers wrote into the checkpoints of a training, those of a recipe's run too, the newest first."""
    found = [*(folder / "checkpoints").glob("checkpoint-*"), *folder.glob("checkpoint-*")]
    numbered = [(int(number), path) for path in found if (number := path.name.removeprefix("checkpoint-")).isdigit()]
    for _, path in sorted(numbered, reverse=True):
        with contextlib.suppress(OSError, ValueError):
            if (path / _STATE).stat().st_size <= _LARGEST_STATE:
                yield parse_mapping((path / _STATE).read_bytes(), finite=False)


def _metrics(path: Path) -> tuple[list[dict[str, Any]], float, list[str]]:
    """Rows, when they were written, and what is to be said of them."""
    if not path.exists():
        raise RunFolderError(f"no step is logged yet: it has no {METRICS}", str(path.parent))
    try:
        rows, left_out = _rows_of(path)
        modified = path.stat().st_mtime
    except OSError as error:
        raise RunFolderError(f"cannot be read: {error.strerror or error}", str(path)) from None
    with_steps = [row for row in rows if number(row.get("step")) is not None]
    left_out += len(rows) - len(with_steps)
    if not with_steps:
        what = f"is malformed: none of its {left_out:,} lines is a row" if left_out else "no step is logged yet"
        raise RunFolderError(what, str(path))
    return with_steps, modified, [f"{METRICS}: {lines_text(left_out)} left out"] if left_out else []


def _rows_of(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a log, and how many lines are none; a last line that is being written does not count."""
    if not path.exists():
        return [], 0
    text = read_regular(path).decode("utf-8", errors="replace")
    whole, _, rest = text.rpartition("\n")
    lines = [line for line in whole.split("\n") if line.strip()]
    rows = [row for line in lines for row in log_rows(line)]
    last = log_rows(rest)
    return rows + last, len(lines) - len(rows) + bool(rest.strip() and not last and not lines)


def _results(folder: Path, notes: list[str]) -> "Results | None":
    if not (folder / "eval" / "results.json").exists():
        return None
    from perl.evaluation.scoring.results import (
        read_results,  # with torch, which a run that is not scored yet can do without
    )

    try:
        return read_results(folder / "eval" / "results.json")
    except PerlError as error:
        notes.append(f"eval/results.json: {error.mistakes[0].message}")
        return None
