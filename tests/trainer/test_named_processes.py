"""Every algorithm by its name: in one process and two, stopped and resumed, in float32 and under autocast."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from perl.algorithms.named import ALGORITHMS
from tests import warm
from tests.oracles.two_trainers import norm, relative_difference

CLOSE = 1e-5


def run(folder: Path, processes: int, jobs: list[dict]) -> None:
    command = ["-m", "tests.trainer.distributed_checkpoints", str(folder), json.dumps(jobs)]
    done = warm.run_distributed(command, folder, processes)
    assert done.returncode == 0, done.stderr[-4000:]


def job(folder: Path, name: str, kind: str, resume: str | None = None, **options) -> dict:
    sets = {"algorithm": name, "beta": ALGORITHMS[name].sets["beta"], "num_iterations": 2}
    if name == "bnpo":
        sets["num_iterations"] = 1  # its mean is over a micro-batch, and with more TRL shuffles rows between those
    if ALGORITHMS[name].needs_teacher:
        sets["teacher_hint"] = "so"
    if ALGORITHMS[name].sets["advantage_estimator"] == "gae":
        sets["critic_learning_rate"] = 0.02  # ten times the policy's rate here would enlarge roundings a hundredfold
    checkpoint = None if resume is None else str(folder / f"{name}-{resume}" / "checkpoint-2")
    return {"name": f"{name}-{kind}", "resume": checkpoint, "options": {**sets, **options}, "greedy": name == "remax"}


@pytest.mark.nightly
def test_a_name_trains_one_adapter_whatever_it_runs_on(tmp_path):
    autocast, begin = {"bf16": True}, {"max_steps": 1, "learning_rate": 1e-30, "warmup_steps": 0}
    alone = [job(tmp_path, name, "one") for name in ALGORITHMS]
    alone += [job(tmp_path, name, "autocast", **autocast) for name in ALGORITHMS]
    alone += [job(tmp_path, name, "begin", **begin) for name in ALGORITHMS]
    run(tmp_path, 1, alone)
    run(tmp_path, 1, [job(tmp_path, name, "resumed", "one") for name in ALGORITHMS])
    run(tmp_path, 2, [job(tmp_path, name, "two") for name in ALGORITHMS])
    differences = {}
    for name in ALGORITHMS:
        kinds = ("one", "autocast", "begin", "resumed", "two")
        found = {kind: load_file(tmp_path / f"{name}-{kind}.safetensors") for kind in kinds}
        moved = {kind: {key: t - found["begin"][key] for key, t in found[kind].items()} for kind in kinds}
        assert norm(moved["one"]) > 0.001 * norm(found["begin"]), name
        assert all(torch.equal(found["resumed"][key], tensor) for key, tensor in found["one"].items()), name
        differences[name] = [relative_difference(moved[kind], moved["one"]) for kind in ("two", "autocast")]
    apart = {name: pair for name, pair in differences.items() if pair[0] > CLOSE or pair[1] > 0.2}
    assert apart == {}
