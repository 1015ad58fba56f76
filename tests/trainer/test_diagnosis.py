"""Flat rewards are explained in one line that names the setting to change, and only when they stay flat."""

import logging
import math
import statistics

import pytest
import torch
from datasets import Dataset
from transformers import TrainerControl, TrainerState, TrainingArguments
from trl.trainer.utils import nanstd

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.rewards import accuracy_reward
from perl.sandbox import load_problems
from perl.trainer.callbacks.diagnosis import FlatRewards, FlatSteps, MaskedRows, diagnose, is_flat, typical

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


def warned_at(callback, arguments, said, steps, logs=FLAT):
    """The steps after which there was a line."""
    found = []
    for step in steps:
        log(callback, arguments, step, logs)
        if said():
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("flat", "named"),
    [
        (judged(truncated=0.5, no_answer=1.0), "raise rollout.max_completion_length (now 64)"),
        (judged(truncated=1.0, wrong=1.0), "raise rollout.max_completion_length (now 64)"),
        (judged(truncated=0.49, no_answer=1.0), "data.prompt_template or data.system_prompt"),
        (judged(no_answer=0.5, wrong=0.5), r'e.g. "put your final answer within \boxed{}"'),
        (judged(no_answer=0.49, wrong=0.51), "too hard"),
        (judged(unjudged=0.5, wrong=0.5), "`perl reward check RECIPE` lists them"),
        (judged(unjudged=0.49, wrong=0.51), "too hard"),
        (judged(unjudged=0.6, truncated=1.0, no_answer=0.4), "`perl reward check RECIPE` lists them"),
        (judged(timeout=0.2, wrong=0.8), "rewards.accuracy.args.timeout_seconds"),
        (judged(timeout=0.2, no_answer=0.8), "rewards.accuracy.args.timeout_seconds"),
        (judged(timeout=0.19, wrong=0.81), "too hard"),
        (judged(reward=1.0), "too easy"),
        (judged(reward=0.95, wrong=0.05), "too easy"),
        (judged(reward=1.0, truncated=1.0), "too easy"),  # a model that does not stop after its answer
        (judged(reward=0.94, wrong=0.06), "rollout.temperature (now 0.7) or train.num_generations (now 8)"),
        (judged(reward=0.06, wrong=0.94), "rollout.temperature (now 0.7) or train.num_generations (now 8)"),
        (
            judged(reward=0.05, wrong=0.95),
            "train.num_generations (now 8); or wrong gold answers: `perl reward check RECIPE`",
        ),
        (judged(wrong=0.6, no_answer=0.4), "too hard: easier problems (data.train)"),
        (FlatSteps(5, 0.3, 0.6, completion="so it is 4", settings=SETTINGS), "rollout.max_completion_length (now 64)"),
        (FlatSteps(5, 0.3, 0.4, completion="so it is 4", settings=SETTINGS), "the same number"),
        (FlatSteps(5, 0.3, completion="so it is 4"), "the same number"),
        (FlatSteps(5, None, 0.0, completion="so it is 4"), "every reward function returns None or fails"),
    ],
)
def test_the_first_fault_that_explains_it_names_the_setting(flat, named):
    assert named in advice(flat)
    faults = ("max_completion_length", "lists them", "timeout_seconds", "system_prompt", "too easy", "too hard",
              "temperature", "same number", "returns None")  # fmt: skip
    assert sum(fault in advice(flat) for fault in faults) == 1


@pytest.mark.parametrize(
    ("flat", "shares"),
    [
        (judged(no_answer=1.0), "0 % truncated, 100 % no answer, 0 % wrong, 0 % right;"),
        (judged(wrong=0.25, timeout=0.25), "0 % truncated, 0 % no answer, 25 % wrong, 50 % right, 25 % timeout;"),
        (
            judged(truncated=0.001, wrong=0.004, unjudged=0.996),
            "<1 % truncated, 0 % no answer, <1 % wrong, 0 % right, >99 % cannot be judged;",
        ),
        (FlatSteps(5, 0.25, 0.125), "12 % truncated, mean reward 0.25;"),
        (FlatSteps(5, -1 / 3), "mean reward -0.3333;"),
        (FlatSteps(5, None), "nothing else is known;"),
        (FlatSteps(5, None, 0.0), "0 % truncated;"),
    ],
)
def test_fractions_that_are_known_are_said_and_rare_faults_only_if_they_happened(flat, shares):
    assert f": {shares}" in diagnose(flat)


