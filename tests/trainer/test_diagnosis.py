"""Flat rewards are explained in one line that names the setting to change, and only when they stay flat."""

import itertools
import logging
import math
import re

import numpy as np
import pytest
import torch
from transformers import TrainerControl, TrainingArguments
from trl.trainer.utils import nanstd

from perl.trainer.alarms.of_samples import FlatSteps, diagnose, is_flat
from perl.trainer.callbacks.alarms import FlatRewards
from tests.trainer.test_alarms import log, state_of

SETTINGS = {"max_completion_length": 64, "temperature": 0.7, "num_generations": 8}
FLAT = {"loss": 0.0, "reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
VARIED = {"loss": 0.1, "reward": 0.5, "reward_std": 0.5, "frac_reward_zero_std": 0.75}


def judged(steps=5, reward=0.0, *, truncated=0.0, wrong=0.0, no_answer=0.0, timeout=0.0, unjudged=0.0):
    """Steps whose fractions add up to 1: what is left is right."""
    right = round(1.0 - wrong - no_answer - timeout - unjudged, 6)
    return FlatSteps(
        steps, reward, truncated, right, wrong, no_answer, timeout, unjudged, completion="so it is 4", settings=SETTINGS
    )


def advice(flat):
    return diagnose(flat).rsplit("so it is 4", 1)[1]


def accuracy_logs(**fractions):
    names = ("wrong", "no_answer", "unparsable_gold", "timeout", "unjudged", "error")
    return {f"reward/accuracy/{name}_frac": fractions.get(name, 0.0) for name in names}


ADVICE = (
    (judged(truncated=0.5, no_answer=1.0), "raise rollout.max_completion_length (now 64)"),
    (judged(truncated=1.0, wrong=1.0), "raise rollout.max_completion_length (now 64)"),
    (judged(truncated=0.49, no_answer=1.0), "data.prompt_template or data.system_prompt"),
    (judged(no_answer=0.49, wrong=0.51), "too hard"),
    (judged(unjudged=0.5, wrong=0.5), "`perl reward check RECIPE` lists them"),
    (judged(unjudged=0.6, truncated=1.0, no_answer=0.4), "`perl reward check RECIPE` lists them"),
    (judged(timeout=0.2, no_answer=0.8), "rewards.accuracy.args.timeout_seconds"),
    (judged(timeout=0.19, wrong=0.81), "too hard"),
    (judged(reward=0.95, wrong=0.05), "too easy"),
    (judged(reward=1.0, truncated=1.0), "too easy"),  # a model that does not stop after its answer
    (judged(reward=0.94, wrong=0.06), "rollout.temperature (now 0.7) or train.num_generations (now 8)"),
    (judged(reward=0.06, wrong=0.94), "rollout.temperature (now 0.7) or train.num_generations (now 8)"),
    (judged(reward=0.05, wrong=0.95), "train.num_generations (now 8); or wrong gold answers"),
    (FlatSteps(5, 0.3, 0.6, completion="so it is 4", settings=SETTINGS), "rollout.max_completion_length (now 64)"),
    (FlatSteps(5, 0.3, 0.4, completion="so it is 4", settings=SETTINGS), "the same number"),
    (FlatSteps(5, None, 0.0, completion="so it is 4"), "every reward function returns None or fails"),
)
FAULTS = ("max_completion_length", "lists them", "timeout_seconds", "system_prompt", "too easy", "too hard",
          "temperature", "same number", "returns None")  # fmt: skip


@pytest.mark.parametrize(("flat", "named"), ADVICE)
def test_the_first_fault_that_explains_it_names_the_setting(flat, named):
    assert named in advice(flat)
    assert sum(fault in advice(flat) for fault in FAULTS) == 1
    assert len(diagnose(flat)) <= 420


def test_the_line_has_for_how_long_which_shares_are_known_and_whose_judge_timed_out():
    """Shares of rare faults only if they happened."""
    timed_out = FlatSteps(5, 0.0, 0.0, 0.0, 0.5, 0.0, 0.5, 0.0, judge="reasoning_accuracy")
    rare = judged(truncated=0.001, wrong=0.004, unjudged=0.996)
    for flat, part in (
        (judged(steps=12, wrong=1.0), "for 12 steps no group's rewards differed, so they teach nothing: "),
        (judged(steps=1, wrong=1.0), "for 1 step no group's"),
        (judged(reward=None, unjudged=1.0), "for 5 steps no completion got a reward, "),
        (judged(no_answer=1.0), ": 0 % truncated, 100 % no answer, 0 % wrong, 0 % right;"),
        (judged(wrong=0.25, timeout=0.25), ": 0 % truncated, 0 % no answer, 25 % wrong, 50 % right, 25 % timeout;"),
        (rare, ": <1 % truncated, 0 % no answer, <1 % wrong, 0 % right, >99 % cannot be judged;"),
        (FlatSteps(5, -1 / 3), ": mean reward -0.3333;"),
        (FlatSteps(5, None), ": nothing else is known;"),
        (timed_out, "rewards.reasoning_accuracy.args.timeout_seconds"),
        (FlatSteps(5, 0.5, compares=False), ", so they say of no completion that it is better than another: "),
    ):
        assert part in diagnose(flat)


def test_the_end_of_a_completion_is_shown_on_one_line():
    for completion, ending in (
        (" a\n\n b\t\r\n c ", 'a typical completion ends "a b c";'),
        ("\x1b[31mred\x07\x00\u202e\ud800", 'a typical completion ends "[31mred";'),
        ("é 漢 \\boxed{1}", 'a typical completion ends "é 漢 \\boxed{1}";'),
        ("x" * 80, f'a typical completion ends "{"x" * 80}";'),
        ("y" + "x" * 80, f'a typical completion ends "...{"x" * 80}";'),
        (" \n\x00", "a typical completion is empty;"),
    ):
        line = diagnose(FlatSteps(5, 0.0, completion=completion))
        assert ending in line
        assert line.isprintable()
    assert "typical" not in diagnose(FlatSteps(5, 0.0))


@pytest.mark.parametrize(
    ("logs", "flat"),
    [
        ({"reward": 0.5, "reward_std": 0.4, "frac_reward_zero_std": 1.0}, True),
        ({"reward": 0.5, "reward_std": 0.4, "frac_reward_zero_std": 0.99}, False),
        ({"reward": 0.5, "reward_std": 0.0}, True),
        ({"reward": 0.5, "reward_std": 0.1}, False),
        ({"reward": 0.5, "frac_reward_zero_std": 1.0}, True),
        ({"reward": 0.5, "frac_reward_zero_std": 0.0}, False),
        ({"reward": None, "reward_std": None, "frac_reward_zero_std": 0.0}, True),
        ({"reward": math.nan, "reward_std": math.nan, "frac_reward_zero_std": 0.0}, True),
        ({"reward": math.nan}, True),
        ({"reward": 0.5}, None),
        ({"reward": 0.5, "reward_std": math.nan}, None),
        ({"loss": 0.1}, None),
        ({}, None),
    ],
)
def test_a_step_is_flat_if_no_group_had_variance_or_nothing_got_a_reward(logs, flat):
    assert is_flat(logs) is flat


def test_equal_rewards_are_flat_whatever_trl_rounds_their_deviation_to():
    """TRL takes eight times 0.7 for rewards that differ; the logs are made as it makes them."""
    for reward, generations in itertools.product([0.7, 100.3, -1 / 3], [4, 6, 16]):
        rewards_PG = torch.full((4, generations), reward)
        std = nanstd(rewards_PG, dim=1)
        logs = {
            "reward": rewards_PG.nanmean().item(),
            "reward_std": nanstd(rewards_PG).item(),
            "frac_reward_zero_std": torch.isclose(std, torch.zeros_like(std)).float().mean().item(),
        }
        assert is_flat(logs)
        rewards_PG[0, 0] += 1e-3
        assert not is_flat({**logs, "reward_std": nanstd(rewards_PG).item(), "frac_reward_zero_std": 0.75})


FLATS = [(step, FLAT) for step in range(1, 65)]
EVALUATION = {"eval_loss": 0.1, "eval_reward": 0.5, "eval_frac_reward_zero_std": 0.0}
# What is logged, at which step, and after which of them there is a line; begin: a training, at that step.
SITUATIONS = {
    "so many steps, and again when they have doubled": (5, FLATS, [5, 10, 20, 40]),
    "switched off": (0, FLATS, []),
    "a step that differs begins anew and is named if there was a warning": (
        3,
        [*FLATS[:2], (3, VARIED), *FLATS[3:7], (8, VARIED), (9, VARIED), *FLATS[9:16]],
        [6, 8, 12, 15],
    ),
    "steps on earlier rollouts and evaluations count neither way": (
        3,
        [
            *((step, logs) for step in range(1, 9) for logs in ((FLAT if step % 2 else {"loss": 0.1}), EVALUATION)),
            *((9, {"train_runtime": 1.0, "train_loss": 0.1}), (9, None)),
        ],
        [5],
    ),
    "a resumed run counts from where it begins": (
        2,
        [(100, "begin"), (101, FLAT), (102, FLAT), (102, "begin"), (103, FLAT), (104, FLAT)],
        [102, 104],
    ),
}


@pytest.mark.parametrize(("after", "events", "lines"), SITUATIONS.values(), ids=SITUATIONS)
def test_a_line_comes_after_so_many_flat_steps_in_a_row_and_again_whenever_they_have_doubled(
    tmp_path, caplog, after, events, lines
):
    caplog.set_level(logging.INFO, "perl")
    callback, found = FlatRewards(after), []
    for step, logs in events:
        if logs == "begin":
            callback.on_train_begin(TrainingArguments(str(tmp_path), use_cpu=True), state_of(step), TrainerControl())
        else:
            log(callback, tmp_path, step, logs)
        for record in caplog.records:
            found.append(step)
            assert record.levelname == ("INFO" if logs is VARIED else "WARNING")
            assert logs is not VARIED or "differ within groups again, after 4 steps" in record.getMessage()
        caplog.clear()
    assert found == lines
    log(FlatRewards(1), tmp_path, 1, FLAT, main=False)  # only the main process says it
    assert not caplog.records


def test_fractions_are_means_over_the_flat_steps_alone(tmp_path, caplog):
    """Each log counts as often as it has steps."""

    class Shown:
        def latest_completions(self):
            return ["a", "bb", "ccc"]

    chance, steps, trainer = np.random.default_rng(0), [1, 4, 2, 7], Shown()
    callback, step = FlatRewards(sum(steps)), 1
    callback.serve(trainer)
    log(callback, tmp_path, 1, {**VARIED, "completions/clipped_ratio": 1.0, **accuracy_logs(wrong=1.0)})
    shares = chance.dirichlet([1.0] * 5, len(steps))  # no answer, wrong, right, timeout, error
    truncated = chance.random(len(steps))
    for count, (no_answer, wrong, _, timeout, error), cut in zip(steps, shares, truncated, strict=True):
        step += count
        verdicts = accuracy_logs(no_answer=no_answer, wrong=wrong, timeout=timeout, error=error)
        log(callback, tmp_path, step, {**FLAT, "completions/clipped_ratio": cut, **verdicts})
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"for {sum(steps)} steps ")
    assert 'ends "bb"; ' in line
    names = ("truncated", "no answer", "wrong", "right", "timeout", "cannot be judged")
    found = [float(re.search(rf"(\d+) % {name}", line)[1]) for name in names]
    expected = np.average(np.column_stack([truncated, shares]), axis=0, weights=steps)
    assert found == pytest.approx(100 * expected, abs=0.5)
