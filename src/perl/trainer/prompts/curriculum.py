"""Easy prompts first: how many of the data, sorted by a column, may be drawn at a point of a training.

column of numbers, share of the training -> which prompts may be drawn
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perl.errors import DataError, did_you_mean


@dataclass(frozen=True)
class Curriculum:
    """The data from its easiest prompt to its hardest.

    Attributes:
        rank_N: Place of each prompt in that order, from 0.
        start: Share of the prompts that may be drawn at the begin.
        until: Share of the training after which all may be.
        least: Prompts that may be drawn in any case: those of a generation batch.
    """

    rank_N: NDArray[np.int64]
    start: float
    until: float
    least: int = 1

    def allowed(self, progress: float) -> NDArray[np.bool_]:
        """(N,) which prompts may be drawn; the share grows evenly.

        Args:
            progress: Share of the training that is behind, 0 to 1.
        """
        grown = self.start + (1 - self.start) * min(1.0, progress / self.until if self.until else 1.0)
        return self.rank_N < max(self.least, math.ceil(grown * len(self.rank_N)))


def difficulties(columns: Sequence[str], written: str, values_of: Any, where: str) -> NDArray[np.float64]:  # noqa: ANN401 (of any data)
    """(N,) numbers by which prompts are sorted, the smallest first.

    Args:
        columns: Of the data.
        written: A column's name; with a minus before it the largest number comes first.
        values_of: Gives a column's values by its name.
        where: Names the setting in errors.

    Raises:
        DataError: There is no such column, or a value of it is no finite number.
    """
    name = written if written in columns else written.removeprefix("-")
    if name not in columns:
        raise DataError(f"the data has no column {name!r}", where, did_you_mean(name, sorted(columns)))
    values = list(values_of(name))
    numbers_N = np.array([_number(value) for value in values], np.float64)
    if not np.isfinite(numbers_N).all():
        row = int(np.isfinite(numbers_N).argmin())
        what = f"column {name!r} holds {values[row]!r} in row {row + 1}, which is not a finite number"
        raise DataError(what, where, "a column of numbers, the smallest for the easiest")
    return numbers_N * (1 if name == written else -1)


def _number(value: Any) -> float:  # noqa: ANN401 (of any data)
    """The number that a value is or writes, as a CSV file's text does; not a number: it is something else."""
    with suppress(TypeError, ValueError):
        return math.nan if isinstance(value, bool) else float(value)
    return math.nan


def ranked(numbers_N: NDArray[np.float64]) -> NDArray[np.int64]:
    """(N,) place of each number among all, equal ones as they come."""
    rank_N = np.empty(len(numbers_N), np.int64)
    rank_N[np.argsort(numbers_N, kind="stable")] = np.arange(len(numbers_N))
    return rank_N
