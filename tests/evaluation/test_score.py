"""The score of a policy is what its samples say, counted by hand."""

import math
import random
import statistics
from dataclasses import replace

import pytest

from perl.evaluation.scoring.samples import Sample
from perl.evaluation.scoring.score import score_samples
from tests.evaluations import samples
from tests.oracles import evaluation as by_hand


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
    assert score.tokens == 10 * 11 + 70
    assert score.mean_tokens == pytest.approx(180 / 12)
    assert score.truncated == pytest.approx(1 / 12)
    assert score.no_answer == pytest.approx(1 / 12)
    assert score.unjudged == pytest.approx(2 / 12)


def chance(count: int, k: int) -> list[str]:
    rng = random.Random(count)
    return ["".join(rng.choice("01") for _ in range(k)) for _ in range(count)]


@pytest.mark.parametrize(
    "texts",
    [chance(2, 1), chance(5, 4), chance(12, 8), chance(3, 16), ["11"] * 30, ["0"] * 4],
    ids=["2 of 1", "5 of 4", "12 of 8", "3 of 16", "always right", "never"],
)
def test_every_mean_has_the_error_and_the_interval_of_the_problems_values(texts):
    """Also of what is always right: 0.025 ** (1 / 30) is the share at which 30 rights of 30 are so rare."""
    rng, problems = random.Random(1), samples(texts)
    answers = ["2", "3", "5"]
    problems = [[s if s.right else replace(s, extracted=rng.choice([*answers, None])) for s in row] for row in problems]
    right = [[sample.right for sample in row] for row in problems]
    score = score_samples(problems)
    assert (score.accuracy, score.stderr, score.low, score.high) == pytest.approx(
        by_hand.estimate(by_hand.shares(right))
    )
    for j, mean in score.pass_at.items():
        found = mean, score.pass_at_stderr[j], score.pass_at_low[j], score.pass_at_high[j]
        assert found == pytest.approx(by_hand.pass_at(right, j))
    found = score.majority, score.majority_stderr, score.majority_low, score.majority_high
    assert found == pytest.approx(by_hand.majority([[s.extracted for s in row] for row in problems], right))


@pytest.mark.parametrize(
    ("text", "more", "numbers"),
    [
        ("101", [], [1, 2, 3]),  # k too, whether or not a power of two
        ("10000100", [5], [1, 2, 4, 5, 8]),
    ],
)
def test_pass_at_k_is_reported_for_powers_of_two_for_k_and_where_asked(text, more, numbers):
    (right,) = by_hand.marks([text])
    expected = {k: float(by_hand.share_of_draws(right, k)) for k in numbers}
    assert score_samples(samples([text]), pass_at=more).pass_at == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answers", "meant"),
    [
        (["2", r"\frac{4}{2}", "1", "1"], ["2", "2", "1", "1"]),
        (["2", "3", "1", "1"], ["2", "3", "1", "1"]),
        (["50\\%", "0.5", "1", "1"], ["1/2", "1/2", "1", "1"]),
    ],
)
def test_wrong_answers_that_mean_the_same_vote_together(answers, meant):
    [problem] = samples(["0011"])
    problem = [replace(sample, extracted=answer) for sample, answer in zip(problem, answers, strict=True)]
    expected = by_hand.share_of_votes(meant, [False, False, True, True])
    assert score_samples([problem]).majority == float(expected)


@pytest.mark.parametrize(("scorer", "expected"), [("exact", 1.0), ("normalised", 0.0), ("choice", 1.0)])
def test_the_scorer_says_which_wrong_answers_are_one(scorer, expected):
    """Two votes for the right answer against three that only SQuAD's form holds together."""
    texts = [("right", "Bern"), ("right", "Bern"), ("wrong", "The Rome"), ("wrong", "rome"), ("wrong", "Rome!")]
    problem = [Sample("t", "p", i, 0, "", 1, False, status, text) for i, (status, text) in enumerate(texts)]
    assert score_samples([problem], scorer=scorer).majority == expected
