r"""Length rewards: as published, by prompt where the paper says so, and silent where nothing can be judged."""

import itertools
import math
import random
from fractions import Fraction

import pytest
import trl.rewards.accuracy_rewards as trls
from trl.rewards import get_cosine_scaled_reward, get_soft_overlong_punishment

from perl.rewards import accuracy_reward
from perl.rewards.lengths import cosine_length_reward, length_penalty_reward, soft_overlong_reward

RIGHT, WRONG = r"\boxed{4}", r"\boxed{5}"
FURTHER_COLUMNS = {"level": ["hard"], "trainer_state": None, "log_extra": print, "log_metric": print}


def tokens(*lengths):
    return [[7] * length for length in lengths]


def as_messages(text):
    return [{"role": "assistant", "content": text}]


def kimi(lengths, right):
    """The formula of one prompt's completions, exactly."""
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    lambdas = [Fraction(1, 2) - Fraction(length - shortest, longest - shortest) for length in lengths]
    return [float(value if fine else min(0, value)) for value, fine in zip(lambdas, right, strict=True)]


def test_the_shortest_right_completion_gets_a_half_and_the_longest_loses_one():
    completions, prompts = [RIGHT, RIGHT, RIGHT, WRONG, WRONG, WRONG], ["2+2="] * 6
    rewards = length_penalty_reward(completions, ["4"] * 6, prompts, tokens(10, 15, 30, 10, 15, 30))
    assert rewards == [0.5, 0.25, -0.5, 0.0, 0.0, -0.5]


def test_every_prompt_has_its_own_shortest_and_longest():
    for _ in range(200):
        sizes = random.choices(range(1, 5), k=3)
        prompts = [f"prompt {number}" for number, size in enumerate(sizes) for _ in range(size)]
        lengths = [random.randint(0, 9) for _ in prompts]
        right = [random.random() < 0.5 for _ in prompts]
        completions = [RIGHT if fine else WRONG for fine in right]
        rewards = length_penalty_reward(completions, ["4"] * len(prompts), prompts, tokens(*lengths))
        expected = []
        for size in sizes:
            expected += kimi(lengths[:size], right[:size])
            lengths, right = lengths[size:], right[size:]
        assert rewards == pytest.approx(expected, abs=1e-12)


def test_a_long_completion_of_another_prompt_changes_nothing():
    alone = length_penalty_reward([RIGHT] * 2, ["4"] * 2, ["p"] * 2, tokens(10, 20))
    beside = length_penalty_reward([RIGHT] * 4, ["4"] * 4, ["p"] * 2 + ["q"] * 2, tokens(10, 20, 1, 1000))
    assert alone == beside[:2] == beside[2:] == [0.5, -0.5]


def test_prompts_of_chat_messages_are_groups_too():
    completions = [as_messages(text) for text in (RIGHT, WRONG, RIGHT, RIGHT)]
    prompts = [as_messages("2+2=") for _ in range(2)] + [as_messages("1+3=") for _ in range(2)]
    rewards = length_penalty_reward(completions, ["4"] * 4, prompts, tokens(10, 20, 30, 40))
    assert rewards == [0.5, -0.5, 0.5, -0.5]


def test_equally_long_completions_and_a_single_one_get_nothing():
    assert length_penalty_reward([RIGHT, WRONG], ["4"] * 2, ["p"] * 2, tokens(7, 7)) == [0.0, 0.0]
    assert length_penalty_reward([RIGHT, WRONG], ["4"] * 2, ["p", "q"], tokens(7, 9)) == [0.0, 0.0]
    assert length_penalty_reward([RIGHT, WRONG], ["4"] * 2, ["p"] * 2, tokens(0, 0)) == [0.0, 0.0]


def test_what_cannot_be_judged_has_no_length_penalty_and_no_say_in_the_others():
    golds = ["4", None, "4", "", "4"]
    rewards = length_penalty_reward([RIGHT] * 5, golds, ["p"] * 5, tokens(10, 1, 20, 99, 12))
    assert rewards == [0.5, None, -0.5, None, pytest.approx(0.3)]
    assert length_penalty_reward([RIGHT] * 2, [None, None], ["p"] * 2, tokens(1, 2)) == [None, None]


