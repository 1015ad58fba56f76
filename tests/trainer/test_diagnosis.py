"""Flat rewards are explained in one line that names the setting to change, and only when they stay flat."""

import itertools
import logging
import math
import re

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import TrainerControl, TrainerState, TrainingArguments
from trl.trainer.utils import nanstd

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import RewardError
from perl.rewards import accuracy_reward
from perl.sandbox import load_problems
from perl.trainer.alarms.of_samples import FlatSteps, diagnose, is_flat, typical
from perl.trainer.callbacks.alarms import FlatRewards

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
    names = ("wrong", "no_answer", "unparsable_gold", "timeout", "error")
    return {f"reward/accuracy/{name}_frac": fractions.get(name, 0.0) for name in names}


@pytest.fixture
def said(caplog):
    """The lines of the logger "perl" with their levels, and takes them away."""
    caplog.set_level(logging.INFO, "perl")

    def take():
        lines = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "perl"]
        caplog.clear()
        return lines

    return take


@pytest.fixture
def arguments(tmp_path):
    return TrainingArguments(str(tmp_path / "checkpoints"), use_cpu=True)


def log(callback, arguments, step, logs, first_process=True):
    callback.on_log(
        arguments, TrainerState(global_step=step, is_world_process_zero=first_process), TrainerControl(), logs=logs
    )


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


def test_the_typical_completion_has_the_median_length():
    for count in (1, 2, 3, 4, 7):
        lengths = sorted(7 * i % 11 for i in range(count))
        assert len(typical(["x" * length for length in lengths[::-1]])) == lengths[(count - 1) // 2]
    assert typical([]) is None


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
    arguments, said, after, events, lines
):
    callback, found = FlatRewards(after, list), []
    for step, logs in events:
        if logs == "begin":
            callback.on_train_begin(arguments, TrainerState(global_step=step), TrainerControl())
        else:
            log(callback, arguments, step, logs)
        for level, line in said():
            found.append(step)
            assert level == ("INFO" if logs is VARIED else "WARNING")
            assert logs is not VARIED or "differ within groups again, after 4 steps" in line
    assert found == lines
    log(FlatRewards(1, list), arguments, 1, FLAT, first_process=False)  # only the main process says it
    assert said() == []


def test_fractions_are_means_over_the_flat_steps_alone(arguments, said):
    """Each log counts as often as it has steps."""
    chance, steps = np.random.default_rng(0), [1, 4, 2, 7]
    callback, step = FlatRewards(sum(steps), lambda: ["a", "bb", "ccc"]), 1
    log(callback, arguments, 1, {**VARIED, "completions/clipped_ratio": 1.0, **accuracy_logs(wrong=1.0)})
    shares = chance.dirichlet([1.0] * 5, len(steps))  # no answer, wrong, right, timeout, error
    truncated = chance.random(len(steps))
    for count, (no_answer, wrong, _, timeout, error), cut in zip(steps, shares, truncated, strict=True):
        step += count
        verdicts = accuracy_logs(no_answer=no_answer, wrong=wrong, timeout=timeout, error=error)
        log(callback, arguments, step, {**FLAT, "completions/clipped_ratio": cut, **verdicts})
    ((level, line),) = said()
    assert level == "WARNING"
    assert line.startswith(f"for {sum(steps)} steps ")
    assert 'ends "bb"; ' in line
    names = ("truncated", "no answer", "wrong", "right", "timeout", "cannot be judged")
    found = [float(re.search(rf"(\d+) % {name}", line)[1]) for name in names]
    expected = np.average(np.column_stack([truncated, shares]), axis=0, weights=steps)
    assert found == pytest.approx(100 * expected, abs=0.5)


def trained(steps, tmp_path, said, reward=accuracy_reward, **settings):
    """What is said while the tiny model trains."""
    problems = load_problems("sandbox:addition", "train")[:16]
    arguments = PeftRLConfig(
        str(tmp_path / "run"),
        prompts_per_step=2,
        num_generations=2,
        max_steps=steps,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    trainer = PeftGRPOTrainer(
        model="sandbox:base",
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": p.question, "solution": p.answer} for p in problems]),
    )
    said()
    trainer.train()
    return trainer, [line for level, line in said() if level == "WARNING"]


def none(completions, **_):
    return [None] * len(completions)


@pytest.mark.parametrize(
    ("reward", "steps", "length", "parts"),
    [
        (
            *(accuracy_reward, 2, 4),
            [
                "for 2 steps no group's rewards differed, so they teach nothing: ",
                ": 100 % truncated, 100 % no answer, 0 % wrong, 0 % right; ",
                "raise max_completion_length (now 4)",  # as a script writes it
                " [PRL403]",
            ],
        ),
        (none, 1, 8, ["for 1 step no completion got a reward, "]),
    ],
)
def test_a_run_is_told_why_it_learns_nothing(tmp_path, said, reward, steps, length, parts):
    settings = {"max_completion_length": length, "flat_reward_steps": steps}
    trainer, (line, last) = trained(steps, tmp_path, said, reward, **settings)
    assert last == f"nothing was trained: there was no gradient in any of {steps} steps [PRL323]"
    assert [part for part in parts if part not in line] == []
    if reward is not none:
        assert trainer.state.log_history[0]["frac_reward_zero_std"] == 1.0


def test_an_infinite_reward_ends_a_script_before_it_trains_on_it(tmp_path, said):
    def infinite(completions, **_):
        return [float("inf"), *[0.0] * (len(completions) - 1)]

    for options in ({}, {"algorithm": "dr_grpo"}, {"algorithm": "rloo"}, {"algorithm": "gdpo"}):
        with pytest.raises(RewardError, match=r"^reward infinite: returned inf, which is not finite [^\n]*$"):
            trained(1, tmp_path, said, infinite, max_completion_length=8, **options)


def test_a_run_that_masks_its_truncated_completions_is_told_to_raise_their_length(tmp_path, said):
    def lengths(completions, **_):  # differ, so that the line on flat rewards cannot come
        return [float(i) for i in range(len(completions))]

    settings = {"max_completion_length": 4, "flat_reward_steps": 1}
    trainer, lines = trained(3, tmp_path, said, lengths, mask_truncated_completions=True, **settings)
    line, last = lines
    assert last == "nothing was trained: there was no gradient in any of 3 steps [PRL323]"
    assert line.startswith(
        "100 % of the completions of the newest 3 steps are masked out, completions/clipped_ratio is 1.00"
    )
    assert ": mask_truncated_completions leaves truncated ones out of the loss; " in line
    assert "raise max_completion_length (now 4)" in line
    assert line.endswith(" [PRL401]")
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["rows/masked_fraction"] for entry in steps] == [1.0, 1.0, 1.0]
    trainer, lines = trained(3, tmp_path, said, lengths, mask_truncated_completions=False, **settings)
    assert not lines
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["rows/masked_fraction"] for entry in steps] == [0.0, 0.0, 0.0]
