"""What a quantity was at the begin of a run and what it is at its end, as means of several steps with their errors.

values of steps -> first mean, last mean
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_STEPS = 10


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


def shown(values: Sequence[float]) -> str:
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
