r"""Rewards for format, tags and repetitions: as published, on text and on chat messages, linear in time."""

import math
import random

import pytest
from trl.rewards import get_repetition_penalty_reward, think_format_reward

from perl.rewards.shaping import format_reward, repetition_penalty_reward, tag_count_reward
from tests.oracles.alarm import no_hang
from tests.oracles.reward_formulas import follows_style, repeated_share, tag_share

FORMATS = {  # style -> completion -> reward
    "boxed": {
        r"work \boxed{4}": 1.0,
        r"so $\boxed{\frac{1}{2}}$. ": 1.0,
        "\\boxed{4}\n": 1.0,
        "": 0.0,
        r"\boxed{}": 0.0,
        r"\boxed{4": 0.0,
        r"\boxed{4} is the answer": 0.0,
        r"\boxed{4} \boxed{4}": 0.0,
        r"\boxed{\boxed{4}}": 0.0,
        r"\boxed{4}}": 0.0,
    },
    "think": {
        "<think>\nfour\n</think>\n4": 1.0,
        "<think></think>": 1.0,
        "": 0.0,
        "<think>a": 0.0,
        "a</think>4": 0.0,
        "\n<think>a</think>4": 0.0,
        "<think>a<think>b</think>4": 0.0,
        "<think>a</think>\n<think>b</think>4": 0.0,
    },
    "think_boxed": {
        "<think>\n2+2\n</think>\nso \\boxed{4}.": 1.0,
        r"<think>a</think>\boxed{4}": 1.0,
        r"<think>first \boxed{3}, no</think> $\boxed{4}$.": 1.0,
        r"<think>\boxed{4}</think> so 4": 0.0,
        r"<think>a</think>\boxed{4} is it": 0.0,
        r"<think>a</think>\boxed{}": 0.0,
        r"\boxed{4}": 0.0,
        r"so <think>a</think>\boxed{4}": 0.0,
        r"<think>a<think>b</think>\boxed{4}": 0.0,
        "": 0.0,
    },
}


def as_messages(*texts):
    return [{"role": "assistant", "content": text} for text in texts]


@pytest.mark.parametrize("style", FORMATS)
def test_a_completion_in_the_style_gets_one_and_any_other_zero(style):
    expected = FORMATS[style]
    assert dict(zip(expected, format_reward(list(expected), style=style), strict=True)) == expected
    messages = [as_messages(completion) for completion in expected]
    assert dict(zip(expected, format_reward(messages, style=style), strict=True)) == expected
    whole = "<think>a</think>\\boxed{4}"
    in_parts = as_messages(whole[:8], None, whole[8:])
    assert format_reward([in_parts, as_messages(None)], style=style) == format_reward([whole, ""], style=style)
    if style == "boxed":
        assert format_reward(list(expected)) == list(expected.values())


@pytest.mark.parametrize("style", FORMATS)
def test_a_style_agrees_with_a_count_of_tags_and_boxes_in_random_text(style):
    pieces = ["<think>", "</think>", "\n", "4", " ", ".", "<think", "think>", "\\boxed{4}"]
    texts = ["".join(random.choices(pieces, k=random.randint(0, 7))) for _ in range(3000)]
    texts += ["<think>" + "".join(random.choices(pieces[1:2] + pieces[4:], k=random.randint(0, 5))) for _ in texts]
    expected = [float(follows_style(text, style)) for text in texts]
    assert format_reward(texts, style=style) == expected
    assert 100 < sum(expected) < len(texts) - 100
    if style == "think":
        assert expected == think_format_reward([as_messages(text) for text in texts])


