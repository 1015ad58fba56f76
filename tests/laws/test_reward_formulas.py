"""Rewards that are formulas, against counting by hand and against their own symmetries."""

import itertools
import math
from fractions import Fraction

import pytest

from perl.rewards.countdown import countdown_reward
from perl.rewards.lengths import cosine_length_reward, length_penalty_reward, soft_overlong_reward
from perl.rewards.shaping import repetition_penalty_reward

RIGHT, WRONG = "\\boxed{4}", "\\boxed{5}"


def cosine(text: str, lengths: list[int], **values: float) -> list[float]:
    ids = [[1] * length for length in lengths]
    return cosine_length_reward([text] * len(ids), ["4"] * len(ids), ids, **values)


def penalties(lengths: list[int], texts: list[str]) -> list[float]:
    ids = [[1] * length for length in lengths]
    return length_penalty_reward(texts, ["4"] * len(ids), ["2+2="] * len(ids), ids)


@pytest.mark.parametrize("text", [RIGHT, WRONG])
def test_the_cosine_reward_is_symmetric_about_half_its_length(text):
    lengths = [0, 7, 20, 50]
    values = dict(zip(lengths, cosine(text, lengths, max_len=100), strict=True))
    mirrored = dict(zip(lengths, cosine(text, [100 - length for length in lengths], max_len=100), strict=True))
    for length in lengths:
        assert values[length] + mirrored[length] == pytest.approx(values[0] + mirrored[0])


@pytest.mark.parametrize("text", [RIGHT, WRONG])
def test_the_cosine_reward_depends_on_the_share_of_the_length_alone(text):
    assert cosine(text, [0, 3, 9, 10], max_len=10) == pytest.approx(cosine(text, [0, 30, 90, 100], max_len=100))


def test_the_cosine_reward_of_every_length_is_the_papers_line():
    found = cosine(RIGHT, list(range(13)), max_len=12, min_value_correct=0.25, max_value_correct=2.0)
    expected = [0.25 + (2.0 - 0.25) * (1 + math.cos(math.pi * n / 12)) / 2 for n in range(13)]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("factor", "more"), [(3, 0), (1, 40), (5, 2)])
def test_length_penalties_know_no_unit_and_no_origin_of_lengths(factor, more):
    lengths, texts = [4, 9, 5, 20, 7], [RIGHT, RIGHT, WRONG, WRONG, RIGHT]
    assert penalties([factor * n + more for n in lengths], texts) == pytest.approx(penalties(lengths, texts))


def test_length_penalties_of_right_completions_are_odd_in_the_middle_length():
    found, mirrored = (penalties(lengths, [RIGHT] * 4) for lengths in ([2, 5, 9, 12], [12, 9, 5, 2]))
    assert found == pytest.approx([-value for value in mirrored])
    assert found == pytest.approx([0.5 - (n - 2) / 10 for n in (2, 5, 9, 12)])


@pytest.mark.parametrize(("longest", "cache"), [(10, 4), (100, 1), (7, 7)])
def test_the_overlong_punishment_falls_by_the_same_at_each_token(longest, cache):
    found = soft_overlong_reward(
        [[1] * n for n in range(longest + 3)], max_completion_len=longest, soft_punish_cache=cache
    )
    falls = [before - after for before, after in itertools.pairwise(found)]
    expected = [1 / cache if longest - cache <= n < longest else 0.0 for n in range(longest + 2)]
    assert falls == pytest.approx(expected)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_repetition_penalty_counts_ngrams_that_were_there_before(n):
    for ids in itertools.product((1, 2), repeat=6):
        grams = [ids[i : i + n] for i in range(7 - n)]
        repeated = sum(gram in grams[:i] for i, gram in enumerate(grams))
        (found,) = repetition_penalty_reward([list(ids)], ngram_size=n, max_penalty=-2.0)
        assert found == pytest.approx(-2.0 * repeated / len(grams))


def test_the_repetition_penalty_does_not_depend_on_which_tokens_they_are():
    ids = [[1, 2, 1, 2, 3, 1, 2], [5, 5, 5, 5], [7, 8, 9, 7]]
    renamed = [[11 * token + 2 for token in row] for row in ids]
    assert repetition_penalty_reward(renamed) == pytest.approx(repetition_penalty_reward(ids))


def test_countdown_takes_every_expression_for_what_its_value_is():
    """All expressions of three numbers with two operators, in both groupings, valued in fractions."""
    operators = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "/": lambda a, b: a / b if b else None,
    }
    texts, values = [], []
    for numbers in itertools.permutations((2, 3, 6)):
        a, b, c = map(Fraction, numbers)
        for first, second in itertools.product(operators, repeat=2):
            left = operators[first](a, b)
            texts.append(f"({numbers[0]} {first} {numbers[1]}) {second} {numbers[2]}")
            values.append(operators[second](left, c))
            right = operators[second](b, c)
            texts.append(f"{numbers[0]} {first} ({numbers[1]} {second} {numbers[2]})")
            values.append(None if right is None else operators[first](a, right))
    for target in (0, 1, 4, 7, 12, 36):
        answers = [f"<answer>{text}</answer>" for text in texts]
        found = countdown_reward(answers, [target] * len(answers), [[6, 3, 2]] * len(answers))
        expected = [1.0 if value == target else 0.1 for value in values]
        assert found == pytest.approx(expected)
        assert 0 < sum(value == target for value in values) < len(values)
