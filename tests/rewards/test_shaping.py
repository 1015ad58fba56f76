r"""Rewards for format, tags and repetitions: as published, on text and on chat messages, linear in time."""

import math
import random
import re

import pytest
from trl.rewards import get_repetition_penalty_reward, think_format_reward

from perl.rewards.shaping import format_reward, repetition_penalty_reward, tag_count_reward
from tests.oracles.alarm import no_hang

WELL_FORMED = "<think>\n2+2\n</think>\nso \\boxed{4}."
FURTHER_COLUMNS = {
    "prompts": ["2+2="],
    "solution": ["4"],
    "level": ["hard"],
    "trainer_state": None,
    "log_extra": print,
    "log_metric": print,
}


def as_messages(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (r"work \boxed{4}", 1.0),
        (r"\boxed{4}.", 1.0),
        (r"so $\boxed{\frac{1}{2}}$. ", 1.0),
        ("\\boxed{4}\n", 1.0),
        ("", 0.0),
        ("The answer is 4", 0.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{  }", 0.0),
        (r"\boxed{4", 0.0),
        (r"\boxed{4} is the answer", 0.0),
        (r"\boxed{4} \boxed{4}", 0.0),
        (r"\boxed{\boxed{4}}", 0.0),
        (r"\boxed{4} as the set {4}", 0.0),
        (r"\boxed{4}}", 0.0),
    ],
)
def test_the_style_boxed_is_one_for_a_completion_that_ends_in_its_only_box(completion, reward):
    assert format_reward([completion]) == [reward]
    assert format_reward([as_messages(completion)], style="boxed") == [reward]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>\nfour\n</think>\n4", 1.0),
        ("<think></think>", 1.0),
        ("<think>a</think>b</think>", 1.0),
        ("", 0.0),
        ("4", 0.0),
        ("<think>a", 0.0),
        ("a</think>4", 0.0),
        ("</think>4<think>", 0.0),
        ("\n<think>a</think>4", 0.0),
        ("x\n<think>a</think>4", 0.0),
        ("<think>a<think>b</think>4", 0.0),
        ("<think>a</think>\n<think>b</think>4", 0.0),
        ("<think >a</think>", 0.0),
    ],
)
def test_the_style_think_is_one_for_one_reasoning_part_at_the_beginning(completion, reward):
    assert format_reward([completion], style="think") == [reward]
    assert format_reward([as_messages(completion)], style="think") == [reward]


def by_counting_tags(text):
    return float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text)


def test_the_style_think_is_trls_and_agrees_with_a_count_of_the_tags():
    pieces = ["<think>", "</think>", "\n", "4", " ", "<think", "think>", "\\boxed{4}"]
    texts = ["".join(random.choices(pieces, k=random.randint(0, 7))) for _ in range(3000)]
    rewards = format_reward(texts, style="think")
    assert rewards == think_format_reward([as_messages(text) for text in texts])
    assert rewards == [by_counting_tags(text) for text in texts]
    assert 50 < sum(rewards) < 2950


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (WELL_FORMED, 1.0),
        (r"<think>a</think>\boxed{4}", 1.0),
        (r"<think>first \boxed{3}, no</think> $\boxed{4}$.", 1.0),
        (r"<think>a</think>4", 0.0),
        (r"<think>\boxed{4}</think>", 0.0),
        (r"<think>\boxed{4}</think> so 4", 0.0),
        (r"<think>a</think>\boxed{4} is it", 0.0),
        (r"<think>a</think>\boxed{3} \boxed{4}", 0.0),
        (r"<think>a</think>\boxed{}", 0.0),
        (r"\boxed{4}", 0.0),
        (r"<think>a \boxed{4}", 0.0),
        (r"so <think>a</think>\boxed{4}", 0.0),
        (r"<think>a<think>b</think>\boxed{4}", 0.0),
        ("", 0.0),
    ],
)
def test_the_style_think_boxed_wants_both_and_the_box_after_the_reasoning(completion, reward):
    assert format_reward([completion], style="think_boxed") == [reward]


def test_think_boxed_is_think_and_a_box_at_the_end_of_the_rest():
    pieces = ["<think>", "</think>", "\\boxed{4}", " so ", "."]
    texts = ["<think>" + "".join(random.choices(pieces, k=random.randint(0, 5))) for _ in range(3000)]
    expected = [
        float(
            by_counting_tags(text) and re.fullmatch(r"[^\\]*\\boxed\{4\}[ .]*", text.split("</think>")[-1]) is not None
        )
        for text in texts
    ]
    assert format_reward(texts, style="think_boxed") == expected
    assert 50 < sum(expected) < 2950


@pytest.mark.parametrize("style", ["thinking", "", None, 3, ["boxed"]])
def test_a_style_that_does_not_exist_is_said_even_for_an_empty_batch(style):
    with pytest.raises(ValueError, match="no format style"):
        format_reward([], style=style)


def test_the_nearest_style_is_named():
    with pytest.raises(ValueError, match="did you mean think_boxed"):
        format_reward(["a"], style="think-boxed")


MANY = 15_000


