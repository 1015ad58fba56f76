r"""The named rewards score each completion by itself, in text or in chat messages."""

import itertools

import pytest

from perl.rewards import accuracy_reward, check, format_reward

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


@pytest.mark.parametrize("gold", [None, "", r"\frac{1}{2}"])
def test_accuracy_has_no_say_where_the_gold_answer_cannot_be_compared(gold):
    assert accuracy_reward([r"\boxed{4}"] * 2, [gold, "4"]) == [None, 1.0]


def test_rewards_read_chat_messages_as_text():
    messages = [as_messages(text) for text in COMPLETIONS]
    assert accuracy_reward(messages, GOLDS) == accuracy_reward(COMPLETIONS, GOLDS)
    assert format_reward(messages) == format_reward(COMPLETIONS)
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
    assert format_reward([r"\boxed{4}"], solution=["4"], **further) == [1.0]


def test_accuracy_refuses_golds_that_are_not_one_a_completion():
    with pytest.raises(ValueError, match="zip"):
        accuracy_reward(COMPLETIONS, GOLDS[:-1])


def test_accuracy_logs_how_many_could_not_be_judged():
    logged = {}
    accuracy_reward([*COMPLETIONS, r"\boxed{4}", ""], [*GOLDS, r"\pi", None], log_metric=logged.__setitem__)
    assert logged == {"reward/accuracy/no_answer_frac": 2 / 8, "reward/accuracy/unparsable_gold_frac": 2 / 8}


def test_no_completions_are_no_rewards():
    logged = {}
    assert accuracy_reward([], [], log_metric=logged.__setitem__) == []
    assert format_reward([]) == []
    assert not logged


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
def test_format_is_one_for_a_completion_that_ends_in_its_only_box(completion, reward):
    assert format_reward([completion]) == [reward]