def test_the_line_begins_with_what_happened_for_how_long():
    line = diagnose(judged(steps=12, wrong=1.0))
    assert line.startswith("for 12 steps no group's rewards differed, so they teach nothing: ")
    assert diagnose(judged(steps=1, wrong=1.0)).startswith("for 1 step no ")
    assert diagnose(judged(reward=None, unjudged=1.0)).startswith("for 5 steps no completion got a reward, ")


def test_the_judge_that_timed_out_is_named():
    flat = FlatSteps(5, 0.0, 0.0, 0.0, 0.5, 0.0, 0.5, 0.0, judge="reasoning_accuracy")
    assert "rewards.reasoning_accuracy.args.timeout_seconds" in diagnose(flat)


@pytest.mark.parametrize(
    ("completion", "ending"),
    [
        ("42", 'a typical completion ends "42";'),
        (" a\n\n b\t\r\n c ", 'a typical completion ends "a b c";'),
        ("\x1b[31mred\x07\x00\u202e\ud800", 'a typical completion ends "[31mred";'),
        ("é 漢 \\boxed{1}", 'a typical completion ends "é 漢 \\boxed{1}";'),
        ("x" * 80, f'a typical completion ends "{"x" * 80}";'),
        ("y" + "x" * 80, f'a typical completion ends "...{"x" * 80}";'),
        ("", "a typical completion is empty;"),
        (" \n\x00", "a typical completion is empty;"),
    ],
)
def test_the_end_of_a_completion_is_shown_on_one_line(completion, ending):
    line = diagnose(FlatSteps(5, 0.0, completion=completion))
    assert ending in line
    assert line.isprintable()


def test_without_a_completion_none_is_shown():
    assert "typical" not in diagnose(FlatSteps(5, 0.0))


def test_the_longest_line_is_still_one_that_is_read():
    """Every advice, with the longest ending and all fractions."""
    lines = []
    settings = {**SETTINGS, "max_completion_length": 131072}
    for fault in ("truncated", "wrong", "no_answer", "timeout", "unjudged", "right"):
        shares = dict.fromkeys(("truncated", "right", "wrong", "no_answer", "timeout", "unjudged"), 0.001)
        shares[fault] = 0.98
        flat = FlatSteps(99999, 0.1, **shares, judge="reasoning_accuracy", completion="x" * 99, settings=settings)
        lines.append(diagnose(flat))
    lines.append(diagnose(FlatSteps(99999, -0.333333, 0.4, completion="x" * 99)))
    assert len(set(lines)) >= 6
    assert max(map(len, lines)) <= 420


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_the_typical_completion_has_the_median_length(count):
    completions = ["x" * (7 * i % 11) for i in range(count)]
    assert len(typical(completions)) == statistics.median_low(map(len, completions))


def test_of_no_completions_none_is_typical():
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


@pytest.mark.parametrize("reward", [0.7, 1.2, 0.1, 100.3, -1 / 3])
@pytest.mark.parametrize("generations", [4, 6, 8, 16])
def test_equal_rewards_are_flat_whatever_trl_rounds_their_deviation_to(reward, generations):
    """TRL takes eight times 0.7 for rewards that differ; the logs are made as it makes them."""
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


@pytest.mark.parametrize(("after", "lines"), [(5, [5, 10, 20, 40]), (1, [1, 2, 4, 8, 16, 32, 64]), (70, [])])
def test_the_line_comes_after_so_many_steps_and_again_when_their_number_has_doubled(arguments, said, after, lines):
    callback = FlatRewards(after, list)
    assert warned_at(callback, arguments, said, range(1, 65)) == lines


def test_a_step_that_differs_begins_anew_and_is_said_once_if_there_was_a_warning(arguments, said):
    callback = FlatRewards(3, list)
    assert warned_at(callback, arguments, said, [1, 2]) == []
    log(callback, arguments, 3, VARIED)
    assert said() == []
    assert warned_at(callback, arguments, said, [4, 5, 6, 7]) == [6]
    log(callback, arguments, 8, VARIED)
    ((level, line),) = said()
    assert (level, line) == ("INFO", "rewards differ within groups again, after 4 steps in which they did not")
    log(callback, arguments, 9, VARIED)
    assert said() == []
    assert warned_at(callback, arguments, said, range(10, 17)) == [12, 15]


