"""The score of a policy is what its samples say, counted by hand."""

import math
import statistics
from dataclasses import replace

import pytest

from perl.evaluation.score import rights, score_samples
from perl.intervals import interval
from tests.evaluations import rows, samples


def test_a_score_against_numbers_counted_by_hand():
    problems = samples(["1100", "1111", "0000"], tokens=10)
    problems[0][2] = replace(problems[0][2], status="no_answer", extracted=None, tokens=70, truncated=True)
    problems[2][0] = replace(problems[2][0], status="timeout")
    problems[2][1] = replace(problems[2][1], status="unparsable_gold")
    score = score_samples(problems)
    assert (score.n, score.k) == (3, 4)
    assert score.accuracy == pytest.approx(0.5)
    assert score.stderr == pytest.approx(statistics.stdev([0.5, 1.0, 0.0]) / math.sqrt(3))
    # scipy.stats.beta.ppf(0.025, ...) with mean and variance of a bootstrap of 0, 0.5, 1 and one more 0.
    assert score.low == pytest.approx(0.06944, abs=1e-5)
    assert score.high == pytest.approx(1 - score.low)
    # Of 4 completions 2 are right: 1 - (2/4 * 1/3) for two draws.
    assert score.pass_at == pytest.approx({1: 0.5, 2: (5 / 6 + 1 + 0) / 3, 4: 2 / 3})
    assert score.majority == pytest.approx(2 / 3)  # two right votes against one wrong one, all, none
    by_problem = {1: [0.5, 1, 0], 2: [5 / 6, 1, 0], 4: [1, 1, 0]}
    errors = {k: statistics.stdev(values) / math.sqrt(3) for k, values in by_problem.items()}
    assert score.pass_at_stderr == pytest.approx(errors)
    assert score.majority_stderr == pytest.approx(errors[4])
    for k, error in errors.items():
        assert (score.pass_at_low[k], score.pass_at_high[k]) == interval(score.pass_at[k], error, 3)
    assert (score.majority_low, score.majority_high) == interval(score.majority, score.majority_stderr, 3)
    assert score.tokens == 10 * 11 + 70
    assert score.mean_tokens == pytest.approx(180 / 12)
    assert score.truncated == pytest.approx(1 / 12)
    assert score.no_answer == pytest.approx(1 / 12)
    assert score.unjudged == pytest.approx(2 / 12)
    assert score.g_pass == {}


def test_what_is_always_right_is_not_sure_to_be():
    score = score_samples(samples(["11"] * 30))
    assert (score.accuracy, score.stderr, score.high) == (1.0, 0.0, 1.0)
    expected = pytest.approx(0.025 ** (1 / 30))  # so rare are 30 rights of 30 at this share
    assert score.low == score.majority_low == score.pass_at_low[2] == expected


def test_a_single_problem_has_neither_error_nor_interval():
    score = score_samples(samples(["10"]))
    assert (score.accuracy, score.stderr, score.low, score.high) == (0.5, None, None, None)
    assert (score.majority_stderr, score.majority_low, score.majority_high) == (None, None, None)
    assert score.pass_at.keys() == {1, 2}
    assert score.pass_at_stderr == score.pass_at_low == score.pass_at_high == {}


def test_pass_at_further_numbers_is_reported_where_asked():
    assert sorted(score_samples(samples(["110010"]), pass_at=[3, 6]).pass_at) == [1, 2, 3, 4, 6]
    assert sorted(score_samples(samples(["1"])).pass_at) == [1]
    assert sorted(score_samples(samples(["111"])).pass_at) == [1, 2, 3]  # k too, whether or not a power of two
    with pytest.raises(ValueError, match="needs 7 completions"):
        score_samples(samples(["110010"]), pass_at=[7])


def test_g_pass_needs_sixteen_completions():
    assert score_samples(samples(["1" * 15])).g_pass == {}
    found = score_samples(samples(["1" * 8 + "0" * 8, "1" * 16])).g_pass
    assert found == pytest.approx({"0.25": 1.0, "0.5": 1.0, "0.75": 0.5, "1": 0.5, "mean": 0.5})


@pytest.mark.parametrize(("answers", "score"), [(["2", r"\frac{4}{2}", "1", "1"], 0.5), (["2", "3", "1", "1"], 1.0)])
def test_wrong_answers_that_mean_the_same_vote_together(answers, score):
    [problem] = samples(["0011"])
    problem = [replace(sample, extracted=answer) for sample, answer in zip(problem, answers, strict=True)]
    assert score_samples([problem]).majority == score


def test_without_a_problem_there_is_no_score():
    with pytest.raises(ValueError, match="no problem"):
        score_samples([])


def test_rights_are_verdicts_in_order():
    assert rights(samples(["100", "011"])) == [list(row) for row in rows(["100", "011"])]
