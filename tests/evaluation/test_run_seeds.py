"""Differences paired by seed, how small a one is shown, and how often intervals hold the truth."""

import math

import numpy
import pytest
from scipy import stats

from perl.evaluation.comparing.compared import Scored, family_size
from perl.evaluation.scoring.metrics import SMALL_P, Difference, corrected
from perl.evaluation.scoring.seeds import paired_by_seed, smallest_difference

STUDIES = 2_000


def of_p(p_value: float) -> Difference:
    return Difference(0.1, 0.05, 0.01, 0.2, p_value)


def test_a_difference_is_paired_by_the_seeds_that_both_have():
    before = {0: 0.50, 1: 0.44, 2: 0.61, 3: 0.52, 9: 0.99}
    after = {3: 0.60, 2: 0.63, 1: 0.55, 0: 0.58, 7: 0.01}
    found = paired_by_seed(before, after)
    differences = numpy.array([0.08, 0.11, 0.02, 0.08])
    right = stats.ttest_1samp(differences, 0)
    low, high = right.confidence_interval(0.95)
    assert found.mean == pytest.approx(differences.mean())
    assert found.stderr == pytest.approx(differences.std(ddof=1) / 2)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.p_value == pytest.approx(right.pvalue)
    one = Scored("one", dict(enumerate([0.50, 0.44, 0.61, 0.52])))
    assert (one.score, one.stderr) == pytest.approx((0.5175, stats.sem([0.50, 0.44, 0.61, 0.52])))


def test_one_common_seed_or_seeds_that_differ_alike_give_no_interval():
    assert paired_by_seed({0: 0.5, 1: 0.6}, {1: 0.7, 2: 0.8}) is None
    alike = paired_by_seed({0: 0.5, 1: 0.6, 2: 0.7}, {0: 0.6, 1: 0.7, 2: 0.8})
    assert alike.mean == pytest.approx(0.1)
    assert all(map(math.isnan, (alike.low, alike.high, alike.p_value)))


def test_holms_correction_knows_from_how_many_differences_these_were_chosen():
    """The textbook's: p values 0.01, 0.04, 0.03, 0.005 become 0.03, 0.06, 0.06, 0.02."""
    p_values = [0.01, 0.04, 0.03, 0.005]
    found = [one.p_value for one in corrected([of_p(p) for p in p_values])]
    assert found == pytest.approx([0.03, 0.06, 0.06, 0.02])
    # Of five settings each with the best: 4 of the 10 that there are. By hand 10 x 0.005, 9 x 0.01, 8 x 0.03, 7 x 0.04.
    found = [one.p_value for one in corrected([of_p(p) for p in p_values], family_size(5, chosen=True))]
    assert found == pytest.approx([0.09, 0.28, 0.24, 0.05])
    assert family_size(5, chosen=False) == 4
    assert [one.p_value for one in corrected([of_p(0.2)], 1)] == [0.2]


def test_choosing_the_best_by_the_same_scores_finds_no_more_differences_than_one_in_twenty():
    """Six equal settings of five seeds: with Holm over five alone, too many studies find a difference."""
    generator = numpy.random.default_rng(0)
    wrong = {"all pairs": 0, "with the best": 0}
    for scores in generator.normal(0.5, 0.03, size=(STUDIES, 6, 5)):
        best = int(scores.mean(axis=1).argmax())
        reference = dict(enumerate(scores[best]))
        found = [paired_by_seed(reference, dict(enumerate(of))) for i, of in enumerate(scores) if i != best]
        for name, family in (("all pairs", family_size(6, chosen=True)), ("with the best", 0)):
            wrong[name] += any(one.p_value <= SMALL_P for one in corrected(found, family))
    error = math.sqrt(0.05 * 0.95 / STUDIES)
    assert wrong["all pairs"] / STUDIES <= 0.05 + 2 * error
    assert wrong["with the best"] / STUDIES >= 0.05 + 2 * error


def test_a_difference_of_the_smallest_size_is_shown_in_four_of_five_studies():
    seeds, tests, spread = 6, 3, 0.04
    stderr = spread * math.sqrt(2 / seeds)
    least = smallest_difference(stderr, seeds, tests)
    generator = numpy.random.default_rng(4)
    differences = generator.normal(least, spread * math.sqrt(2), size=(STUDIES, seeds))
    shown = stats.ttest_1samp(differences, 0, axis=1).pvalue <= SMALL_P / tests
    assert numpy.mean(shown) == pytest.approx(0.8, abs=0.03)
    for seeds, tests in ((2, 5), (3, 1), (4, 2), (6, 5), (30, 1)):
        beyond = stats.t.ppf(1 - SMALL_P / tests / 2, seeds - 1)
        away = smallest_difference(1.0, seeds, tests)
        chance = stats.nct.sf(beyond, seeds - 1, away) + stats.nct.cdf(-beyond, seeds - 1, away)
        assert chance == pytest.approx(0.8, abs=1e-3)
    seeds = 6
    assert least > smallest_difference(stderr, seeds) > smallest_difference(stderr, 30)
