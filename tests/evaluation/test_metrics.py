"""avg@k and its standard error against loops, and the laws of averaging."""

import math
import random

import pytest

from perl.evaluation.metrics import average_at_k, standard_error
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
