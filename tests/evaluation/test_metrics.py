"""Scores, their errors and intervals against brute force, tables and other implementations, and the laws they obey."""

import itertools
import math
import random
import re
import statistics
from fractions import Fraction

import numpy
import pytest

from perl.evaluation.metrics import (
    Difference,
    average_at_k,
    g_pass_at_k,
    majority_at_k,
    mean_g_pass_at_k,
    paired_difference,
    pass_at_k,
    pass_at_k_by_problem,
    pass_at_k_error,
    standard_error,
)
from perl.intervals import interval
from tests.oracles import metrics as oracle


def some_results(problems: int, k: int, seed: int = 1) -> list[list[bool]]:
    """Problems that differ in how hard they are."""
    rng = random.Random(seed)
    chances = [rng.random() for _ in range(problems)]
    return [[rng.random() < chance for _ in range(k)] for chance in chances]


@pytest.mark.parametrize(("problems", "k"), [(2, 1), (5, 1), (7, 4), (200, 16)])
def test_the_score_and_its_error_are_those_of_the_paper(problems, k):
    right = some_results(problems, k)
    assert average_at_k(right) == pytest.approx(oracle.average(right))
    assert standard_error(right) == pytest.approx(oracle.clustered_standard_error(right))


def test_completions_of_one_problem_tell_no_more_than_one_if_they_all_agree():
    once = some_results(50, 1)
    assert average_at_k([row * 8 for row in once]) == pytest.approx(average_at_k(once))
    assert standard_error([row * 8 for row in once]) == pytest.approx(standard_error(once))


def test_more_problems_make_the_error_smaller():
    right = some_results(50, 4)
    ratio = standard_error(right * 4) / standard_error(right)
    assert ratio == pytest.approx(0.5 * math.sqrt(49 / 50 * 200 / 199))


def test_the_order_of_problems_and_completions_does_not_matter():
    right = some_results(20, 4)
    shuffled = [list(reversed(row)) for row in reversed(right)]
    assert average_at_k(shuffled) == pytest.approx(average_at_k(right))
    assert standard_error(shuffled) == pytest.approx(standard_error(right))


@pytest.mark.parametrize("value", [True, False])
def test_where_all_agree_there_is_no_error(value):
    right = [[value] * 4] * 10
    assert (average_at_k(right), standard_error(right)) == (float(value), 0.0)


def test_one_problem_has_a_score_but_no_error():
    assert average_at_k([[True, False]]) == 0.5
    assert math.isnan(standard_error([[True, False]]))


def test_no_problem_has_no_score():
    with pytest.raises(ValueError, match="at least one"):
        average_at_k([])
    assert math.isnan(standard_error([]))


def share_of_draws(row: list[bool], k: int, at_least: int) -> float:
    """By trying every choice of k completions."""
    draws = list(itertools.combinations(row, k))
    return sum(sum(draw) >= at_least for draw in draws) / len(draws)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_right_one(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        row = [True] * c + [False] * (n - c)
        assert pass_at_k([row], k) == pytest.approx(share_of_draws(row, k, at_least=1), abs=1e-15)


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),
        (4, 1, 4, 1.0),
        (5, 0, 5, 0.0),
        (10, 3, 5, 11 / 12),  # 1 - 21/252
        (200, 20, 10, 1 - math.prod(i / (i + 20) for i in range(171, 181))),  # the form of the paper's code
    ],
)
def test_pass_at_k_has_the_values_of_the_paper(n, c, k, value):
    assert pass_at_k([[True] * c + [False] * (n - c)], k) == pytest.approx(value)


def test_pass_at_1_is_the_average_and_no_chance_shrinks_as_k_grows():
    right = some_results(30, 16)
    scores = [pass_at_k(right, k) for k in range(1, 17)]
    assert scores[0] == pytest.approx(average_at_k(right))
    assert scores == sorted(scores)
    assert scores[-1] == statistics.fmean(any(row) for row in right)
    assert pass_at_k_error(right, 1) == pytest.approx(standard_error(right))


def test_pass_at_k_stays_a_share_for_thousands_of_completions():
    assert pass_at_k([[True] + [False] * 9999], 5000) == 0.5
    assert pass_at_k([[True] * 5000 + [False] * 5000], 4000) == 1.0