def test_wrong_is_never_above_zero_nor_above_right_at_the_same_length():
    lengths = list(range(1, 20))
    rewards = length_penalty_reward([RIGHT, WRONG] * 19, ["4"] * 38, ["p"] * 38, tokens(*sorted(lengths * 2)))
    for right, wrong in zip(rewards[::2], rewards[1::2], strict=True):
        assert wrong <= 0
        assert wrong <= right


def cosine(length, max_len, right, values):
    """From the value at no tokens to the value at max_len, along half a cosine."""
    min_wrong, max_wrong, min_correct, max_correct = values
    start, end = (max_correct, min_correct) if right else (min_wrong, max_wrong)
    share = (1 + math.cos(math.pi * min(length, max_len) / max_len)) / 2
    return share * start + (1 - share) * end


@pytest.mark.parametrize("values", [(-1.0, -0.5, 0.5, 1.0), (-10, 0, 1, 2), (0, 0, 1, 1), (-1, 0.3, -0.2, 0.4)])
@pytest.mark.parametrize("max_len", [1, 7, 100])
def test_the_cosine_reward_has_trls_numbers(values, max_len, monkeypatch):
    # TRL's verifier is another package, which is not what is compared: both schedules get the same verdicts.
    monkeypatch.setattr(trls, "accuracy_reward", accuracy_reward)
    lengths = [0, 1, 2, 3, 6, 7, 8, 50, 99, 100, 101, 1000]
    rows = list(itertools.product([RIGHT, WRONG], lengths, ["4", None]))
    completions, ids = [text for text, _, _ in rows], tokens(*[length for _, length, _ in rows])
    golds = [gold for *_, gold in rows]
    names = ("min_value_wrong", "max_value_wrong", "min_value_correct", "max_value_correct")
    arguments = dict(zip(names, values, strict=True))
    rewards = cosine_length_reward(completions, golds, ids, max_len=max_len, **arguments)
    assert rewards == get_cosine_scaled_reward(max_len, *values)(completions, golds, ids)
    expected = [gold and cosine(length, max_len, text == RIGHT, values) for text, length, gold in rows]
    assert [reward for reward in rewards if reward is not None] == pytest.approx([e for e in expected if e is not None])
    assert [reward is None for reward in rewards] == [gold is None for gold in golds]


def test_the_cosine_rewards_defaults_are_trls():
    rewards = cosine_length_reward([RIGHT, WRONG] * 4, ["4"] * 8, tokens(0, 0, 50, 50, 100, 100, 200, 200), max_len=100)
    assert rewards == pytest.approx([1.0, -1.0, 0.75, -0.75, 0.5, -0.5, 0.5, -0.5])


def test_the_cosine_reward_prefers_short_right_and_long_wrong_completions():
    lengths = range(0, 101, 5)
    right = cosine_length_reward([RIGHT] * 21, ["4"] * 21, tokens(*lengths), max_len=100)
    wrong = cosine_length_reward([as_messages(WRONG)] * 21, ["4"] * 21, tokens(*lengths), max_len=100)
    assert right == sorted(right, reverse=True)
    assert wrong == sorted(wrong)
    assert len(set(right)) == len(set(wrong)) == 21


@pytest.mark.parametrize("max_len", [0, -1, 2.5, "100", None, True])
def test_the_cosine_reward_needs_a_length(max_len):
    with pytest.raises(ValueError, match="max_len must be a whole number of at least 1"):
        cosine_length_reward([], [], [], max_len=max_len)
    with pytest.raises(TypeError, match="max_len"):
        cosine_length_reward([], [], [])