@pytest.mark.parametrize("style", ["boxed", "think", "think_boxed"])
@pytest.mark.parametrize(
    "completion",
    [
        "<think>" * MANY,
        "</think>" * MANY,
        "<think>" + "</think>" * MANY,
        "<think>" + "</think" * MANY,
        "<think>" + "\n" * MANY * 8 + "x",
        "<think>" + "</think>\n" * MANY + "<think>",
        "<think></think>" + "\\boxed{" * MANY,
        "<think></think>" + "\\boxed{4}" * MANY,
        "<think></think>\\boxed{4}" + " ." * MANY + "x",
        "<think></think>" + "{" * MANY + "}" * MANY,
    ],
    ids=lambda text: text[:16].strip() + "..." + text[-8:].strip(),
)
def test_a_hostile_completion_does_not_hang_and_is_not_well_formed(completion, style):
    with no_hang():
        (reward,) = format_reward([completion], style=style)
    assert reward == (by_counting_tags(completion) if style == "think" else 0.0)


def open_r1_tag_count(text):
    """Each tag's occurrences by cutting the text at them."""
    parts = [len(text.split(tag)) - 1 for tag in ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")]
    return sum(1 for count in parts if count == 1) / 4


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>\na\n</think>\n<answer>\n4\n</answer>", 1.0),
        ("<think>\na\n</think>\n\n<answer>\n4\n</answer>\n", 1.0),
        ("\n</answer>\n<answer>\n\n</think>\n<think>\n", 1.0),
        ("<think>a</think><answer>4</answer>", 0.0),
        ("<think>\na\n</think>\n4", 0.5),
        ("<think>\na\n<think>\nb\n</think>\n", 0.25),
        ("<think>\n", 0.25),
        ("<think>\na\n</think>\n<answer>\n4</answer>", 0.75),
        ("", 0.0),
    ],
)
def test_each_tag_that_occurs_once_is_a_quarter(completion, reward):
    assert tag_count_reward([completion]) == [reward]
    assert tag_count_reward([as_messages(completion)]) == [reward]
    assert isinstance(tag_count_reward([completion])[0], float)


def test_tags_are_counted_as_open_r1_counts_them():
    pieces = ["<think>", "</think>", "<answer>", "</answer>", "\n", "\n", "4"]
    texts = ["".join(random.choices(pieces, k=random.randint(0, 16))) for _ in range(3000)]
    rewards = tag_count_reward(texts)
    assert rewards == [open_r1_tag_count(text) for text in texts]
    assert set(rewards) == {0.0, 0.25, 0.5, 0.75, 1.0}


def repeated_fraction(ids, size):
    seen, repeated, total = set(), 0, 0
    for start in range(len(ids) - size + 1):
        ngram = tuple(ids[start : start + size])
        repeated += ngram in seen
        total += 1
        seen.add(ngram)
    return repeated / total if total else 0.0


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("penalty", [-1.0, -0.3, 0, -2])
def test_the_repetition_penalty_is_the_fraction_of_repeated_ngrams(size, penalty):
    batch = [random.choices(range(3), k=random.randint(0, 30)) for _ in range(100)]
    rewards = repetition_penalty_reward(batch, ngram_size=size, max_penalty=penalty)
    assert rewards == pytest.approx([repeated_fraction(ids, size) * penalty for ids in batch])
    assert rewards == get_repetition_penalty_reward(size, penalty)(batch)
    assert len(set(rewards)) > (0 if penalty == 0 else 5)


def test_completions_with_at_most_one_ngram_are_not_penalised():
    assert repetition_penalty_reward([[], [5], [5, 5], [5, 5, 5]]) == [0.0, 0.0, 0.0, 0.0]
    assert repetition_penalty_reward([[5, 5, 5, 5]]) == [-0.5]
    assert repetition_penalty_reward([[5] * 5], ngram_size=2) == [-0.75]


@pytest.mark.parametrize("size", [0, -1, 2.0, "3", None, True])
def test_ngrams_have_a_whole_number_of_tokens(size):
    with pytest.raises(ValueError, match="ngram_size must be a whole number of at least 1"):
        repetition_penalty_reward([], ngram_size=size)


@pytest.mark.parametrize("penalty", [0.1, 1, math.nan, -math.inf, "-1", None])
def test_a_penalty_is_not_a_reward(penalty):
    with pytest.raises(ValueError, match="max_penalty must be a number of at most 0"):
        repetition_penalty_reward([], max_penalty=penalty)


def test_other_columns_are_ignored_and_no_completions_are_no_rewards():
    for style in ("boxed", "think", "think_boxed"):
        assert format_reward([WELL_FORMED], style=style, completion_ids=[[1]], **FURTHER_COLUMNS) == [1.0]
        assert format_reward([], style=style) == []
    assert tag_count_reward([WELL_FORMED], completion_ids=[[1]], **FURTHER_COLUMNS) == [0.5]
    assert tag_count_reward([]) == []
    assert repetition_penalty_reward(completions=["a"], completion_ids=[[1]], **FURTHER_COLUMNS) == [0.0]
    assert repetition_penalty_reward([]) == []


def test_a_message_without_content_or_in_parts_is_read():
    assert format_reward([as_messages(None)], style="think") == [0.0]
    in_parts = [*as_messages("<think>a"), *as_messages("</think>\\boxed{4}")]
    assert [format_reward([in_parts], style=style) for style in ("think", "think_boxed")] == [[1.0], [1.0]]