def test_the_error_of_pass_at_k_is_that_of_the_mean_over_problems():
    right = some_results(25, 8)
    values = pass_at_k_by_problem(right, 4)
    assert pass_at_k(right, 4) == pytest.approx(sum(values) / 25)
    assert pass_at_k_error(right, 4) == pytest.approx(numpy.std(values, ddof=1) / 5)
    assert math.isnan(pass_at_k_error(right[:1], 4))


def test_problems_may_have_different_numbers_of_completions():
    assert pass_at_k_by_problem([[True, False], [True, False, False, False]], 2) == [1.0, 0.5]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: pass_at_k([[True] * 4], 8), "pass@8 needs 8 completions a problem, there are 4"),
        (
            lambda: pass_at_k_by_problem([[True] * 9, [True] * 3], 8),
            "pass@8 needs 8 completions a problem, there are 3",
        ),
        (lambda: pass_at_k([[True]], 0), "pass@k needs a k of at least 1, not 0"),
        (lambda: pass_at_k_error([[True]], -1), "pass@k needs a k of at least 1, not -1"),
        (lambda: pass_at_k([], 1), "at least one"),
        (lambda: g_pass_at_k([[True] * 4], 8, 0.5), "G-Pass@8 needs 8 completions a problem, there are 4"),
        (lambda: g_pass_at_k([[True] * 4], 4, 1.5), "a threshold is a share of 0..1, not 1.5"),
        (lambda: g_pass_at_k([[True] * 4], 4, math.nan), "not nan"),
        (lambda: mean_g_pass_at_k([[True] * 4], 1), "mG-Pass@k needs a k of at least 2, not 1"),
        (lambda: majority_at_k([], []), "at least one"),
        (lambda: majority_at_k([["4"]], [[True, False]]), "zip"),
        (lambda: majority_at_k([["4"]], [[True], [True]]), "zip"),
        (lambda: paired_difference([[True]] * 3, [[True]] * 2), "3 problems of the base cannot be paired with 2"),
        (lambda: paired_difference([], []), "at least one"),
    ],
)
def test_what_cannot_be_computed_is_refused(call, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        call()


@pytest.mark.parametrize("n", [2, 5, 8])
def test_g_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_enough_right_ones(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        row = [True] * c + [False] * (n - c)
        for needed in range(1, k + 1):
            expected = share_of_draws(row, k, at_least=needed)
            assert g_pass_at_k([row], k, Fraction(needed, k)) == pytest.approx(expected, abs=1e-15)
            assert g_pass_at_k([row], k, needed / k) == pytest.approx(expected, abs=1e-15)


def test_g_pass_at_k_is_pass_at_k_for_a_threshold_of_nothing():
    right = some_results(20, 12)
    for k in (1, 4, 12):
        assert g_pass_at_k(right, k, 0) == g_pass_at_k(right, k, 1e-9) == pass_at_k(right, k)


def test_g_pass_at_k_counts_as_the_threshold_reads_not_as_floats_multiply():
    assert math.ceil(0.07 * 100) == 8  # the trap
    for percent in range(1, 101):
        enough, one_short = ([True] * c + [False] * (100 - c) for c in (percent, percent - 1))
        assert g_pass_at_k([enough], 100, percent / 100) == 1.0
        assert g_pass_at_k([one_short], 100, percent / 100) == 0.0
    assert g_pass_at_k([[True] * 3 + [False] * 7], 10, 0.1 + 0.2) == 1.0


@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_mean_g_pass_at_k_is_the_average_over_the_upper_half_of_thresholds(k):
    right = some_results(6, 8)
    thresholds = range(math.ceil(k / 2) + 1, k + 1)
    chances = [share_of_draws(row, k, at_least=i) for row in right for i in thresholds]
    assert mean_g_pass_at_k(right, k) == pytest.approx(2 / k * sum(chances) / len(right))
    assert mean_g_pass_at_k([[True] * 8], k) == pytest.approx(1 if k % 2 == 0 else (k - 1) / k)


def test_pass_at_k_and_g_pass_at_k_are_lightevals():
    samples = pytest.importorskip("lighteval.metrics.metrics_sample", reason="lighteval is not installed")
    thresholds = [0.0, 0.25, 0.5, 0.75, 1.0]
    for row in some_results(20, 16):
        for k in (1, 2, 4, 16):
            theirs = samples.PassAtK(k=k, n=16, sample_scoring_function=lambda *_: 0.0).pass_at_k(row)
            assert pass_at_k([row], k) == pytest.approx(theirs)
        general = samples.GPassAtK(k=[2, 8, 16], n=16, thresholds=thresholds, sample_scoring_function=lambda *_: 0.0)
        theirs = general.g_pass_at_k(row)
        for k in (2, 8, 16):
            assert mean_g_pass_at_k([row], k) == pytest.approx(theirs[f"mg-pass@{k}"])
            for threshold in thresholds:
                assert g_pass_at_k([row], k, threshold) == pytest.approx(theirs[f"g-pass@{k}_{threshold}"])


def majority(answers: list[str | None], right: str = "4") -> float:
    return majority_at_k([answers], [[answer == right for answer in answers]])


@pytest.mark.parametrize(
    ("answers", "score"),
    [
        (["4", "4", "5"], 1.0),
        (["4", "5", "5"], 0.0),
        (["4", "5"], 1 / 2),
        (["4", "5", "6"], 1 / 3),
        (["4", "4", "5", "5", "6"], 1 / 2),
        (["5", "5", "6", "6", "4"], 0.0),
        (["4", None, None, None], 1.0),
        (["5", None, "5", "4"], 0.0),
        ([None, None], 0.0),
        ([], 0.0),
        (["4"], 1.0),
    ],
)
def test_the_most_frequent_answer_decides_and_ties_are_shared(answers, score):
    assert majority(answers) == pytest.approx(score)


def test_a_tie_counts_as_drawing_one_of_the_tied_answers_gives_on_average():
    rng = random.Random(5)
    for _ in range(100):
        answers = rng.choices(["4", "5", "6", "7", None], k=7)
        votes = {text: answers.count(text) for text in answers if text is not None}
        winners = [text for text, count in votes.items() if count == max(votes.values())]
        assert majority(answers) == pytest.approx(winners.count("4") / len(winners) if winners else 0.0)


def test_white_space_makes_no_other_answer():
    answers = [["x = 1", " x  =\n1 ", "4", "4", "x =\t1"]]
    assert majority_at_k(answers, [[False, False, True, True, False]]) == 0.0
    assert majority_at_k([["1 2", "12", "4"]], [[False, False, True]]) == pytest.approx(1 / 3)


def test_right_answers_are_one_answer_however_they_are_written():
    answers = [["1/2", "0.5", r"\frac12", "3", "3"]]
    assert majority_at_k(answers, [[True, True, True, False, False]]) == 1.0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_wrong_answers_that_are_the_same_vote_together_in_any_order(order):
    """1/4 and 25% are only known to be the same by way of 0.25."""
    pairs = [{"1/4", "0.25"}, {"0.25", "25%"}]
    wrong = [["1/4", "0.25", "25%"][place] for place in order]
    answers, right = [[*wrong, "4", "4"]], [[False] * 3 + [True] * 2]
    assert majority_at_k(answers, right) == 1.0
    assert majority_at_k(answers, right, same=lambda a, b: {a, b} in pairs) == 0.0


def test_two_texts_are_compared_once_and_right_ones_never():
    asked = []

    def same(a: str, b: str) -> bool:
        asked.append(frozenset((a, b)))
        return False

    majority_at_k([["5", "6", "5", "4", "7", None, "4"]], [[False, False, False, True, False, False, True]], same)
    assert sorted(map(sorted, asked)) == [["5", "6"], ["5", "7"], ["6", "7"]]


def test_the_majority_of_one_completion_is_its_verdict_and_problems_are_averaged():
    right = some_results(40, 1)
    answers = [["4" if row[0] else "5"] for row in right]
    assert majority_at_k(answers, right) == pytest.approx(average_at_k(right))


def sign_flip_p_value(differences: list[Fraction]) -> float:
    """In fractions, all flips, also those of zeros."""
    flips = itertools.product((1, -1), repeat=len(differences))
    sums = [sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in flips]
    return sum(abs(value) >= abs(sum(differences)) for value in sums) / len(sums)


@pytest.mark.parametrize(("problems", "k_base", "k_adapter"), [(1, 4, 4), (5, 3, 3), (10, 4, 8), (12, 6, 10)])
def test_the_difference_and_its_p_value_are_those_of_trying_all_flips(problems, k_base, k_adapter):
    base, adapter = some_results(problems, k_base, seed=2), some_results(problems, k_adapter, seed=3)
    exact = [Fraction(sum(y), k_adapter) - Fraction(sum(x), k_base) for x, y in zip(base, adapter, strict=True)]
    found = paired_difference(base, adapter)
    assert found.mean == pytest.approx(float(sum(exact) / problems))
    assert found.p_value == pytest.approx(sign_flip_p_value(exact))
    if problems > 1:
        assert found.stderr == pytest.approx(numpy.std([float(d) for d in exact], ddof=1) / math.sqrt(problems))
        assert (found.low, found.high) == interval(found.mean, found.stderr, problems, difference=True)
    else:
        assert (math.isnan(found.stderr), math.isnan(found.low), math.isnan(found.high)) == (True, True, True)


def test_policies_that_do_the_same_do_not_differ():
    right = some_results(30, 6)
    found = paired_difference(right, right)
    assert (found.mean, found.stderr, found.p_value) == (0.0, 0.0, 1.0)
    assert found == Difference(0.0, 0.0, *interval(0.0, 0.0, 30, difference=True), 1.0)
    assert found.low < 0 < found.high  # of the problems that were not asked some may differ
    twice = [row * 2 for row in right]
    assert paired_difference(right, twice).p_value == 1.0


def test_the_other_way_round_the_difference_changes_its_sign_alone():
    base, adapter = some_results(14, 4, seed=2), some_results(14, 4, seed=3)
    one, other = paired_difference(base, adapter), paired_difference(adapter, base)
    assert (one.mean, one.stderr, one.p_value) == pytest.approx((-other.mean, other.stderr, other.p_value))
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))


