"""Rewards that are formulas, against counting by hand and against their own symmetries."""

import pytest

from perl.rewards.lengths import cosine_length_reward, length_penalty_reward
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


@pytest.mark.parametrize(("factor", "more"), [(3, 0), (1, 40), (5, 2)])
def test_length_penalties_know_no_unit_and_no_origin_of_lengths(factor, more):
    lengths, texts = [4, 9, 5, 20, 7], [RIGHT, RIGHT, WRONG, WRONG, RIGHT]
    assert penalties([factor * n + more for n in lengths], texts) == pytest.approx(penalties(lengths, texts))


def test_length_penalties_of_right_completions_are_odd_in_the_middle_length():
    found, mirrored = (penalties(lengths, [RIGHT] * 4) for lengths in ([2, 5, 9, 12], [12, 9, 5, 2]))
    assert found == pytest.approx([-value for value in mirrored])
    assert found == pytest.approx([0.5 - (n - 2) / 10 for n in (2, 5, 9, 12)])


def test_the_repetition_penalty_does_not_depend_on_which_tokens_they_are():
    ids = [[1, 2, 1, 2, 3, 1, 2], [5, 5, 5, 5], [7, 8, 9, 7]]
    renamed = [[11 * token + 2 for token in row] for row in ids]
    assert repetition_penalty_reward(renamed) == pytest.approx(repetition_penalty_reward(ids))
