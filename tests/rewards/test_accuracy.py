r"""The accuracy rewards are the verifier's verdicts as numbers, for text and chat messages alike."""

import itertools

import pytest

from perl.rewards import accuracy_reward, check, reasoning_accuracy_reward

COMPLETIONS = [
    r"2+2=4 \boxed{4}",
    r"\boxed{5}",
    "I do not know",
    "The answer is 1/2.",
    r"<think>\boxed{4}</think> hm",
    r"\boxed{50\%}",
]
GOLDS = ["4", "4", "4", "0.5", "4", "1/2"]


def as_messages(text):
    return [{"role": "assistant", "content": text}]


def test_accuracy_is_one_for_right_and_zero_for_wrong_or_none():
    assert accuracy_reward(COMPLETIONS, GOLDS) == [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]


def test_accuracy_agrees_with_the_verifier():
    pairs = list(itertools.product(GOLDS, COMPLETIONS))
    rewards = accuracy_reward([text for _, text in pairs], [gold for gold, _ in pairs])
    assert rewards == [float(check(gold, text).right) for gold, text in pairs]


@pytest.mark.parametrize("gold", [None, "", r"\frac{", "t(0,4]"])
def test_accuracy_has_no_say_where_the_gold_answer_cannot_be_compared(gold):
    assert accuracy_reward([r"\boxed{4}"] * 2, [gold, "4"]) == [None, 1.0]


def test_rewards_read_chat_messages_as_text():
    messages = [as_messages(text) for text in COMPLETIONS]
    for reward in (accuracy_reward, reasoning_accuracy_reward):
        assert reward(messages, GOLDS) == reward(COMPLETIONS, GOLDS)
    in_parts = [[*as_messages("so \\boxed{"), *as_messages("4}")], as_messages(None)]
    assert accuracy_reward(in_parts, ["4", "4"]) == [1.0, 0.0]


def test_rewards_ignore_the_other_columns_of_the_data():
    further = {
        "prompts": ["2+2="],
        "completion_ids": [[1]],
        "level": ["hard"],
        "trainer_state": None,
        "log_extra": print,
    }
    assert accuracy_reward([r"\boxed{4}"], solution=["4"], **further) == [1.0]
    assert reasoning_accuracy_reward([r"</think>\boxed{4}"], solution=["4"], **further) == [1.0]


def test_accuracy_refuses_golds_that_are_not_one_a_completion():
    with pytest.raises(ValueError, match="zip"):
        accuracy_reward(COMPLETIONS, GOLDS[:-1])


def test_accuracy_logs_how_many_got_which_verdict():
    logged = {}
    accuracy_reward([*COMPLETIONS, r"\boxed{4}", ""], [*GOLDS, r"\frac{", None], log_metric=logged.__setitem__)
    assert logged == {
        "reward/accuracy/wrong_frac": 1 / 8,
        "reward/accuracy/no_answer_frac": 2 / 8,
        "reward/accuracy/unparsable_gold_frac": 2 / 8,
        "reward/accuracy/timeout_frac": 0.0,
        "reward/accuracy/error_frac": 0.0,
    }


def test_no_completions_are_no_rewards():
    logged = {}
    for reward in (accuracy_reward, reasoning_accuracy_reward):
        assert reward([], [], log_metric=logged.__setitem__) == []
    assert not logged


def test_a_comparison_that_takes_too_long_is_worth_nothing():
    rewards = accuracy_reward(
        [r"\boxed{4^{4^{4^{4^4}}}}", r"\boxed{2\sqrt2}"], [r"5^{5^{5^{5^5}}}", r"\sqrt{8}"], timeout_seconds=1.0
    )
    assert rewards == [0.0, 1.0]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (r"<think>\boxed{4}</think> \boxed{4}", 1.0),
        (r"thoughts</think> The answer is 4.", 1.0),
        (r"<think>\boxed{4}</think> \boxed{5}", 0.0),
        (r"<think>\boxed{4}</think> well", 0.0),
        (r"<think>\boxed{4}", 0.0),
        (r"\boxed{4}", 0.0),
    ],
)
def test_only_what_follows_the_reasoning_counts(completion, reward):
    assert reasoning_accuracy_reward([completion], ["4"]) == [reward]


def test_the_end_of_the_reasoning_may_be_another_word_and_its_absence_is_logged():
    logged = {}
    completions = [r"\boxed{5} FINALLY \boxed{4}", r"\boxed{4}", "</think> 4"]
    rewards = reasoning_accuracy_reward(completions, ["4"] * 3, logged.__setitem__, reasoning_end="FINALLY")
    assert rewards == [1.0, 0.0, 0.0]
    assert logged["reward/reasoning_accuracy/unfinished_frac"] == 2 / 3
    assert logged["reward/reasoning_accuracy/no_answer_frac"] == 2 / 3