def test_logs_of_several_steps_count_as_such(arguments, said):
    callback = FlatRewards(5, list)
    assert warned_at(callback, arguments, said, [10, 20, 30, 40, 50, 60, 70, 80]) == [10, 20, 40, 80]
    log(callback, arguments, 90, VARIED)
    assert "after 80 steps" in said()[0][1]


def test_steps_on_earlier_rollouts_and_evaluations_count_neither_way(arguments, said):
    callback = FlatRewards(3, list)
    for step in range(1, 9):
        log(callback, arguments, step, FLAT if step % 2 else {"loss": 0.1})
        log(callback, arguments, step, {"eval_loss": 0.1, "eval_reward": 0.5, "eval_frac_reward_zero_std": 0.0})
        assert bool(said()) is (step == 5)
    log(callback, arguments, 9, {"train_runtime": 1.0, "train_loss": 0.1})
    log(callback, arguments, 9, None)
    assert said() == []


def test_a_resumed_run_counts_from_where_it_begins(arguments, said):
    callback = FlatRewards(2, list)
    callback.on_train_begin(arguments, TrainerState(global_step=100), TrainerControl())
    assert warned_at(callback, arguments, said, [101, 102]) == [102]
    callback.on_train_begin(arguments, TrainerState(global_step=102), TrainerControl())
    assert warned_at(callback, arguments, said, [103, 104]) == [104]


def test_nothing_is_said_where_it_is_switched_off_or_by_other_processes(arguments, said):
    callback = FlatRewards(0, list)
    assert warned_at(callback, arguments, said, range(1, 20)) == []
    callback = FlatRewards(1, list)
    log(callback, arguments, 1, FLAT, first_process=False)
    assert said() == []


def test_fractions_are_means_over_the_flat_steps_alone(arguments, said):
    callback = FlatRewards(2, lambda: ["a", "bb", "ccc"])
    log(callback, arguments, 1, {**VARIED, "completions/clipped_ratio": 1.0, **accuracy_logs(wrong=1.0)})
    log(callback, arguments, 2, {**FLAT, "completions/clipped_ratio": 0.5, **accuracy_logs(no_answer=1.0)})
    log(callback, arguments, 3, {**FLAT, "completions/clipped_ratio": 0.1, **accuracy_logs(wrong=0.5, error=0.25)})
    ((level, line),) = said()
    assert level == "WARNING"
    assert line.startswith("for 2 steps ")
    assert "30 % truncated, 50 % no answer, 25 % wrong, 12 % right, 12 % cannot be judged; " in line
    assert 'ends "bb"; ask for the form of the answer' in line


def test_fractions_in_single_precision_add_up(arguments, said):
    """As TRL averages what a reward logs; what is left of 1 is no right completion."""
    thirds = {name: float(torch.tensor(1 / 3)) for name in ("wrong", "no_answer", "timeout")}
    log(FlatRewards(1, list), arguments, 1, {**FLAT, **accuracy_logs(**thirds)})
    assert "33 % no answer, 33 % wrong, 0 % right, 33 % timeout" in said()[0][1]


def test_a_run_without_the_accuracy_reward_knows_length_and_reward_alone(arguments, said):
    log(FlatRewards(1, list), arguments, 1, {**FLAT, "reward": 0.7, "completions/clipped_ratio": 0.0})
    assert ": 0 % truncated, mean reward 0.7; the reward function gives" in said()[0][1]


def test_rewards_that_are_all_none_say_so(arguments, said):
    logs = {**FLAT, "reward": None, "reward_std": None, "frac_reward_zero_std": 0.0}
    log(FlatRewards(1, list), arguments, 1, logs)
    assert said()[0][1].startswith("for 1 step no completion got a reward, ")
    log(FlatRewards(1, list), arguments, 1, {**logs, **accuracy_logs(unparsable_gold=1.0)})
    assert "100 % cannot be judged; the gold answers cannot be read" in said()[0][1]