@pytest.mark.parametrize(
    ("call", "settings", "words"),
    [
        *[(format_reward, {"style": style}, "no format style") for style in ("thinking", None, ["boxed"])],
        (format_reward, {"style": "think-boxed"}, "did you mean think_boxed"),
        *[
            (repetition_penalty_reward, {"ngram_size": size}, "ngram_size must be a whole number of at least 1")
            for size in (0, 2.0, True)
        ],
        *[
            (repetition_penalty_reward, {"max_penalty": penalty}, "max_penalty must be a number of at most 0")
            for penalty in (0.1, math.nan, "-1")
        ],
    ],
)
def test_a_setting_that_means_nothing_is_refused_even_for_an_empty_batch(call, settings, words):
    with pytest.raises(ValueError, match=words):
        call([], **settings)


MANY = 15_000


@pytest.mark.parametrize("style", FORMATS)
@pytest.mark.parametrize(
    "completion",
    [
        "</think>" * MANY,
        "<think>" + "</think>" * MANY,
        "<think>" + "\n" * MANY * 8 + "x",
        "<think></think>" + "\\boxed{" * MANY,
        "<think></think>\\boxed{4}" + " ." * MANY + "x",
        "<think></think>" + "{" * MANY + "}" * MANY,
    ],
    ids=lambda text: text[:16].strip() + "..." + text[-8:].strip(),
)
def test_a_hostile_completion_does_not_hang_and_is_not_well_formed(completion, style):
    with no_hang():
        (reward,) = format_reward([completion], style=style)
    assert reward == (float(follows_style(completion, "think")) if style == "think" else 0.0)


def test_each_tag_that_occurs_once_is_a_quarter_as_open_r1_counts_them():
    rewards = {
        "<think>\na\n</think>\n<answer>\n4\n</answer>": 1.0,
        "<think>\na\n</think>\n\n<answer>\n4\n</answer>\n": 1.0,
        "\n</answer>\n<answer>\n\n</think>\n<think>\n": 1.0,
        "<think>a</think><answer>4</answer>": 0.0,
        "<think>\na\n</think>\n4": 0.5,
        "<think>\na\n<think>\nb\n</think>\n": 0.25,
        "<think>\n": 0.25,
        "<think>\na\n</think>\n<answer>\n4</answer>": 0.75,
        "": 0.0,
    }
    assert dict(zip(rewards, tag_count_reward(list(rewards)), strict=True)) == rewards
    pieces = ["<think>", "</think>", "<answer>", "</answer>", "\n", "\n", "4"]
    texts = [*rewards, *("".join(random.choices(pieces, k=random.randint(0, 16))) for _ in range(3000))]
    found = tag_count_reward([as_messages(text) for text in texts])
    assert found == [tag_share(text) for text in texts]
    assert {type(reward) for reward in found} == {float}
    assert set(found) == {0.0, 0.25, 0.5, 0.75, 1.0}
    for chosen in (["\n</think>\n"], ["<think>", "</think>", "4"]):
        expected = [sum(text.count(tag) == 1 for tag in chosen) / len(chosen) for text in texts]
        assert tag_count_reward(texts, tags=chosen) == expected
    for wrong in ([], "<think>", [""], [1], ["a", "a"], None):
        with pytest.raises(ValueError, match="tags must be a list"):
            tag_count_reward([], tags=wrong)


@pytest.mark.parametrize(("size", "penalty"), [(1, -2), (2, 0), (3, -1.0), (5, -0.3)])
def test_the_repetition_penalty_is_the_share_of_ngrams_that_occurred_before(size, penalty):
    batch = [random.choices(range(3), k=random.randint(0, 30)) for _ in range(100)]
    batch += [[5] * length for length in range(9)]  # of at most one n-gram, and of nothing but repetitions
    rewards = repetition_penalty_reward(batch, ngram_size=size, max_penalty=penalty)
    expected = [float(repeated_share(ids, size)) * penalty for ids in batch]
    assert rewards == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert rewards == get_repetition_penalty_reward(size, penalty)(batch)
    assert len(set(rewards)) > (0 if penalty == 0 else 5)
    if (size, penalty) == (3, -1.0):
        assert repetition_penalty_reward(batch) == rewards
