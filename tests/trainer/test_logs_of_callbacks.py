"""Every logged step is in the run folder, as JSON that any reader takes."""

import json
import math
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from perl.errors import RecipeError
from perl.run.folder import Run
from perl.run.logs import read_log, rewind_log
from perl.trainer.callbacks.step_logs import LearningCurves, SamplesLog
from perl.training.policy_stage import RunRecord

GROUP = [
    {"prompt": "1+2=", "completion": "\\boxed{3} ✓", "rewards": {"accuracy": 1.0}, "advantage": 0.5},
    {"prompt": "1+2=", "completion": "\\boxed{4}", "rewards": {"accuracy": None}, "advantage": -0.5},
]
STEP = {"loss": 0.1, "reward": 0.5, "completions/mean_length": 7.5, "entropy": 0.25, "kl": 0.01, "num_tokens": 64.0}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").touch()
    return Run(tmp_path / "run")


@pytest.fixture
def arguments(tmp_path):
    return TrainingArguments(str(tmp_path / "checkpoints"), use_cpu=True)


class Bound(SamplesLog):
    """As a trainer binds it that has just written a group."""

    group = GROUP

    @property
    def trainer(self):
        return SimpleNamespace(latest_group=lambda: self.group)


def callbacks_of(run, group=GROUP):
    samples = Bound(run.path)
    samples.group = group
    return [LearningCurves(run.path), samples, RunRecord(run)]


def log(run, arguments, step, *every, group=GROUP, first_process=True, begun_at=0):
    """Logs follow each other, the first of them at a step."""
    begun = TrainerState(global_step=begun_at, is_world_process_zero=first_process)
    for callback in callbacks_of(run, group):
        callback.on_train_begin(arguments, begun, TrainerControl())
        for offset, logs in enumerate(every):
            state = TrainerState(global_step=step + offset, is_world_process_zero=first_process)
            callback.on_log(arguments, state, TrainerControl(), logs=logs)


def rows_of(path):
    return rows_of_text(path.read_text(encoding="utf-8"))


def rows_of_text(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_a_step_is_recorded_with_its_number_its_samples_and_the_reward(run, arguments):
    log(run, arguments, 1, STEP, {**STEP, "reward": 0.75})
    assert rows_of(run.metrics) == [{"step": 1, **STEP}, {"step": 2, **STEP, "reward": 0.75}]
    assert rows_of(run.samples) == [{"step": step, **sample} for step in (1, 2) for sample in GROUP]
    assert "✓" in run.samples.read_text(encoding="utf-8")  # text stays readable
    facts = Run.read(run.path).facts
    assert facts["steps"] == 2
    assert facts["reward"] == {"first": 0.5, "last": 0.75}


def test_what_json_has_no_number_for_is_null_at_any_depth(run, arguments):
    group = [{"prompt": "p", "completion": "c", "rewards": {"a": math.nan, "b": [1.0, math.inf]}, "advantage": 0.0}]
    log(run, arguments, 1, {**STEP, "grad_norm": math.nan, "kl": -math.inf}, group=group)
    (row,) = rows_of(run.metrics)
    assert (row["grad_norm"], row["kl"], row["reward"]) == (None, None, 0.5)
    (sample,) = rows_of(run.samples)
    assert sample["rewards"] == {"a": None, "b": [1.0, None]}
    log(run, arguments, 2, {**STEP, "reward": math.nan}, begun_at=1)
    (facts,) = rows_of_text(" ".join((run.path / "run.json").read_text().split()))
    assert facts["reward"] == {"first": 0.5, "last": None}


def test_logs_without_a_reward_are_metrics_without_samples(run, arguments):
    log(run, arguments, 3, {"eval_loss": 0.2, "eval_reward": 0.9})
    assert rows_of(run.metrics) == [{"step": 3, "eval_loss": 0.2, "eval_reward": 0.9}]
    assert not run.samples.exists()


@pytest.mark.parametrize(
    ("logs", "first_process"),
    [(None, True), ({}, True), ({"train_runtime": 3.0, "train_loss": 0.1}, True), (STEP, False)],
)
def test_what_is_no_step_or_another_processes_is_not_recorded(run, arguments, logs, first_process):
    log(run, arguments, 3, logs, first_process=first_process)
    assert [path.name for path in run.path.iterdir()] == ["recipe.yaml"]


def test_a_resumed_run_keeps_its_first_reward_and_its_lines(run, arguments):
    log(run, arguments, 1, STEP, {**STEP, "reward": 0.25})
    log(Run.read(run.path), arguments, 2, {**STEP, "reward": 1.0}, begun_at=1)
    assert [(row["step"], row["reward"]) for row in rows_of(run.metrics)] == [(1, 0.5), (2, 1.0)]
    assert [row["step"] for row in rows_of(run.samples)] == [1, 1, 2, 2]
    assert Run.read(run.path).facts["reward"] == {"first": 0.5, "last": 1.0}


def test_texts_with_any_mark_of_a_line_are_one_row_and_stay_when_a_log_is_rewound(run, arguments):
    text = "a\u2028b\u2029c\x85d\x0be"
    log(run, arguments, 1, STEP, {**STEP}, group=[{**GROUP[0], "completion": text}])
    with run.samples.open("a") as file:
        file.write('{"step": 2, "completion": "cut sh')  # by a kill
    before = run.samples.read_bytes()
    rewind_log(run.samples, 1)
    assert [(row["step"], row["completion"]) for row in read_log(run.samples)] == [(1, text)]
    assert before.startswith(run.samples.read_bytes())
    rewind_log(run.samples, 5)
    assert len(read_log(run.samples)) == 1


def test_samples_are_taken_every_so_many_steps_the_first_logged_one_among_them(run, arguments):
    samples = Bound(run.path, every=4)
    samples.on_train_begin(arguments, TrainerState(global_step=0), TrainerControl())
    for step in range(1, 14):
        samples.on_log(arguments, TrainerState(global_step=step), TrainerControl(), logs=STEP)
    assert sorted({row["step"] for row in rows_of(run.samples)}) == [1, 4, 8, 12]


@pytest.mark.parametrize("every", [0, -1, 1.5, "2", True])
def test_steps_between_samples_are_a_whole_number(every):
    with pytest.raises(RecipeError, match=r"SamplesLog\(every\): must be a whole number of at least 1"):
        SamplesLog(every=every)