def test_the_drawn_flips_agree_with_all_of_them_and_are_the_same_every_time():
    """17 differences: 13 problems won, 4 lost, so that the chance is that of at most 4 or at least 13 heads."""
    base, adapter = [[False]] * 13 + [[True]] * 4, [[True]] * 13 + [[False]] * 4
    exact = 2 * sum(math.comb(17, heads) for heads in range(5)) / 2**17
    drawn = paired_difference(base, adapter)
    assert drawn.p_value == pytest.approx(exact, abs=0.005)  # three standard errors of 20,000 flips
    assert drawn == paired_difference(base, adapter)
    ties = [[True, False]] * 40  # do not count towards the 16
    won, lost = [[False] * 2] * 12 + [[True] * 2] * 4 + ties, [[True] * 2] * 12 + [[False] * 2] * 4 + ties
    exact = 2 * sum(math.comb(16, heads) for heads in range(5)) / 2**16
    assert paired_difference(won, lost).p_value == pytest.approx(exact, abs=1e-12)


def test_a_p_value_is_never_zero_and_large_where_the_sign_is_chance():
    assert paired_difference([[False]] * 50, [[True]] * 50).p_value == 1 / 20_001
    half = [[True], [False]] * 25
    assert paired_difference(half, half[::-1]).p_value == 1.0