@pytest.mark.parametrize(
    "values",
    [
        {"min_value_wrong": -0.4},
        {"max_value_wrong": -1.1},
        {"min_value_correct": 1.5},
        {"max_value_correct": 0.4},
        {"min_value_wrong": math.nan},
        {"max_value_correct": math.inf},
        {"max_value_correct": "1"},
        {"min_value_wrong": None},
    ],
)
def test_the_cosine_reward_refuses_values_in_the_wrong_order(values):
    kind = next(iter(values)).rpartition("_")[2]
    with pytest.raises(ValueError, match=f"min_value_{kind} must be a number of at most max_value_{kind}"):
        cosine_length_reward([], [], [], max_len=10, **values)


def dapo(length, longest, cache):
    if length <= longest - cache:
        return 0.0
    return -1.0 if length > longest else ((longest - cache) - length) / cache


@pytest.mark.parametrize(("longest", "cache"), [(100, 20), (100, 100), (100, 1), (100, 0), (1, 1), (1, 0), (7, 3)])
def test_the_overlong_punishment_is_dapos_at_every_length(longest, cache):
    lengths = range(longest + 3)
    rewards = soft_overlong_reward(tokens(*lengths), max_completion_len=longest, soft_punish_cache=cache)
    assert rewards == [dapo(length, longest, cache) for length in lengths]
    assert rewards == get_soft_overlong_punishment(longest, cache)(tokens(*lengths))
    assert rewards == sorted(rewards, reverse=True)


def test_the_overlong_punishment_begins_and_ends_where_dapo_says():
    arguments = {"max_completion_len": 100, "soft_punish_cache": 20}
    assert soft_overlong_reward(tokens(0, 80, 81, 90, 99, 100, 101), **arguments) == pytest.approx(
        [0.0, 0.0, -0.05, -0.5, -0.95, -1.0, -1.0]
    )
    without = {"max_completion_len": 100, "soft_punish_cache": 0}
    assert soft_overlong_reward(tokens(100, 101), **without) == [0.0, -1.0]


@pytest.mark.parametrize(
    ("longest", "cache", "words"),
    [
        (0, 0, "max_completion_len must be a whole number of at least 1"),
        (-5, 0, "max_completion_len must be a whole number of at least 1"),
        (1e3, 10, "max_completion_len must be a whole number of at least 1"),
        (100, -1, "soft_punish_cache must be a whole number of at least 0"),
        (100, 0.5, "soft_punish_cache must be a whole number of at least 0"),
        (100, None, "soft_punish_cache must be a whole number of at least 0"),
        (100, 101, "soft_punish_cache must be a number of at most max_completion_len, not 101 beside 100"),
    ],
)
def test_overlong_lengths_that_mean_nothing_are_refused_even_for_an_empty_batch(longest, cache, words):
    with pytest.raises(ValueError, match=words):
        soft_overlong_reward([], max_completion_len=longest, soft_punish_cache=cache)


def test_no_completions_are_no_rewards():
    assert length_penalty_reward([], [], [], []) == []
    assert cosine_length_reward([], [], [], max_len=5) == []
    assert soft_overlong_reward([], max_completion_len=5, soft_punish_cache=2) == []


def test_rewards_are_called_as_trl_calls_them():
    batch = {"prompts": ["2+2="], "completions": [as_messages(RIGHT)], "completion_ids": tokens(3), "solution": ["4"]}
    batch |= FURTHER_COLUMNS
    assert length_penalty_reward(**batch) == [0.0]
    assert cosine_length_reward(max_len=3, **batch) == [0.5]
    assert soft_overlong_reward(max_completion_len=4, soft_punish_cache=2, **batch) == [-0.5]


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="zip"):
        length_penalty_reward([RIGHT] * 2, ["4"] * 2, ["p"] * 2, tokens(1))
    with pytest.raises(ValueError, match="zip"):
        length_penalty_reward([RIGHT] * 2, ["4"] * 2, ["p"], tokens(1, 2))
    with pytest.raises(ValueError, match="zip"):
        cosine_length_reward([RIGHT] * 2, ["4"] * 2, tokens(1), max_len=3)
