"""A run's logs, whose last line a kill may have cut short, and what a logged quantity was at the begin and at the end.

rows -> file, a JSON object a line; file, text -> rows; values of steps -> first mean, last mean
"""

import json
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perl.run.files import named

_LARGEST_LOGGED = 2**63
_STEP_FIRST = re.compile(rb'\{"step": (\d{1,18}),')
_MEANS = ("reward", "teacher/kl")
# Of the means at both ends.
_MOST_STEPS = 10


def rewind_log(log: Path, step: int) -> None:
    """Drops what was logged after a step; a file that is absent stays so.

    A log may be larger than memory: it is read line by line, and only written where there is something to drop.
    """
    if not log.is_file():
        return
    with log.open("rb") as file:
        if all(_stays(line, step) for line in file):
            return
        file.seek(0)
        staged = log.with_name(f".{log.name}.tmp")
        with staged.open("wb") as shorter:
            shorter.writelines(line for line in file if _stays(line, step))
    staged.replace(log)


def _stays(line: bytes, step: int) -> bool:
    """Whether a line is whole and was logged by a step."""
    return line.endswith(b"\n") and logged_step(line) <= step


def logged_step(line: bytes) -> float:
    """The step of a log's line, without reading all of it where it begins with the step; infinite if it has none.

    A line that a kill has cut short has none.
    """
    found = _STEP_FIRST.match(line) if line.rstrip().endswith(b"}") else None  # as :func:`append_row` writes it
    try:
        return int(found[1]) if found else float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return math.inf


def append_row(log: Path, row: Mapping[str, Any]) -> None:
    """Adds a row to a log, as one line, below a line that a kill has cut short; what JSON has no number for is null."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with named(log), log.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        whole = file.read() in (b"", b"\n")
        line = json.dumps(_finite(row), ensure_ascii=False, default=_plain)
        file.write(f"{'' if whole else chr(10)}{line}\n".encode())


def _plain(value: Any) -> Any:  # noqa: ANN401 (of a user's reward, or a library's number)
    """What JSON does not know, as a number where it is one, else as text."""
    number = value.item() if getattr(value, "ndim", None) == 0 else None
    return _finite(number) if isinstance(number, int | float) else str(value)


def _finite(value: Any) -> Any:  # noqa: ANN401 (JSON values)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log file; none where there is no file."""
    return log_rows(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else []


def log_rows(text: str) -> list[dict[str, Any]]:
    """The rows of a log; a malformed line is left out, as one that a kill cut short."""
    rows = []
    for line in text.split("\n"):  # not splitlines: a text may hold U+2028 and its like, which end no row
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and _can_be_counted(row):
            rows.append(row)
    return rows


def _can_be_counted(row: Mapping[str, Any]) -> bool:
    """Whether steps, means and tokens are numbers, where they are there; a mean may be NaN."""
    for name in ("step", *_MEANS, "num_tokens"):
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            return False
        if value is not None and not abs(value) < _LARGEST_LOGGED and not (name in _MEANS and math.isnan(value)):
            return False
    return True


@dataclass(frozen=True)
class Mean:
    """A mean over steps that follow each other.

    Attributes:
        value: The mean.
        error: Its standard error over the steps; NaN of a single one.
        steps: How many.
    """

    value: float
    error: float
    steps: int

    def __str__(self) -> str:
        """As ``0.594 ± 0.021``."""
        return f"{self.value:.3f}" if math.isnan(self.error) else f"{self.value:.3f} ± {self.error:.3f}"


def ends(values: Sequence[float]) -> tuple[Mean, Mean] | None:
    """The means of the first and of the last steps: ten of each, or half of the steps where there are fewer.

    Args:
        values: Of the steps, in order.

    Returns:
        None without a value.
    """
    if not values:
        return None
    steps = max(1, min(_MOST_STEPS, len(values) // 2))
    return _mean(values[:steps]), _mean(values[-steps:])


def ends_text(values: Sequence[float]) -> str:
    """Both, with how many steps they are of: ``0.594 ± 0.021 -> 0.991 ± 0.003 (means of 10 steps)``."""
    found = ends(values)
    if found is None:
        return "not scored"
    first, last = found
    of_steps = f"means of {first.steps} steps" if first.steps > 1 else "first and last step"
    return f"{first} -> {last} ({of_steps})"


def _mean(values: Sequence[float]) -> Mean:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Mean(statistics.fmean(values), error, len(values))
