r"""Length rewards: as published, by prompt where the paper says so, and silent where nothing can be judged."""

import itertools
import math
import random

import pytest
import trl.rewards.accuracy_rewards as trls
from trl.rewards import get_cosine_scaled_reward, get_soft_overlong_punishment

from perl.rewards import accuracy_reward, countdown_reward, reasoning_accuracy_reward
from perl.rewards.lengths import cosine_length_reward, length_penalty_reward, soft_overlong_reward
from tests.oracles.reward_formulas import cosine_reward, dapo_overlong, kimi_length_penalties

RIGHT, WRONG = r"\boxed{4}", r"\boxed{5}"


def tokens(*lengths):
    return [[7] * length for length in lengths]


def as_messages(text):
    return [{"role": "assistant", "content": text}]


def test_the_length_penalty_is_kimis_of_each_prompt():
    completions, prompts = [RIGHT, RIGHT, RIGHT, WRONG, WRONG, WRONG], ["2+2="] * 6
    rewards = length_penalty_reward(completions, ["4"] * 6, prompts, tokens(10, 15, 30, 10, 15, 30))
    assert rewards == [0.5, 0.25, -0.5, 0.0, 0.0, -0.5]
    for trial in range(200):
        form = as_messages if trial % 2 else str
        sizes = random.choices(range(1, 5), k=3)
        prompts = [form(f"prompt {number}") for number, size in enumerate(sizes) for _ in range(size)]
        lengths = [random.randint(0, random.choice([9, 1000])) for _ in prompts]
        right = [random.random() < 0.5 for _ in prompts]
        completions = [form(RIGHT if fine else WRONG) for fine in right]
        rewards = length_penalty_reward(completions, ["4"] * len(prompts), prompts, tokens(*lengths))
        expected = []
        for size in sizes:
            expected += kimi_length_penalties(lengths[:size], right[:size])
            lengths, right = lengths[size:], right[size:]
        assert rewards == pytest.approx([float(value) for value in expected], abs=1e-15)


def test_what_cannot_be_judged_has_no_length_penalty_and_counts_neither_as_shortest_nor_as_longest():
    golds = {True: "4", False: "5", None: ""}
    for _ in range(100):
        lengths = [random.randint(0, 99) for _ in range(6)]
        right = random.choices([True, False, None], k=6)
        asked = [golds[fine] if random.random() < 0.5 or fine is not None else None for fine in right]
        rewards = length_penalty_reward([RIGHT] * 6, asked, ["p"] * 6, tokens(*lengths))
        expected = kimi_length_penalties(lengths, right)
        assert [reward is None for reward in rewards] == [fine is None for fine in right]
        pairs = zip(rewards, expected, strict=True)
        assert all(abs(reward - value) <= 1e-15 for reward, value in pairs if value is not None)


@pytest.mark.parametrize("values", [None, (-10, 0, 1, 2), (-1, 0.3, -0.2, 0.4)])
@pytest.mark.parametrize("max_len", [1, 100])
def test_the_cosine_reward_has_the_papers_and_trls_numbers(values, max_len, monkeypatch):
    # TRL's verifier is another package, which is not what is compared: both schedules get the same verdicts.
    monkeypatch.setattr(trls, "accuracy_reward", accuracy_reward)
    lengths = [0, 1, 2, 3, 6, 7, 8, 50, 99, 100, 101, 1000]
    rows = list(itertools.product([RIGHT, WRONG], lengths, ["4", None]))
    completions, ids = [text for text, _, _ in rows], tokens(*[length for _, length, _ in rows])
    golds = [gold for *_, gold in rows]
    names = ("min_value_wrong", "max_value_wrong", "min_value_correct", "max_value_correct")
    arguments = dict(zip(names, values, strict=True)) if values else {}
    rewards = cosine_length_reward(completions, golds, ids, max_len=max_len, **arguments)
    min_wrong, max_wrong, min_correct, max_correct = values or (-1.0, -0.5, 0.5, 1.0)
    assert rewards == get_cosine_scaled_reward(max_len=max_len, **arguments)(completions, golds, ids)
    for reward, (text, length, gold) in zip(rewards, rows, strict=True):
        ends = (max_correct, min_correct) if text == RIGHT else (min_wrong, max_wrong)
        assert reward == (None if gold is None else pytest.approx(cosine_reward(length, max_len, *ends), abs=1e-12))


@pytest.mark.parametrize(("longest", "cache"), [(100, 20), (100, 100), (1, 1), (1, 0), (4, 0), (64, 12), (20480, 4096)])
def test_the_overlong_punishment_is_dapos_at_every_length(longest, cache):
    lengths = range(0, longest + 3, max(1, longest // 500))
    rewards = soft_overlong_reward(tokens(*lengths), max_completion_len=longest, soft_punish_cache=cache)
    assert rewards == [float(dapo_overlong(length, longest, cache)) for length in lengths]
    assert rewards == get_soft_overlong_punishment(longest, cache)(tokens(*lengths))
    if cache == longest // 5:  # what it is unless it is told
        assert soft_overlong_reward(tokens(*lengths), max_completion_len=longest) == rewards


COUNT = "must be a whole number of at least"
ORDER = "must be a number of at most"
MEANINGLESS = [
    *[(cosine_length_reward, {"max_len": length}, f"max_len {COUNT} 1") for length in (0, 2.5, True)],
    (cosine_length_reward, {"max_len": 10, "min_value_wrong": -0.4}, f"min_value_wrong {ORDER} max_value_wrong"),
    (cosine_length_reward, {"max_len": 10, "max_value_correct": math.inf}, f"value_correct {ORDER} max_value_correct"),
    (soft_overlong_reward, {"max_completion_len": 0, "soft_punish_cache": 0}, f"max_completion_len {COUNT} 1"),
    (soft_overlong_reward, {"max_completion_len": 100, "soft_punish_cache": "20"}, f"soft_punish_cache {COUNT} 0"),
    (soft_overlong_reward, {"max_completion_len": 100, "soft_punish_cache": 101}, f"{ORDER} max_completion_len"),
]


@pytest.mark.parametrize(("reward", "settings", "words"), MEANINGLESS)
def test_lengths_and_values_that_mean_nothing_are_refused_even_for_an_empty_batch(reward, settings, words):
    columns = ([], [], []) if reward is cosine_length_reward else ([],)
    with pytest.raises(ValueError, match=words):
        reward(*columns, **settings)
    with pytest.raises(TypeError, match=next(iter(settings))):
        reward(*columns)


def test_columns_that_are_not_as_long_as_the_completions_are_refused():
    two = [RIGHT] * 2
    for call in (
        lambda: accuracy_reward(two, ["4"]),
        lambda: reasoning_accuracy_reward(two, ["4"]),
        lambda: length_penalty_reward(two, ["4"] * 2, ["p"] * 2, tokens(1)),
        lambda: length_penalty_reward(two, ["4"] * 2, ["p"], tokens(1, 2)),
        lambda: cosine_length_reward(two, ["4"] * 2, tokens(1), max_len=3),
        lambda: countdown_reward(two, [4], [[4]] * 2),
        lambda: countdown_reward(two, [4], [[4]]),
    ):
        with pytest.raises(ValueError, match="zip"):
            call()
