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
from perl.zoo.intervals import intervals

_HALVINGS = 80
_SQRT2 = math.sqrt(2)
_LEVEL = 0.95
_STUDIES = 2_000


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


@dataclass(frozen=True)
class Coverage:
    """How often intervals hold the truth, in studies that were made up.

    Attributes:
        share: Of the studies whose 95 % interval holds the true difference.
        stderr: Of the share, as of a binomial one.
        studies: How many had an interval.
    """

    share: float
    stderr: float
    studies: int

    def __str__(self) -> str:
        """``94.8 ± 0.5 % of 2,000``."""
        return f"{100 * self.share:.1f} ± {100 * self.stderr:.1f} % of {self.studies:,}"


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


def coverage_by_problem(
    before: Sequence[float], after: Sequence[float], k: int, *, studies: int = _STUDIES, seed: int = 0
) -> Coverage:
    """How often the interval of a difference paired by problem holds the truth, were it asked again.

    Problems are drawn from those that were asked, and completions of each by the shares that were right: the true
    difference is then the one that was observed.

    Args:
        before: Share of right completions of each problem, 0..1.
        after: Of the other policy, the same problems.
        k: Completions of a problem.
        studies: That are made up.
        seed: Of the random numbers.
    """
    generator = numpy.random.default_rng(seed)
    chances_PX = numpy.stack([numpy.asarray(before, float), numpy.asarray(after, float)], axis=1)
    problems, truth = len(chances_PX), float(numpy.mean(chances_PX[:, 1] - chances_PX[:, 0]))
    asked_SPX = chances_PX[generator.integers(0, problems, size=(studies, problems))]
    scores_SPX = generator.binomial(k, asked_SPX) / k
    differences_SP = scores_SPX[:, :, 1] - scores_SPX[:, :, 0]
    mean_S = differences_SP.mean(axis=1)
    error_S = differences_SP.std(axis=1, ddof=1) / math.sqrt(problems)
    low_S, high_S = intervals(mean_S, error_S, problems, _LEVEL, difference=True)
    return _coverage([bool(held) for held in (low_S - 1e-12 <= truth) & (truth <= high_S + 1e-12)])


def coverage_by_seed(
    means: tuple[float, float],
    spread: float,
    seeds: int,
    completions: int,
    *,
    studies: int = _STUDIES,
    seed: int = 0,
) -> Coverage:
    """How often the interval of a difference paired by seed holds the truth, in studies of this size and spread.

    The true score of each seed is drawn from a beta distribution, and its completions by that score.

    Args:
        means: True scores of two settings, between 0 and 1.
        spread: Standard deviation of a setting's true score over seeds.
        seeds: Of each setting, at least two.
        completions: That each run is asked for: problems times k.
        studies: That are made up.
        seed: Of the random numbers.
    """
    generator = numpy.random.default_rng(seed)
    scores = []
    for mean in means:
        size = max(mean * (1 - mean) / max(spread, 1e-9) ** 2 - 1, 1e-3)
        true_SE = generator.beta(mean * size, (1 - mean) * size, size=(studies, seeds))
        scores.append(generator.binomial(completions, true_SE) / completions)
    found = [
        paired_by_seed(dict(enumerate(map(float, one))), dict(enumerate(map(float, other))))
        for one, other in zip(*scores, strict=True)
    ]
    truth = means[1] - means[0]
    return _coverage([one.low <= truth <= one.high for one in found if one is not None and not math.isnan(one.low)])


def _coverage(held: Sequence[bool]) -> Coverage:
    share = statistics.fmean(held) if held else math.nan
    error = math.sqrt(share * (1 - share) / len(held)) if held else math.nan
    return Coverage(share, error, len(held))
