"""Intervals hold the true mean 93 times of 100 at least; of rights and wrongs they are Clopper and Pearson's."""

import itertools
import math
import statistics

import interval_coverage as coverage
import numpy
import pytest

from perl.zoo.intervals import Estimate, interval, intervals


def at_most(right: int, count: int, chance: float) -> float:
    """Chance of at most so many rights of so many problems."""
    return math.fsum(math.comb(count, i) * chance**i * (1 - chance) ** (count - i) for i in range(right + 1))


def error_of(right: int, count: int) -> float:
    share = right / count
    return math.sqrt(share * (1 - share) / (count - 1))


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
@pytest.mark.parametrize(
    ("right", "count"), [(0, 30), (1, 30), (26, 30), (29, 30), (30, 30), (1, 2), (50, 100), (3, 500)]
)
def test_of_rights_and_wrongs_the_ends_are_where_so_many_rights_become_unlikely(right, count, level):
    """Clopper and Pearson's: at an end, as many rights or more extreme have half of what the level leaves."""
    low, high = interval(right / count, error_of(right, count), count, level)
    tail = (1 - level) / 2
    if right > 0:
        assert 1 - at_most(right - 1, count, low) == pytest.approx(tail, rel=1e-8)
    else:
        assert low == 0.0
    if right < count:
        assert at_most(right, count, high) == pytest.approx(tail, rel=1e-8)
    else:
        assert high == 1.0


def bootstrap_limit(scores: list[float], quantile: float, worst: float) -> float:
    """The same two moments from a bootstrap with weights drawn from a flat Dirichlet, one more problem at the end."""
    generator = numpy.random.default_rng(1)
    scores_P = numpy.array([*scores, worst])
    means_R = generator.dirichlet(numpy.ones(len(scores_P)), size=400_000) @ scores_P
    mean, size = means_R.mean(), means_R.mean() * (1 - means_R.mean()) / means_R.var() - 1
    return float(numpy.quantile(generator.beta(mean * size, (1 - mean) * size, 4_000_000), quantile))


@pytest.mark.parametrize("scores", [[0.25, 0.5, 0.75, 1.0, 1.0], [0.5] * 12, [0.0] * 9 + [0.125]])
def test_of_means_the_ends_are_quantiles_of_the_bootstrap_with_one_problem_more(scores):
    low, high = interval(float(numpy.mean(scores)), numpy.std(scores, ddof=1) / len(scores) ** 0.5, len(scores))
    assert low == pytest.approx(bootstrap_limit(scores, 0.025, 0.0), abs=2e-3)
    assert high == pytest.approx(bootstrap_limit(scores, 0.975, 1.0), abs=2e-3)


def test_no_interval_is_a_point_nor_leaves_what_scores_can_be():
    means, errors = (0.0, 1e-9, 0.5, 1 - 1e-9, 1.0), (0.0, 1e-12, 0.1, 5.0)
    for mean, stderr, count in itertools.product(means, errors, (2, 30, 9000)):
        low, high = interval(mean, stderr, count)
        assert 0.0 <= low <= mean <= high <= 1.0
        assert high - low > 1e-5
    low, high = interval(0.0, 0.0, 30, difference=True)  # base and adapter did the same on all problems
    assert -0.1 < low < -0.05
    assert high == pytest.approx(-low)
    assert interval(1.0, 0.0, 30, difference=True)[1] == 1.0


def test_an_error_too_large_for_so_many_problems_is_that_of_fewer():
    assert interval(0.2, 0.1, 500) == pytest.approx(interval(0.2, 0.1, 17))  # 0.2 * 0.8 / 16 is 0.1 squared
    assert interval(0.2, 9.0, 500) == pytest.approx(interval(0.2, 0.4, 2))


def test_where_scores_spread_the_interval_is_about_students():
    low, high = interval(0.5, 0.02, 500)
    assert (high - low) / (2 * 1.9647 * 0.02) == pytest.approx(1.0, abs=0.03)


def test_there_is_no_interval_without_an_error():
    for stderr, count in ((0.1, 1), (0.1, 0), (math.nan, 10)):
        assert all(math.isnan(end) for end in interval(0.5, stderr, count))


def test_many_at_once_are_the_same_as_one_by_one():
    means, errors = [0.0, 0.2, 0.97, 1.0], [0.0, 0.03, 0.001, 0.0]
    low_E, high_E = intervals(means, errors, 40)
    each = [interval(mean, error, 40) for mean, error in zip(means, errors, strict=True)]
    assert list(zip(low_E, high_E, strict=True)) == [pytest.approx(ends) for ends in each]


@pytest.mark.parametrize(("lower", "upper"), [(0.0, 1.0), (0.5, 1.0), (0.0, 0.5), (0.25, 1.0), (0.9, 0.0), (0.5, 0.53)])
@pytest.mark.parametrize("count", [30, 100])
def test_of_every_population_with_two_scores_93_of_100_intervals_hold_the_mean(lower, upper, count):
    """Counted, not drawn: every share of the second score, every number of problems that have it."""
    number_S = numpy.arange(count + 1)
    share_S = number_S / count
    spread_S = abs(upper - lower) * numpy.sqrt(share_S * (1 - share_S) / (count - 1))
    low_S, high_S = intervals(lower + (upper - lower) * share_S, spread_S, count)
    ways_S = numpy.array([math.comb(count, number) for number in number_S], float)
    for share in numpy.linspace(0.001, 0.999, 999):
        truth = lower + (upper - lower) * share
        chance_S = ways_S * share**number_S * (1 - share) ** (count - number_S)
        assert chance_S[(low_S - 1e-9 <= truth) & (truth <= high_S + 1e-9)].sum() >= 0.94


@pytest.mark.parametrize(("n", "k"), [(30, 1), (30, 32), (100, 16)])
def test_intervals_hold_for_few_problems_and_means_near_the_ends(n, k):
    """Some cells of benchmarks/interval_coverage.py, whose results are of all."""
    asked = [p for p in coverage.populations() if p.mean in (0.03, 0.5, 0.97)]
    cells = [coverage.measure(p, n, k, 400, seed) for seed, p in enumerate(asked)]
    assert {cell.kind for cell in cells} == {"score", "difference"}
    # 93 % less three standard errors of 400 draws; half the populations are beyond what Student's interval holds.
    assert min(cell.coverage for cell in cells) >= 0.93 - 3 * math.sqrt(0.93 * 0.07 / 400)
    assert statistics.fmean(cell.coverage for cell in cells) >= 0.95
    assert min(cell.coverage_t for cell in cells) < 0.8


@pytest.mark.parametrize(
    ("known", "text"),
    [
        ((0.412, 0.013, 0.39, 0.44), "41.2 ± 1.3"),
        ((1.0, 0.0, 0.884, 1.0), "100.0 [88.4, 100.0]"),
        ((0.9999, 0.0004, 0.99, 1.0), "100.0 [99.0, 100.0]"),
        ((1.0, 0.0, None, None), "100.0"),
        ((0.5, None, None, None), "50.0"),
    ],
)
def test_an_error_of_nothing_is_written_as_an_interval(known, text):
    assert str(Estimate(*known)) == text
