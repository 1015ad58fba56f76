"""Intervals of mean scores with SciPy's beta quantiles, and how far apart chance takes two measurements of one policy.

A mean of scores of 0..1 has the interval of the beta distribution with mean and variance of the Bayesian bootstrap of
the scores and one more at the end of the range (Gaffke 2005): n + 1 values of population variance v give v / (n + 2).
"""

import math
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


def redrawn_reach(then: float, k_then: int, now: Rows) -> float:
    """How far apart chance takes a score and the same problems' completions drawn anew, 99 times in 100.

    The variance of one completion of a problem is p(1-p), unbiased p(1-p) k/(k-1); a mean of n k completions is taken
    for one of so many scores. The ends toward each other are put together as the root of the sum of the squares.
    """
    count, k = len(now), len(now[0])
    of_one = sum(sum(row) / k * (1 - sum(row) / k) * k / (k - 1) for row in now) / count**2
    mean = sum(map(sum, now)) / (count * k)
    found = []
    for score, draws in ((mean, k), (then, k_then)):
        many = count * draws
        variance = min(of_one / draws * (many - 1), score * (1 - score))
        found.append(ends(score, variance, many, 0.005))
    toward = (0, 1) if then < mean else (1, 0)
    return math.hypot(mean - found[0][toward[0]], then - found[1][toward[1]])


def redrawn_differs(base: tuple[float, int, Rows], adapter: tuple[float, int, Rows]) -> bool:
    """Whether a score, its base's or the gain is further from what was drawn anew than chance takes them."""
    (of_base, base_reach), (of_adapter, reach) = (
        (sum(map(sum, now)) / (len(now) * len(now[0])) - then, redrawn_reach(then, k, now))
        for then, k, now in (base, adapter)
    )
    gain = abs(of_adapter - of_base) > math.hypot(reach, base_reach)
    return gain or abs(of_adapter) > reach or abs(of_base) > base_reach
