"""The smallest gain that an evaluation shows: Miller's formula, our wider interval, and simulated evaluations."""

import math
import random

import numpy
import power as measured
import pytest

from perl.evaluation.scoring.metrics import guessed_error, power_line, power_words, smallest_gain
from perl.evaluation.scoring.table import is_shown, markdown
from tests.evaluations import results, task_result

Z_975, Z_80 = 1.959964, 0.841621


@pytest.mark.parametrize(("n", "k"), [(30, 1), (30, 16), (198, 4), (500, 32)])
def test_the_error_is_that_of_the_formula_of_miller(n, k):
    assert guessed_error(n, k) == pytest.approx(math.sqrt((0.04 + 0.25 / k) / n))
    assert (Z_975 + Z_80) * guessed_error(30, 16) == pytest.approx(0.12, abs=0.002)  # by Student's interval


def test_of_many_problems_the_smallest_gain_is_millers_and_of_few_it_is_larger():
    for n, k, most in ((30, 16, 1.5), (100, 4, 1.2), (500, 1, 1.05), (5000, 1, 1.02)):
        formula = (Z_975 + Z_80) * guessed_error(n, k)
        assert 1 <= smallest_gain(guessed_error(n, k), n) / formula < most
    # At the level of Holm's first step of ten, z of 99.75 %.
    assert smallest_gain(guessed_error(5000, 1), 5000, 10) == pytest.approx(
        (2.807034 + Z_80) * guessed_error(5000, 1), rel=1e-5
    )


@pytest.mark.nightly
def test_so_large_a_gain_is_shown_in_about_80_of_100_evaluations_and_half_of_it_in_far_fewer():
    """A cell of benchmarks/power.py, whose results are of all."""
    n, k, tasks = 30, 16, 1
    gain, generator = smallest_gain(guessed_error(n, k), n, tasks), numpy.random.default_rng(n)
    shares = [measured.share_shown("guess", n, k, true, tasks, 200, generator) for true in (gain, gain / 2)]
    assert shares[0] == pytest.approx(0.8, abs=0.1)
    assert shares[1] < 0.45


def test_so_few_problems_show_nothing_and_that_is_said():
    """With n problems the p value is 2 / 2**n at least: five cannot have one of 0.05, seven none of 0.05 / 4."""
    assert smallest_gain(0.01, 5) is None
    assert smallest_gain(0.01, 6) is not None
    assert smallest_gain(0.01, 7, 4) is None
    assert smallest_gain(0.01, 1) is None
    assert smallest_gain(0.9, 8) is None  # it would be more than 100 points
    assert power_line(5, 4) == "5 problems x 4: too few to show any gain"


def test_a_table_that_shows_no_difference_says_how_large_one_had_to_be_by_the_error_that_was_measured():
    rng = random.Random(4)
    texts = [["".join(rng.choice("01") for _ in range(4)) for _ in range(30)] for _ in range(2)]
    task = task_result("sums", *texts)
    assert not is_shown(task.difference)
    expected = f"What could be shown: Sums, 30 problems x 4: {power_words(task.difference.stderr, 30)}."
    assert f"- {expected}" in markdown(results(task))
    assert "What could be shown" not in markdown(results(task_result("sums", ["0"] * 20, ["1"] * 20)))
    alike = task_result("sums", ["10"] * 30, ["10"] * 30)  # whose error is 0
    assert power_line(30, 2) in markdown(results(alike))
