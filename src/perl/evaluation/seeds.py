"""Settings that were trained with several seeds: what they score, and whether two of them differ.

score of each seed -> mean with the error over seeds; scores of two settings -> Difference paired by seed

Problems say how sure the score of one adapter is; seeds say how sure the score of a way to train is. A new training
would have another seed and be asked the same problems: what is inferred here holds for these problems.

Pure functions.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy

from perl.evaluation.metrics import SHOWN_IN, SMALL_P, Difference, error_of_mean

_HALVINGS = 80
_SQRT2 = math.sqrt(2)
_LEVEL = 0.95


@dataclass(frozen=True)
class SeedMean:
    """What a setting scored.

    Attributes:
        mean: Over its seeds.
        stderr: Standard error of the mean, from how seeds differ; NaN of a single one.
        seeds: How many.
    """

    mean: float
    stderr: float
    seeds: int


def mean_over_seeds(scores: Sequence[float]) -> SeedMean:
    """The mean of a setting's scores, one a seed, with its error.

    Raises:
        ValueError: There is none.
    """
    return SeedMean(statistics.fmean(scores), error_of_mean(scores), len(scores))


def paired_by_seed(reference: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """How much better a setting is than another one, seed by seed.

    Seeds decide the order of problems and the first weights, so that two runs of one seed have something in common.

    Args:
        reference: Seed -> score.
        other: Likewise; seeds that only one of them has do not count.

    Returns:
        Mean, standard error, Student's 95 % interval and the p value of the paired t test, with one degree of freedom
        less than there are seeds; None for fewer than two common seeds. Where all seeds differ by the same there is no
        spread to take an error from, which is no certainty: interval and p value are NaN then.

    Source: Student 1908, Biometrika 6. Intervals by problem (:func:`perl.evaluation.metrics.paired_difference`) are
        bounded by what scores can be; over three to ten seeds those would be too wide to show anything.
    """
    seeds = sorted(reference.keys() & other.keys())
    if len(seeds) < 2:
        return None
    differences = [other[seed] - reference[seed] for seed in seeds]
    mean, stderr = statistics.fmean(differences), error_of_mean(differences)
    if stderr <= 1e-12 * max(1.0, abs(mean)):  # but for rounding they are the same
        return Difference(mean, 0.0, math.nan, math.nan, math.nan)
    freedom = len(seeds) - 1
    away = student_quantile(_LEVEL, freedom) * stderr
    return Difference(mean, stderr, mean - away, mean + away, 1 - student_within(mean / stderr, freedom))


def smallest_difference(stderr: float, seeds: int, tests: int = 1) -> float:
    """The smallest true difference, paired by seed, that is shown in 80 of 100 studies.

    The standard error is taken for the true one: what is estimated from few seeds may be far from it.

    Args:
        stderr: Of the mean difference.
        seeds: At least two.
        tests: Differences that are looked at together: the level is that of Holm's first step, 0.05 / tests.

    Source: Johnson and Welch 1940, Biometrika 31: the t of a study whose true difference is d standard errors is
        noncentral, (Z + d) / S, with S the root of a chi-squared over its degrees of freedom.
    """
    freedom = seeds - 1
    shown_from = student_quantile(1 - SMALL_P / tests, freedom)
    return stderr * _least(lambda away: _power(away, shown_from, freedom), SHOWN_IN)


def _power(away: float, shown_from: float, freedom: int) -> float:
    """Chance that |t| is beyond a value where the true difference is so many standard errors away."""
    root = numpy.linspace(0, 1 + 8 / math.sqrt(freedom), 801)[1:]
    constant = math.log(2) + freedom / 2 * math.log(freedom / 2) - math.lgamma(freedom / 2)
    density = numpy.exp(constant + (freedom - 1) * numpy.log(root) - freedom * root**2 / 2)
    beyond = [
        (math.erfc((shown_from * s - away) / _SQRT2) + math.erfc((shown_from * s + away) / _SQRT2)) / 2
        for s in map(float, root)
    ]
    # The places begin above 0, where the density of one and of two degrees of freedom does not vanish.
    return float(numpy.trapezoid(density * numpy.array(beyond), root)) + _below(root[0], freedom)


def _below(root: float, freedom: int) -> float:
    """Chance that S is below the first place that is looked at, where any difference is shown."""
    return math.erf(root / _SQRT2) if freedom == 1 else 1 - math.exp(-(root**2)) if freedom == 2 else 0.0


def student_within(t: float, freedom: int) -> float:
    """Chance that Student's t lies between -|t| and |t|.

    Args:
        t: Any number.
        freedom: Degrees of freedom, at least 1.

    Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for i in range(2 + odd, freedom + 1, 2):  # a term for every two degrees
        total += term
        term *= cosine**2 * (i - 1) / i
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return min(1.0, inside)


def student_quantile(level: float, freedom: int) -> float:
    """The t that so large a share of Student's distribution lies within, on both sides.

    Args:
        level: Between 0 and 1.
        freedom: Degrees of freedom, at least 1.
    """
    return _least(lambda t: student_within(t, freedom), level)


def _least(grows: Callable[[float], float], level: float) -> float:
    """The least number above 0 at which a function that grows has reached a level."""
    low, high = 0.0, 1.0
    while grows(high) < level:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if grows(middle) >= level else (middle, high)
    return high
