"""Scores, their errors and intervals against brute force, tables and other implementations, and the laws they obey."""

import itertools
import math
import random
import statistics
from collections.abc import Sequence

import numpy
import pytest

from perl.evaluation.scoring.metrics import (
    Difference,
    corrected,
    majority_by_problem,
    paired_difference,
    pass_at_k_by_problem,
)
from tests.oracles import evaluation as by_hand


def some_results(problems: int, k: int, seed: int = 1) -> list[list[bool]]:
    """Problems that differ in how hard they are."""
    rng = random.Random(seed)
    chances = [rng.random() for _ in range(problems)]
    return [[rng.random() < chance for _ in range(k)] for chance in chances]


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (10, 3, 5, 11 / 12),  # 1 - 21/252
        (200, 20, 10, 1 - math.prod(i / (i + 20) for i in range(171, 181))),  # the form of the paper's code
        (10_000, 1, 5000, 1 / 2),  # binomials of thousands of digits
    ],
)
def test_pass_at_k_has_the_values_of_the_paper(n, c, k, value):
    assert pass_at_k_by_problem([[True] * c + [False] * (n - c)], k) == [pytest.approx(value)]


def majority_at_k(answers, right, same=None) -> float:
    return statistics.fmean(majority_by_problem(answers, right, same))


# Answers of one problem, those that are right, and the share of the most frequent ones that is.
VOTES = [
    (["4", "4", "5"], {"4"}, 1.0),
    (["4", "5", "5"], {"4"}, 0.0),
    (["4", "5", "6"], {"4"}, 1 / 3),
    (["4", "4", "5", "5", "6"], {"4"}, 1 / 2),
    (["5", "5", "6", "6", "4"], {"4"}, 0.0),
    (["4", None, None, None], {"4"}, 1.0),
    ([None, None], {"4"}, 0.0),
    ([], {"4"}, 0.0),
    (["x = 1", " x  =\n1 ", "4", "4", "x =\t1"], {"4"}, 0.0),  # white space makes no other answer
    (["1 2", "12", "4"], {"4"}, 1 / 3),  # but its absence does
    (["1/2", "0.5", r"\frac12", "3", "3"], {"1/2", "0.5", r"\frac12"}, 1.0),  # right in three ways of writing
]


def test_the_most_frequent_answer_decides_and_ties_are_shared():
    wrong = [
        (answers, score)
        for answers, right, score in VOTES
        if majority_at_k([answers], [[answer in right for answer in answers]]) != pytest.approx(score)
    ]
    assert wrong == []
    rights = [[answer in right for answer in answers] for answers, right, _ in VOTES]
    mean = sum(score for *_, score in VOTES) / len(VOTES)
    assert majority_at_k([answers for answers, *_ in VOTES], rights) == pytest.approx(mean)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_wrong_answers_that_are_the_same_vote_together_in_any_order(order):
    """1/4 and 25% are only known to be the same by way of 0.25."""
    pairs = [{"1/4", "0.25"}, {"0.25", "25%"}]
    wrong = [["1/4", "0.25", "25%"][place] for place in order]
    answers, right = [[*wrong, "4", "4"]], [[False] * 3 + [True] * 2]
    assert majority_at_k(answers, right) == 1.0
    assert majority_at_k(answers, right, same=lambda a, b: {a, b} in pairs) == 0.0


@pytest.mark.parametrize(
    ("base", "adapter"),
    [
        *((some_results(n, k, seed=2), some_results(n, j, seed=3)) for n, k, j in ((1, 4, 4), (5, 3, 3), (12, 6, 10))),
        (some_results(30, 6), some_results(30, 6)),  # they do the same, yet of other problems some may differ
        (some_results(30, 6), [row * 2 for row in some_results(30, 6)]),
    ],
    ids=["one problem", "5", "12", "the same", "the same twice"],
)
def test_the_difference_and_its_p_value_are_those_of_trying_all_flips(base, adapter):
    found = paired_difference(base, adapter)
    assert found.p_value == pytest.approx(by_hand.p_value(base, adapter))
    expected = by_hand.difference(base, adapter)
    assert (found.mean, found.stderr, found.low, found.high) == pytest.approx(expected, nan_ok=True)
    if base == adapter:
        assert (found.mean, found.stderr, found.p_value) == (0.0, 0.0, 1.0)
        assert found.low < 0 < found.high


@pytest.mark.parametrize(
    ("won", "lost", "tolerance"),
    [
        (12, 4, 1e-12),  # 16 flips are all tried
        (13, 4, 0.005),  # of 17 on, 20,000 are drawn: three standard errors
        (20, 12, 0.011),
        (25, 25, 1e-12),
        (50, 0, 1e-4),
    ],
)
def test_the_p_value_of_won_and_lost_problems_is_the_binomial_one_and_never_zero(won, lost, tolerance):
    """That of as many heads or tails, or more, as problems were won; 40 ties change nothing."""
    count = won + lost
    tail = sum(math.comb(count, heads) for heads in range(min(won, lost) + 1)) / 2**count
    ties = [[True, False]] * 40
    base, adapter = ([[r] * 2] * won + [[not r] * 2] * lost + ties for r in (False, True))
    found = paired_difference(base, adapter)
    assert found.p_value == pytest.approx(min(1.0, 2 * tail), abs=tolerance)
    assert found.p_value >= 1 / 20_001
    assert found == paired_difference(base, adapter)  # the same flips are drawn every time


def test_one_in_twenty_tests_of_equal_policies_finds_a_difference_at_five_percent():
    generator = numpy.random.default_rng(3)
    chances_EP = generator.beta(2, 2, size=(400, 14))
    right_EPK = (generator.random((400, 14, 16)) < chances_EP[:, :, None]).tolist()
    pairs = [([row[:8] for row in rows], [row[8:] for row in rows]) for rows in right_EPK]
    found = sum(paired_difference(base, adapter).p_value <= 0.05 for base, adapter in pairs) / 400
    assert abs(found - 0.05) <= 0.03  # three standard errors of the share are 0.033


def closed_test(p_values: Sequence[float]) -> list[float]:
    """What Holm's procedure is a short way to (Marcus, Peritz and Gabriel 1976): a difference is real at a level if
    Bonferroni's test rejects, at that level, every set of hypotheses that holds its own."""
    others = range(len(p_values))
    sets = [chosen for size in range(1, len(p_values) + 1) for chosen in itertools.combinations(others, size)]
    of_set = {chosen: min(1.0, len(chosen) * min(p_values[i] for i in chosen)) for chosen in sets}
    return [max(p for chosen, p in of_set.items() if i in chosen) for i in others]


@pytest.mark.parametrize("seed", range(4))
def test_corrected_p_values_are_those_of_testing_every_set_of_hypotheses(seed):
    rng = random.Random(seed)
    p_values = [rng.choice([rng.random(), rng.random() ** 4, 0.01]) for _ in range(rng.randint(1, 7))]
    found = [one.p_value for one in corrected([Difference(0.1, 0.01, 0.08, 0.12, p) for p in p_values])]
    assert found == pytest.approx(closed_test(p_values))
    ordered = [after for _, after in sorted(zip(p_values, found, strict=True))]
    assert ordered == sorted(ordered)
    assert all(before <= after <= 1 for before, after in zip(p_values, found, strict=True))
