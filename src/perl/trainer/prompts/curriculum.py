"""Easy prompts first: how many of the data, sorted by a column, may be drawn at a point of a training.

column of numbers, share of the training -> which prompts may be drawn
"""

import math
from collections.abc import Sequence
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
    """

    rank_N: NDArray[np.int64]
    start: float
    until: float

    def allowed(self, progress: float) -> NDArray[np.bool_]:
        """(N,) which prompts may be drawn; the share grows evenly.

        Args:
            progress: Share of the training that is behind, 0 to 1.
        """
        grown = self.start + (1 - self.start) * min(1.0, progress / self.until if self.until else 1.0)
        return self.rank_N < max(1, math.ceil(grown * len(self.rank_N)))


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
    for row, value in enumerate(values):
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not plain or not math.isfinite(value):
            what = f"column {name!r} holds {value!r} in row {row + 1}, which is not a finite number"
            raise DataError(what, where, "a column of numbers, the smallest for the easiest")
    return np.array(values, np.float64) * (1 if name == written else -1)


def ranked(numbers_N: NDArray[np.float64]) -> NDArray[np.int64]:
    """(N,) place of each number among all, equal ones as they come."""
    rank_N = np.empty(len(numbers_N), np.int64)
    rank_N[np.argsort(numbers_N, kind="stable")] = np.arange(len(numbers_N))
    return rank_N
