"""Every logged step is in the run folder, as JSON that any reader takes."""

import json
import math

import pytest
from perl.trainer.callbacks.recorder import Recorder, report_of
from transformers import TrainerControl, TrainerState, TrainingArguments

from perl.run.folder import Run
from perl.types import StepReport

GROUP = [
    {"prompt": "1+2=", "completion": "\\boxed{3} ✓", "rewards": {"accuracy": 1.0}, "advantage": 0.5},
    {"prompt": "1+2=", "completion": "\\boxed{4}", "rewards": {"accuracy": None}, "advantage": -0.5},
]
STEP = {"loss": 0.1, "reward": 0.5, "completions/mean_length": 7.5, "entropy": 0.25, "kl": 0.01, "num_tokens": 64.0}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return Run(tmp_path / "run")


@pytest.fixture
def arguments(tmp_path):
    return TrainingArguments(str(tmp_path / "checkpoints"), use_cpu=True)


def log(recorder, arguments, step, logs, first_process=True):
    state = TrainerState(global_step=step, is_world_process_zero=first_process)
    recorder.on_log(arguments, state, TrainerControl(), logs=logs)


def rows_of(path):
    return rows_of_text(path.read_text(encoding="utf-8"))


def rows_of_text(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_a_step_is_recorded_with_its_number_its_samples_and_the_reward(run, arguments):
    recorder = Recorder(run, lambda: GROUP)
    log(recorder, arguments, 1, STEP)
    log(recorder, arguments, 2, {**STEP, "reward": 0.75})
    assert rows_of(run.metrics) == [{"step": 1, **STEP}, {"step": 2, **STEP, "reward": 0.75}]
    assert rows_of(run.samples) == [{"step": step, **sample} for step in (1, 2) for sample in GROUP]
    assert "✓" in run.samples.read_text(encoding="utf-8")  # text stays readable
    facts = Run.read(run.path).facts
    assert facts["steps"] == 2
    assert facts["reward"] == {"first": 0.5, "last": 0.75}


def test_what_json_has_no_number_for_is_null_at_any_depth(run, arguments):
    group = [{"prompt": "p", "completion": "c", "rewards": {"a": math.nan, "b": [1.0, math.inf]}, "advantage": 0.0}]
    recorder = Recorder(run, lambda: group)
    log(recorder, arguments, 1, {**STEP, "grad_norm": math.nan, "kl": -math.inf})
    (row,) = rows_of(run.metrics)
    assert (row["grad_norm"], row["kl"], row["reward"]) == (None, None, 0.5)
    (sample,) = rows_of(run.samples)
    assert sample["rewards"] == {"a": None, "b": [1.0, None]}
    log(Recorder(run, list), arguments, 2, {**STEP, "reward": math.nan})
    (facts,) = rows_of_text(" ".join((run.path / "run.json").read_text().split()))
    assert facts["reward"] == {"first": 0.5, "last": None}


def test_logs_without_a_reward_are_metrics_without_samples(run, arguments):
    recorder = Recorder(run, lambda: GROUP)
    log(recorder, arguments, 3, {"eval_loss": 0.2, "eval_reward": 0.9})
    assert rows_of(run.metrics) == [{"step": 3, "eval_loss": 0.2, "eval_reward": 0.9}]
    assert not run.samples.exists()


@pytest.mark.parametrize(
    ("logs", "first_process"),
    [(None, True), ({}, True), ({"train_runtime": 3.0, "train_loss": 0.1}, True), (STEP, False)],
)
def test_what_is_no_step_or_another_processes_is_not_recorded(run, arguments, logs, first_process):
    log(Recorder(run, lambda: GROUP), arguments, 3, logs, first_process)
    assert list(run.path.iterdir()) == []


def test_a_resumed_run_keeps_its_first_reward_and_its_lines(run, arguments):
    log(Recorder(run, lambda: GROUP), arguments, 1, STEP)
    resumed = Run.read(run.path)
    log(Recorder(resumed, lambda: GROUP), arguments, 2, {**STEP, "reward": 1.0})
    assert [row["step"] for row in rows_of(run.metrics)] == [1, 2]
    assert Run.read(run.path).facts["reward"] == {"first": 0.5, "last": 1.0}


def test_a_report_takes_trls_names():
    assert report_of(4, STEP) == StepReport(step=4, reward=0.5, length=7.5, entropy=0.25, kl=0.01, tokens=64.0)
    assert report_of(4, {}) == StepReport(step=4, reward=None, length=None, entropy=None, kl=None, tokens=0.0)
