"""The accuracy rewards are the verifier's verdicts as numbers; the partial one is a share of characters."""

import os
import random
import signal

import pytest

from perl.rewards import accuracy_reward, partial_answer_reward, reasoning_accuracy_reward
from perl.rewards.verifier import verdicts
from tests.oracles.answer_cases import random_pairs


def test_accuracy_is_one_where_the_values_are_equal_and_zero_where_not_or_without_an_answer():
    pairs = random_pairs(90, seed=4)
    completions = [f"so it is \\boxed{{{answer}}}" for _, answer, _ in pairs]
    assert accuracy_reward(completions, [gold for gold, *_ in pairs]) == [float(same) for *_, same in pairs]
    completions = [
        r"2+2=4 \boxed{4}",
        r"\boxed{5}",
        "I do not know",
        "The answer is 1/2.",
        r"<think>\boxed{4}</think> hm",
    ]
    rewards = accuracy_reward([*completions, r"\boxed{50\%}"], ["4", "4", "4", "0.5", "4", "1/2"])
    assert rewards == [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("gold", [None, "", r"\frac{", "t(0,4]"])
def test_accuracy_is_none_where_the_gold_answer_cannot_be_compared(gold):
    assert accuracy_reward([r"\boxed{4}"] * 2, [gold, "4"]) == [None, 1.0]


def test_accuracy_logs_the_fraction_of_each_verdict():
    kinds = {  # status -> gold answer, completion
        "right": ("4", r"</think>\boxed{4}"),
        "wrong": ("4", r"</think>\boxed{5}"),
        "no_answer": ("4", "</think> I do not know"),
        "unparsable_gold": (r"\frac{", r"</think>\boxed{4}"),
    }
    for reward, name in ((accuracy_reward, "accuracy"), (reasoning_accuracy_reward, "reasoning_accuracy")):
        drawn = random.choices(list(kinds), k=37)
        logged = {}
        reward([kinds[kind][1] for kind in drawn], [kinds[kind][0] for kind in drawn], log_metric=logged.__setitem__)
        kept = {status: logged.pop(f"reward/{name}/{status}_frac") for status in kinds if status != "right"}
        for status, fraction in kept.items():
            assert fraction == sum(kind == status for kind in drawn) / len(drawn)
        assert set(logged.values()) == {0.0}
        assert {f"reward/{name}/timeout_frac", f"reward/{name}/error_frac"} <= set(logged)


def test_a_comparison_that_takes_too_long_is_worth_nothing():
    rewards = accuracy_reward(
        [r"\boxed{4^{4^{4^{4^4}}}}", r"\boxed{2\sqrt2}"], [r"5^{5^{5^{5^5}}}", r"\sqrt{8}"], timeout_seconds=1.0
    )
    assert rewards == [0.0, 1.0]


def test_a_comparison_without_processor_time_is_no_verdict_and_no_reward():
    pool, logged = verdicts._verifier(1)._pool, {}
    pool.start()
    for worker in pool._workers:
        os.kill(worker.process.pid, signal.SIGSTOP)
    arguments = {"timeout_seconds": 0.05, "workers": 1}
    answers, golds = [r"\boxed{2\sqrt{2}}", r"\boxed{4}"], [r"\sqrt{8}", "4"]
    assert accuracy_reward(answers, golds, logged.__setitem__, **arguments) == [None, 1.0]
    assert logged["reward/accuracy/unjudged_frac"] == 0.5
    assert accuracy_reward(answers, golds, workers=1) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("end", "rewards"),
    [
        (
            "</think>",
            {
                r"<think>\boxed{4}</think> \boxed{4}": 1.0,
                "thoughts</think> The answer is 4.": 1.0,
                r"<think>\boxed{4}</think> \boxed{5}": 0.0,
                r"<think>\boxed{4}</think> well": 0.0,
                r"<think>\boxed{4}": 0.0,
                r"\boxed{4}": 0.0,
            },
        ),
        ("FINALLY", {r"\boxed{5} FINALLY \boxed{4}": 1.0, r"\boxed{4}": 0.0, "</think> 4": 0.0}),
    ],
)
def test_only_what_follows_the_reasoning_counts_and_the_fraction_without_its_end_is_logged(end, rewards):
    logged = {}
    chosen = {} if end == "</think>" else {"reasoning_end": end}
    found = reasoning_accuracy_reward(list(rewards), ["4"] * len(rewards), logged.__setitem__, **chosen)
    assert dict(zip(rewards, found, strict=True)) == rewards
    unfinished = sum(end not in completion for completion in rewards) / len(rewards)
    assert logged["reward/reasoning_accuracy/unfinished_frac"] == unfinished
    if end == "FINALLY":  # what has no end has no answer
        assert logged["reward/reasoning_accuracy/no_answer_frac"] == unfinished


@pytest.mark.parametrize(
    ("answer", "gold", "left", "right"),
    [
        ("402913", "402913", 1, 1),
        ("402900", "402913", 4 / 6, 4 / 6),
        ("40 29 00", "402913", 4 / 6, 4 / 6),  # spaces do not count
        ("02913", "402913", 0, 5 / 6),  # the first digit is missing
        ("4029131", "402913", 6 / 7, 0),  # one is too many: nothing is won by writing on
        ("319204", "402913", 0, 0),
        ("", "402913", 0, 0),
        ("0.50", "0.5", 3 / 4, 0),
    ],
)
def test_the_share_is_that_counted_by_hand_from_either_end(answer, gold, left, right):
    completion = [f"so \\boxed{{{answer}}}"]
    assert partial_answer_reward(completion, [gold]) == pytest.approx([left])
    assert partial_answer_reward(completion, [gold], align="right") == pytest.approx([right])


def test_the_answer_is_found_as_by_the_verifier_and_without_a_gold_answer_there_is_no_reward():
    said = ["\\boxed{11}, no: \\boxed{12}", "<think>\\boxed{12}", "The answer is 12.", "twelve", "\\boxed{12}"]
    golds = ["12", "12", "so 12 #### 12", "12", None]
    found = partial_answer_reward(said, golds)
    assert found[:4] == pytest.approx([1, 0, 1, 0])
    assert found[4] is None
    chats = [[{"role": "assistant", "content": text}] for text in said]
    assert partial_answer_reward(chats, golds) == found
    assert partial_answer_reward([], []) == []


def test_another_end_to_count_from_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="no align 'rihgt': did you mean right"):
        partial_answer_reward([], [], align="rihgt")
