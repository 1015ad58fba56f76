"""Runs of two processes, started in each way that is supported, and a reward that ends one of them at a given call."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from perl.cli import commands
from perl.launch import start
from tests import warm
from tests.ports import free_port

# A reward that sends its own process a signal in its Nth call, of one rank, or has the step after it run out of memory,
# by 0; with no weight, so that it changes nothing.
TRIPWIRE = """
import os
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

calls = 0

def out_of_memory(*_):
    raise torch.OutOfMemoryError("simulated")

def reward(completions, **kwargs):
    global calls
    calls += 1
    wire = Path("tripwire-" + os.environ.get("RANK", "0"))
    if wire.exists():
        at, *signals = map(int, wire.read_text().split())
        if calls == at:
            wire.unlink()
            if not signals:
                raise SystemError("the reward's own error")
            for number in signals:
                os.kill(os.getpid(), number) if number else register_optimizer_step_pre_hook(out_of_memory)
    return [0.0] * len(completions)
"""
RECIPE = """
model: {name: sandbox:base}
data: {train: sandbox:addition}
rewards: {accuracy: 1.0, tripwire:reward: {weight: 0.0, max_failures: 0}}
train:
  prompts_per_step: 2
  num_generations: 4
  max_steps: 4
  save_steps: 2
  learning_rate: 1e-3
  beta: 0.01
rollout: {max_completion_length: 24}
eval: {enabled: false}
engine: {device: cpu, threads: 1}
"""
RUN = Path("runs/recipe")
ADAPTER = RUN / "adapter" / "adapter_model.safetensors"
TRAIN = ("train", "recipe.yaml")
MODULE = [sys.executable, "-m"]
TORCHRUN = [*MODULE, "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "perl"]
OURS = [*MODULE, "perl"]


def write_recipe(folder: Path) -> None:
    (folder / "tripwire.py").write_text(TRIPWIRE)
    (folder / "recipe.yaml").write_text(RECIPE)


def started(command: list[str], folder: Path, **options: object) -> "subprocess.Popen[str]":
    """A command whose process group is its own, as a terminal's job has one."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*map(str, command)], cwd=folder, **pipes, start_new_session=True, **options)


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Exit code, and what it has printed, that of its processes included."""
    stdout, stderr = process.communicate(timeout=300)
    return process.returncode, stdout + stderr


def run(command: list[str], folder: Path, **options: object) -> tuple[int, str]:
    return ended(started(command, folder, **options))


def run_warm(command: list[str], folder: Path) -> tuple[int, str]:
    """The same of ``perl ... --processes N``: the launcher is this process, its ranks are forks that import nothing."""
    with tempfile.TemporaryFile("w+") as said:

        def popen(command: list[str], **options: object) -> "subprocess.Popen[str]":
            return warm.fork(
                warm.OURS, command[1:], cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said, **options
            )

        warmed = SimpleNamespace(Popen=popen, TimeoutExpired=subprocess.TimeoutExpired)
        own, here = io.StringIO(), contextlib.ExitStack()
        with here:
            here.enter_context(mock.patch.object(start, "subprocess", warmed))
            for context in (contextlib.chdir(folder), contextlib.redirect_stdout(own), contextlib.redirect_stderr(own)):
                here.enter_context(context)
            code = commands.run([str(part) for part in command[len(OURS) :]], "perl")
        said.seek(0)
        return code, said.read() + own.getvalue()


def of_srun(rank: int, port: int, size: int = 2) -> dict[str, str]:
    """What srun tells a process of a step of so many tasks on one node."""
    numbers = {
        **{"JOB_ID": 4711, "STEP_ID": 0, "STEP_NUM_TASKS": size, "NTASKS": size, "TASKS_PER_NODE": size},
        **{"PROCID": rank, "LOCALID": rank, "NODEID": 0, "NNODES": 1, "STEP_NODELIST": "node07"},
    }
    return {**{f"SLURM_{name}": str(value) for name, value in numbers.items()}, "MASTER_PORT": str(port)}


def by_srun(
    arguments: tuple[str, ...], folders: tuple[Path, Path], further: Mapping[str, str] | None = None
) -> list[tuple[int, str]]:
    """The same command as two tasks, each in a folder; the exit code and the output of each."""
    port = free_port()
    tasks = [
        warm.fork(warm.OURS, ["-m", "perl", *arguments], cwd=folder, text=True, stdin=subprocess.DEVNULL,
                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                  env={**os.environ, **(further or {}), **of_srun(rank, port)})
        for rank, folder in enumerate(folders)
    ]  # fmt: skip
    return [(task.returncode, output) for task, output in [(task, task.communicate(timeout=300)[0]) for task in tasks]]


def facts(folder: Path) -> dict:
    return json.loads((folder / RUN / "run.json").read_text())


def adapter(folder: Path) -> bytes:
    return (folder / ADAPTER).read_bytes()


def steps_logged(folder: Path) -> list[int]:
    log = folder / RUN / "metrics.jsonl"
    return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.is_file() else []
