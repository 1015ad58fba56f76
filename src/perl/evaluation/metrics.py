"""Scores from verdicts.

(problems, k) rights and wrongs -> avg@k and its standard error

Pure functions. Knows nothing of models, prompts or files.
"""

import math
import statistics
from collections.abc import Sequence


def average_at_k(right: Sequence[Sequence[bool]]) -> float:
    """Mean over problems of the share of completions that are right (avg@k).

    Args:
        right: One row a problem, k entries each.

    Raises:
        ValueError: There is no problem.
    """
    return statistics.fmean(statistics.fmean(row) for row in right)


def standard_error(right: Sequence[Sequence[bool]]) -> float:
    """Standard error of avg@k, clustered by problem: completions of one problem are not independent.

    Args:
        right: One row a problem, k entries each.

    Returns:
        NaN for fewer than two problems.

    Source: Miller 2024, "Adding error bars to evals", arXiv:2411.00640, section 3.2 (equal clusters: the standard
        error of the problems' means).
    """
    if len(right) < 2:
        return math.nan
    means = [statistics.fmean(row) for row in right]
    return statistics.stdev(means) / math.sqrt(len(means))
