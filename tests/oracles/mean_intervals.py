"""Intervals of mean scores with SciPy's beta quantiles, and how far apart chance takes two measurements of one policy.

A mean of scores of 0..1 has the interval of the beta distribution with mean and variance of the Bayesian bootstrap of
the scores and one more at the end of the range (Gaffke 2005): n + 1 values of population variance v give v / (n + 2).
"""

from collections.abc import Sequence

from scipy import stats

Rows = Sequence[Sequence[bool]]


def ends(mean: float, variance: float, count: int, tail: float = 0.025) -> tuple[float, float]:
    """Low and high, of so many scores with this mean and population variance."""
    return _low(mean, variance, count, tail), 1 - _low(1 - mean, variance, count, tail)


def _low(mean: float, variance: float, count: int, tail: float) -> float:
    if mean <= 0:
        return 0.0
    total = count + 1  # with one more, whose score is 0
    centre = count * mean / total
    square = count * (variance + mean**2) / total
    spread = (square - centre**2) / (total + 1)
    size = centre * (1 - centre) / spread - 1
    return float(stats.beta.ppf(tail, centre * size, (1 - centre) * size))


def difference_ends(base: Rows, adapter: Rows) -> tuple[float, float, float]:
    """Mean of the problems' differences, and both ends of its 95 % interval, within -1..1."""
    gaps = [sum(a) / len(a) - sum(b) / len(b) for b, a in zip(base, adapter, strict=True)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    low, high = ends((mean + 1) / 2, variance / 4, len(gaps))
    return mean, 2 * low - 1, 2 * high - 1