def test_accuracy_after_reasoning_is_known_as_well(arguments, said):
    logs = {key.replace("accuracy", "reasoning_accuracy"): share for key, share in accuracy_logs(wrong=1.0).items()}
    log(FlatRewards(1, list), arguments, 1, {**FLAT, **logs})
    assert "100 % wrong, 0 % right" in said()[0][1]


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


def test_a_run_whose_completions_are_cut_off_is_told_to_raise_their_length(tmp_path, said):
    trainer, lines = trained(3, tmp_path, said, max_completion_length=4, flat_reward_steps=2)
    (line,) = lines
    assert line.startswith("for 2 steps no group's rewards differed, so they teach nothing: ")
    assert ": 100 % truncated, 100 % no answer, 0 % wrong, 0 % right; " in line
    assert "raise rollout.max_completion_length (now 4)" in line
    assert trainer.state.log_history[1]["frac_reward_zero_std"] == 1.0


def test_a_run_whose_reward_is_constant_or_none_is_told_so(tmp_path, said):
    def constant(completions, **_):
        return [0.7] * len(completions)

    def none(completions, **_):
        return [None] * len(completions)

    _, (line,) = trained(1, tmp_path, said, constant, max_completion_length=64, flat_reward_steps=1)
    assert "mean reward 0.7; " in line
    assert "gives all completions of a prompt the same number" in line
    _, (line,) = trained(1, tmp_path, said, none, max_completion_length=8, flat_reward_steps=1)
    assert line.startswith("for 1 step no completion got a reward, ")


def masked(share, truncated=None):
    truncated = share if truncated is None else truncated
    return {"loss": 0.0, "reward": 0.5, "rows/masked_fraction": share, "completions/clipped_ratio": truncated}


def test_steps_that_mask_nearly_all_rows_are_said_at_the_third_and_whenever_they_have_doubled(arguments, said):
    callback = MaskedRows()
    assert warned_at(callback, arguments, said, range(1, 30), masked(0.9)) == [3, 6, 12, 24]
    assert warned_at(MaskedRows(), arguments, said, range(1, 30), masked(0.89)) == []
    callback = MaskedRows()
    for step in range(1, 9):  # they need not follow each other
        log(callback, arguments, step, masked(1.0 if step % 3 == 0 else 0.5))
    assert not said()
    log(callback, arguments, 9, masked(1.0))
    assert len(said()) == 1


def test_the_closing_entry_which_has_the_last_step_once_more_is_no_further_step(arguments, said):
    callback = MaskedRows()
    for step in range(1, 3):
        log(callback, arguments, step, masked(1.0))
    log(callback, arguments, 2, {**masked(1.0), "train_runtime": 1.0})
    assert not said()


def test_steps_without_rollouts_and_other_processes_say_nothing_of_masked_rows(arguments, said):
    callback = MaskedRows()
    for step in range(1, 9):
        log(callback, arguments, step, {"loss": 0.0})
        log(callback, arguments, step, masked(1.0), first_process=False)
        log(callback, arguments, step, {"eval_loss": 0.0, "eval_rows/masked_fraction": 1.0})
    assert not said()


def test_rows_that_something_else_masks_are_not_called_truncated(arguments, said):
    callback = MaskedRows()
    for step in range(1, 4):
        log(callback, arguments, step, masked(1.0, truncated=0.0))
    ((_, line),) = said()
    assert line.startswith("3 steps so far have masked out 90 % or more of their completions, the newest 100 %: ")
    assert "truncated" not in line


def test_a_run_that_masks_its_truncated_completions_is_told_to_raise_their_length(tmp_path, said):
    def lengths(completions, **_):  # differ, so that the line on flat rewards cannot come
        return [float(i) for i in range(len(completions))]

    settings = {"max_completion_length": 4, "flat_reward_steps": 1}
    trainer, lines = trained(3, tmp_path, said, lengths, mask_truncated_completions=True, **settings)
    (line,) = lines
    assert "completions/clipped_ratio is 1.00" in line
    assert "train.mask_truncated_completions" in line
    assert "raise rollout.max_completion_length (now 4)" in line
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["rows/masked_fraction"] for entry in steps] == [1.0, 1.0, 1.0]
    trainer, lines = trained(3, tmp_path, said, lengths, mask_truncated_completions=False, **settings)
    assert not lines
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["rows/masked_fraction"] for entry in steps] == [0.0, 0.0, 0.0]
