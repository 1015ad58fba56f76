"""Settings that were trained with several seeds: what they score, and whether two of them differ.

scores of two settings, seed by seed -> Difference; how small a one is shown

Problems say how sure the score of one adapter is; seeds say how sure the score of a way to train is. A new training
would have another seed and be asked the same problems: what is inferred here holds for these problems.

Pure functions.
"""

import math
import statistics
from collections.abc import Mapping

from scipy.special import nctdtrinc, stdtr, stdtrit

from perl.evaluation.scoring.metrics import SHOWN_IN, SMALL_P, Difference, error_of_mean


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

    Source: Student 1908, Biometrika 6. Intervals by problem are those of
        :func:`perl.evaluation.scoring.metrics.paired_difference`, bounded by what scores can be; over three to ten
        seeds those would be too wide to show anything.
    """
    seeds = sorted(reference.keys() & other.keys())
    if len(seeds) < 2:
        return None
    differences = [other[seed] - reference[seed] for seed in seeds]
    mean, stderr = statistics.fmean(differences), error_of_mean(differences)
    if stderr <= 1e-12 * max(1.0, abs(mean)):  # but for rounding they are the same
        return Difference(mean, 0.0, math.nan, math.nan, math.nan)
    freedom = len(seeds) - 1
    away = float(stdtrit(freedom, (1 + 0.95) / 2)) * stderr
    return Difference(mean, stderr, mean - away, mean + away, float(2 * stdtr(freedom, -abs(mean / stderr))))


def smallest_difference(stderr: float, seeds: int, tests: int = 1) -> float:
    """The smallest true difference, paired by seed, that is shown in 80 of 100 studies.

    The standard error is taken for the true one: what is estimated from few seeds may be far from it.

    Args:
        stderr: Of the mean difference.
        seeds: At least two.
        tests: Differences that are looked at together: the level is that of Holm's first step, 0.05 / tests.

    Source: Johnson and Welch 1940, Biometrika 31: the t of a study whose true difference is d standard errors is
        noncentral, (Z + d) / S, with S the root of a chi-squared over its degrees of freedom. A difference that is
        shown with the wrong sign, which is rare, is not counted.
    """
    freedom = seeds - 1
    return float(stderr * nctdtrinc(freedom, 1 - SHOWN_IN, stdtrit(freedom, 1 - SMALL_P / tests / 2)))
