"""The score of a policy is what its samples say, counted by hand."""

import math
import statistics
from dataclasses import replace

import pytest

from perl.evaluation.score import rights, score_samples
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
    assert score.low == 0.0  # 0.5 - 4.303 * 0.289 is below what a score can be
    assert score.high == 1.0
    # Of 4 completions 2 are right: 1 - (2/4 * 1/3) for two draws.
    assert score.pass_at == pytest.approx({1: 0.5, 2: (5 / 6 + 1 + 0) / 3, 4: 2 / 3})
    assert score.majority == pytest.approx(2 / 3)  # two right votes against one wrong one, all, none
    assert score.tokens == 10 * 11 + 70
    assert score.mean_tokens == pytest.approx(180 / 12)
    assert score.truncated == pytest.approx(1 / 12)
    assert score.no_answer == pytest.approx(1 / 12)
    assert score.unjudged == pytest.approx(2 / 12)
    assert score.g_pass == {}


def test_the_interval_is_students():
    score = score_samples(samples(["1100", "1110", "1000", "1100"]))
    error = statistics.stdev([0.5, 0.75, 0.25, 0.5]) / 2
    assert score.low == pytest.approx(0.5 - 3.182446 * error, abs=1e-6)  # t of 97.5 % with 3 degrees of freedom
    assert score.high == pytest.approx(0.5 + 3.182446 * error, abs=1e-6)


def test_a_single_problem_has_neither_error_nor_interval():
    score = score_samples(samples(["10"]))
    assert (score.accuracy, score.stderr, score.low, score.high) == (0.5, None, None, None)


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
