"""A run's logs, whose last line a kill may have cut short.

rows -> file, a JSON object a line; file, text -> rows
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perl.run.files import write_text

_LARGEST_LOGGED = 2**63


def rewind_log(log: Path, step: int) -> None:
    """Drops what was logged after a step; a file that is absent stays so."""
    if log.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        write_text(log, "".join(f"{line}\n" for line in lines if _step_of(line) <= step))


def append_row(log: Path, row: Mapping[str, Any]) -> None:
    """Adds a row to a log, as one line; what JSON has no number for is null."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_finite(row), ensure_ascii=False) + "\n")


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
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and _can_be_counted(row):
            rows.append(row)
    return rows


_MEANS = ("reward", "teacher/kl")


def _can_be_counted(row: Mapping[str, Any]) -> bool:
    """Whether steps, means and tokens are numbers, where they are there; a mean may be NaN."""
    for name in ("step", *_MEANS, "num_tokens"):
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            return False
        if value is not None and not abs(value) < _LARGEST_LOGGED and not (name in _MEANS and math.isnan(value)):
            return False
    return True


def _step_of(line: str) -> float:
    """The step of a log line; a line that a kill cut short counts as never logged."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return float("inf")
