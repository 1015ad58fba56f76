"""A fork of the warm process is a process like any other: code, output, files, folder, signals, its parent."""

import json
import os
import signal
import subprocess
import time

import pytest

from tests import warm

WAITING = "train", "recipe.yaml"
RECIPE = """
model: {name: sandbox:base}
data: {train: sandbox:addition}
rewards: {waiting:reward: 1.0}
train: {prompts_per_step: 2, num_generations: 2, per_device_train_batch_size: 4, max_steps: 2}
rollout: {max_completion_length: 4}
eval: {enabled: false}
engine: {device: cpu, threads: 1}
"""
REWARD = """
import os, time
def reward(completions, **kwargs):
    if "trainer_state" not in kwargs:  # it is tried before a model is loaded
        return [0.0] * len(completions)
    open("started", "w").write(f"{os.getppid()} {os.getcwd()}")
    while not os.path.exists("go"):
        time.sleep(0.01)
    return [0.0] * len(completions)
"""


@pytest.fixture(autouse=True)
def _as_it_was_at_the_start(monkeypatch):
    """Other tests of this process may have left variables that libraries set while they train."""
    for name in os.environ.keys() - warm._ENVIRONMENT.keys():
        monkeypatch.delenv(name)
    for name, value in warm._ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def both(*arguments, **options):
    command = [*warm.COMMAND, *arguments]
    options |= {"capture_output": True, "text": True, "check": False}
    return warm.run(command, **options), subprocess.run(command, **options)


@pytest.mark.nightly
def test_it_prints_and_ends_as_a_process_that_imports(tmp_path):
    for arguments in (
        ("recipes",),
        ("train", "quickstart", "peft.rnak=4"),
        ("train", "nothing.yaml"),
        ("eval", "--list-tasks"),
        ("--version",),
    ):
        forked, started = both(*arguments, cwd=tmp_path)
        assert (forked.returncode, forked.stdout, forked.stderr) == (
            started.returncode,
            started.stdout,
            started.stderr,
        )
        assert forked.returncode == (2 if arguments[0] == "train" else 0)  # both trainings are the user's mistakes
    forked, started = both("reward", "try", "7", "-", input="so \\boxed{7}\n")  # what it reads
    assert forked.stdout == started.stdout
    assert "7" in forked.stdout


@pytest.mark.nightly
def test_only_an_environment_that_libraries_were_not_imported_in_starts_an_ordinary_process():
    import perl.training.stages  # noqa: F401 (libraries set variables when they are imported)

    other = {**os.environ, "HF_HUB_OFFLINE": "0"}
    for environment, ordinary in ((other, True), (dict(os.environ), False), (None, False)):
        with warm.popen([*warm.COMMAND, "--version"], env=environment, stdout=subprocess.PIPE) as process:
            assert (type(process) is subprocess.Popen) == ordinary


@pytest.mark.nightly
def test_it_is_a_child_in_its_folder_that_signals_reach(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "waiting.py").write_text(REWARD)
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 130)):
        (tmp_path / "started").unlink(missing_ok=True)
        command = [*warm.COMMAND, *WAITING, "--output", f"run-{number}"]
        process = warm.popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not (tmp_path / "started").exists() or not (tmp_path / "started").read_text():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        assert (tmp_path / "started").read_text() == f"{os.getpid()} {tmp_path}"
        process.send_signal(number)
        if number == signal.SIGTERM:
            (tmp_path / "go").touch()  # it ends with its step
        process.communicate(timeout=120)
        assert process.returncode == code


TWO = """
import json, os, sys, time
import torch
place = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
open(f"rank-{place['RANK']}.json", "w").write(json.dumps([os.getpid(), os.getcwd(), sys.argv[1:], place]))
torch.distributed.init_process_group("gloo")
total = torch.tensor([float(place["RANK"]) + 1])
torch.distributed.all_reduce(total)
sys.stdout.write(f"{float(total)}\\n")  # in one write, as two processes share the pipe
sys.stdout.flush()
if place["RANK"] == "1":
    sys.exit(int(sys.argv[1]))
time.sleep(600 if int(sys.argv[1]) else 0)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("code", [0, 3])
def test_processes_of_one_run_find_each_other_and_end_together(tmp_path, code):
    (tmp_path / "two.py").write_text(TWO)
    done = warm.run_distributed([str(tmp_path / "two.py"), str(code)], tmp_path)
    assert done.returncode == code
    if code == 0:
        assert done.stdout.split() == ["3.0", "3.0"]  # the sum of 1 and 2
    for rank in range(2):
        process, folder, arguments, place = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert (folder, arguments) == (str(tmp_path), [str(code)])
        assert place == {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