def test_one_in_twenty_tests_of_equal_policies_finds_a_difference_at_five_percent():
    generator = numpy.random.default_rng(3)
    chances_EP = generator.beta(2, 2, size=(400, 14))
    right_EPK = (generator.random((400, 14, 16)) < chances_EP[:, :, None]).tolist()
    pairs = [([row[:8] for row in rows], [row[8:] for row in rows]) for rows in right_EPK]
    found = sum(paired_difference(base, adapter).p_value <= 0.05 for base, adapter in pairs) / 400
    assert 0.02 <= found <= 0.08


@pytest.mark.parametrize("count", [60, 500])
def test_flips_at_once_are_the_flips_one_at_a_time(count):
    draw = numpy.random.default_rng(count)
    base, adapter = ((draw.random((count, 4)) < share).tolist() for share in (0.5, 0.54))
    gains = numpy.array([sum(a) / 4 - sum(b) / 4 for b, a in zip(base, adapter, strict=True)])
    gains = gains[gains != 0]
    generator, far = numpy.random.default_rng(0), 0
    for _ in range(20_000):
        far += bool(abs((1 - 2 * generator.integers(0, 2, size=len(gains))) @ gains) >= abs(gains.sum()) - 1e-9)
    assert paired_difference(base, adapter).p_value == (far + 1) / 20_001
