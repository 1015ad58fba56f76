"""Metrics, intervals and tests of significance against counting every case and integrating by small steps."""

import itertools
import math
import statistics

import numpy
import pytest

from perl.evaluation.scoring.metrics import error_of_mean, majority_by_problem, paired_difference, pass_at_k_by_problem
from perl.zoo.intervals import interval, intervals

ROWS = [[True] * right + [False] * (9 - right) for right in range(10)]


def binomial(count: int, n: int, p: float) -> float:
    return math.comb(n, count) * p**count * (1 - p) ** (n - count)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_pass_at_k_of_all_is_the_mean_of_leaving_each_completion_out(k):
    for row in ROWS:
        left_out = pass_at_k_by_problem([row[:i] + row[i + 1 :] for i in range(len(row))], k)
        assert pass_at_k_by_problem([row], k)[0] == pytest.approx(statistics.fmean(left_out), abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_unbiased(k):
    """Over all outcomes of 7 completions that are right with chance p it is 1 - (1 - p)^k."""
    for p in (0.05, 0.4, 0.9):
        mean = sum(binomial(c, 7, p) * pass_at_k_by_problem([[True] * c + [False] * (7 - c)], k)[0] for c in range(8))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_the_majority_is_the_mean_over_every_draw_of_a_vote_among_the_most_frequent():
    for answers in itertools.product("abc", repeat=4):
        votes = {answer: answers.count(answer) for answer in set(answers)}
        first = [answer for answer, count in votes.items() if count == max(votes.values())]
        expected = first.count("a") / len(first)
        (found,) = majority_by_problem([list(answers)], [[answer == "a" for answer in answers]])
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_a_paired_difference_is_the_difference_of_the_means_with_the_error_of_its_own_values(seed):
    draws = numpy.random.default_rng(seed)
    base, adapter = (draws.random((12, 3)) < chance for chance in (0.4, 0.6))
    found = paired_difference(base.tolist(), adapter.tolist())
    assert found.mean == pytest.approx(adapter.mean() - base.mean(), abs=1e-12)
    by_problem = adapter.mean(axis=1) - base.mean(axis=1)
    assert error_of_mean(by_problem.tolist()) == pytest.approx(by_problem.std(ddof=1) / math.sqrt(12), abs=1e-12)


@pytest.mark.parametrize("n", [2, 5, 20])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_intervals_of_rights_hold_every_true_share_as_often_as_they_say(n, level):
    shares = [right / n for right in range(n + 1)]
    errors = [math.sqrt(share * (1 - share) / (n - 1)) for share in shares]
    low, high = intervals(shares, errors, n, level)
    for p in numpy.linspace(0.005, 0.995, 199):
        held = sum(binomial(c, n, p) for c in range(n + 1) if low[c] <= p <= high[c])
        assert max(level - held, 0) <= 1e-9


@pytest.mark.parametrize("scores", [[0.2, 0.4, 0.9, 0.5], [0.0, 1.0, 1.0, 0.25, 0.75], [0.1, 0.1, 0.1, 0.9]])
def test_the_lower_end_has_its_tail_below_it_by_integrating_the_density(scores):
    """The beta distribution with the moments of a flat Dirichlet's weights on the scores and one 0 more."""
    n, given = len(scores), [*scores, 0.0]
    mean = statistics.fmean(given)
    variance = statistics.pvariance(given) / (n + 2)
    size = mean * (1 - mean) / variance - 1
    a, b = mean * size, (1 - mean) * size
    low, _ = interval(statistics.fmean(scores), statistics.stdev(scores) / math.sqrt(n), n)
    # In u = x^a / a the density has no pole at 0.
    x_below = (numpy.linspace(0, low**a, 200_001)[1:] - low**a / 400_000) ** (1 / a)
    x_all = (numpy.linspace(0, 1, 400_001)[1:] - 1 / 800_000) ** (1 / a)
    below, whole = ((1 - x_below) ** (b - 1)).mean() * low**a, ((1 - x_all) ** (b - 1)).mean()
    assert below / whole == pytest.approx(0.025, rel=2e-3)


def test_an_interval_of_wrongs_is_the_mirror_of_that_of_rights():
    for mean, stderr, count in [(0.3, 0.1, 10), (0.0, 0.0, 7), (0.95, 0.02, 100)]:
        low, high = interval(mean, stderr, count)
        assert interval(1 - mean, stderr, count) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_an_interval_of_a_difference_is_that_of_a_score_stretched_to_twice_the_range():
    for mean, stderr, count in [(0.1, 0.05, 30), (-0.6, 0.1, 12), (1.0, 0.0, 5)]:
        low, high = interval((mean + 1) / 2, stderr / 2, count)
        stretched = (2 * low - 1, 2 * high - 1)
        assert interval(mean, stderr, count, difference=True) == pytest.approx(stretched, abs=1e-12)


def test_a_higher_level_is_a_wider_interval_and_more_problems_a_narrower_one():
    levels = [interval(0.4, 0.1, 20, level) for level in (0.5, 0.8, 0.95, 0.99)]
    widths = [high - low for low, high in levels]
    assert widths == pytest.approx(sorted(widths))
    by_count = [interval(0.5, 0.5 / math.sqrt(n - 1), n) for n in (5, 20, 80, 320)]
    assert [high - low for low, high in by_count] == pytest.approx(sorted((h - w for w, h in by_count), reverse=True))
    low, high = by_count[-1]
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(320), rel=0.1)  # the normal approximation
