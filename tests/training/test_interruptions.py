"""Runs that are stopped or killed, as real processes: what is kept, what the next start does, what comes out."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import perl
from perl.policy.checkpoint import latest_checkpoint
from tests import warm
from tests.launch import launchers

RECIPE = launchers.RECIPE.replace("enabled: false", "limit: 4, k: 1, max_completion_length: 16")
OUTPUT = Path("runs/recipe")


def write_recipe(folder: Path) -> None:
    (folder / "tripwire.py").write_text(launchers.TRIPWIRE)
    (folder / "recipe.yaml").write_text(RECIPE)


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "perl", "train", "recipe.yaml"]
    return warm.popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def train(folder: Path) -> tuple[int, str]:
    process = start(folder)
    _, stderr = process.communicate()
    return process.returncode, stderr


def facts_of(run: Path) -> dict:
    return json.loads((run / "run.json").read_text())


def assert_same_adapter(run: Path, other: Path) -> None:
    """Every number of it, bit for bit, and the file."""
    ours, theirs = (folder / "adapter" / "adapter_model.safetensors" for folder in (run, other))
    found, expected = load_file(ours), load_file(theirs)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert ours.read_bytes() == theirs.read_bytes()


def steps_in(log: Path) -> list[int]:
    return [json.loads(line)["step"] for line in log.read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the same recipe, trained in one go."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    write_recipe(folder)
    assert train(folder)[0] == 0
    return folder / OUTPUT


def assert_finished_like(run: Path, uninterrupted: Path) -> None:
    """The same adapter bit for bit, the same scores and every step logged once."""
    assert facts_of(run)["status"] == "done"
    assert_same_adapter(run, uninterrupted)
    assert facts_of(run)["eval"] == facts_of(uninterrupted)["eval"]
    assert facts_of(run)["reward"] == facts_of(uninterrupted)["reward"]
    assert steps_in(run / "metrics.jsonl") == [1, 2, 3, 4]
    assert (run / "samples.jsonl").read_text() == (uninterrupted / "samples.jsonl").read_text()


@pytest.mark.parametrize(
    ("tripwire", "code", "kept", "status"),
    [
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in (
            ("3 2", 130, 3, "interrupted"), ("3 15", 130, 3, "interrupted"), ("4 2 2", 130, 2, "interrupted"),
        )),
        ("4 9", -9, 2, "running"),
    ],
    ids=["SIGINT", "SIGTERM", "twice SIGINT", "SIGKILL"],
)  # fmt: skip
def test_a_signal_ends_the_step_or_the_second_at_once_and_the_same_command_goes_on(
    tmp_path, uninterrupted, tripwire, code, kept, status
):
    """The first signal ends the step and writes a checkpoint; after a second one, or a kill, the last one counts."""
    assert (signal.SIGINT, signal.SIGKILL, signal.SIGTERM) == (2, 9, 15)
    write_recipe(tmp_path)
    (tmp_path / "tripwire-0").write_text(tripwire)
    returned, stderr = train(tmp_path)
    run = tmp_path / OUTPUT
    assert returned == code, stderr
    assert "Traceback" not in stderr
    assert kept == 2 or "stopped after step 3 of 4" in stderr
    assert facts_of(run)["status"] == status
    assert steps_in(run / "metrics.jsonl") == [1, 2, 3]
    assert latest_checkpoint(run / "checkpoints").name == f"checkpoint-{kept}"
    assert train(tmp_path)[0] == 0
    assert_finished_like(run, uninterrupted)


@pytest.mark.nightly
@pytest.mark.parametrize("appearing", ["checkpoints/checkpoint-2", ".adapter.tmp"])
def test_kill_9_as_a_file_appears_is_survived(tmp_path, uninterrupted, appearing):
    """The kill falls into the writing of that file, or shortly after it."""
    for attempt in range(5):  # on a busy machine the run may be over before this process gets to look
        folder = tmp_path / str(attempt)
        folder.mkdir()
        write_recipe(folder)
        if killed_as(folder / OUTPUT / appearing, folder):
            break
    else:
        pytest.fail("every run was over before it could be killed")
    assert train(folder)[0] == 0
    assert_finished_like(folder / OUTPUT, uninterrupted)


def killed_as(appearing: Path, folder: Path) -> bool:
    process = start(folder)
    adapter = folder / OUTPUT / "adapter"
    while process.poll() is None and not appearing.exists() and not adapter.exists():
        time.sleep(0.0005)
    process.kill()
    process.communicate()
    return process.returncode == -9


@pytest.mark.nightly
def test_a_run_that_is_done_is_left_as_it_is_also_by_another_recipe(uninterrupted):
    before = {p: p.stat().st_mtime_ns for p in sorted(uninterrupted.rglob("*")) if p.is_file() and p.name != ".lock"}
    assert train(uninterrupted.parent.parent)[0] == 0
    assert len(before) > 20
    assert before == {p: p.stat().st_mtime_ns for p in before}
    folder = uninterrupted.parent.parent
    command = [sys.executable, "-m", "perl", "train", "recipe.yaml", "train.learning_rate=2e-3", "peft.rank=4"]
    refused = warm.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "holds a run of another recipe" in refused.stderr
    assert "peft.rank is None there, 4 here" in refused.stderr
    assert "train.learning_rate is 0.001 there, 0.002 here" in refused.stderr
    assert "--output" in refused.stderr
    assert before == {p: p.stat().st_mtime_ns for p in before}


@pytest.mark.nightly
def test_two_processes_cannot_train_in_one_folder(tmp_path):
    write_recipe(tmp_path)
    first = start(tmp_path)
    while first.poll() is None and not (tmp_path / OUTPUT / "run.json").exists():
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)  # it holds the folder for as long as the second one needs to start
    code, stderr = train(tmp_path)
    first.kill()
    first.communicate()
    assert code == 2
    assert "another process is training here" in stderr


VARIANTS = {
    "within one of several epochs": ["data.train.limit=6"],
    "rollouts that last for three steps": ["train.per_device_train_batch_size=4", "train.steps_per_generation=6"],
    "adapter dropout and a bounded number of checkpoints": ["peft.dropout=0.1", "train.save_total_limit=2"],
}


def without(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)


def with_a_file_cut_short(checkpoint: Path) -> None:
    (checkpoint / "adapter_model.safetensors").write_bytes(b"cut short")


@pytest.mark.parametrize(
    ("overrides", "newest"),
    [
        *(pytest.param(overrides, without, marks=pytest.mark.nightly) for overrides in list(VARIANTS.values())[:-1]),
        (list(VARIANTS.values())[-1], without),
        ([], with_a_file_cut_short),
    ],
    ids=[*VARIANTS, "a checkpoint that lost a file does not count"],
)
def test_resumed_and_uninterrupted_runs_end_with_the_same_adapter(tmp_path, overrides, newest):
    write_recipe(tmp_path)
    overrides = [*overrides, "eval.enabled=false", "rewards.tripwire:reward=null"]
    straight = perl.train("recipe.yaml", overrides, tmp_path / "straight")
    resumed = tmp_path / "resumed"
    shutil.copytree(straight.path, resumed)
    shutil.rmtree(resumed / "adapter")
    newest(resumed / "checkpoints" / "checkpoint-4")
    (resumed / "run.json").write_text(json.dumps({**straight.facts, "status": "interrupted"}))
    perl.train("recipe.yaml", overrides, resumed)
    assert latest_checkpoint(resumed / "checkpoints").name == "checkpoint-4"
    assert_same_adapter(resumed, straight.path)
    assert steps_in(resumed / "metrics.jsonl") == [1, 2, 3, 4]


@pytest.mark.nightly
def test_the_resolved_recipe_in_the_run_folder_trains_the_same_adapter(uninterrupted, tmp_path):
    shutil.copy(uninterrupted / "recipe.yaml", tmp_path / "again.yaml")
    shutil.copy(uninterrupted.parent.parent / "tripwire.py", tmp_path)
    command = [sys.executable, "-m", "perl", "train", "again.yaml", "--quiet"]
    again = warm.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ)
    assert again.returncode == 0, again.stderr
    assert again.stdout == ""
    assert_same_adapter(tmp_path / "runs" / "again", uninterrupted)
