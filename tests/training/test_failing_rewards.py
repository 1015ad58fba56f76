"""Runs whose reward functions fail, as real processes and real steps."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perl.policy.checkpoint import latest_checkpoint
from tests import warm

# Fails on every sample of its calls from the third on, while the file `broken` is there.
FLAKY = """
from pathlib import Path

calls = 0

def reward(completions, prompts, **kwargs):
    global calls
    calls += len(completions) > 1
    if calls >= 3 and Path("broken").exists():
        raise RuntimeError("the judge is away")
    return [float(len(text)) for text in completions]

def elsewhere(completions, **kwargs):
    import os
    if os.environ.get("RANK") == "1":
        raise RuntimeError("only here")
    return [1.0] * len(completions)
"""
RECIPE = """
model: {name: sandbox:base}
data: {train: sandbox:addition}
rewards: {accuracy: 1.0, flaky:reward: {weight: 0.01, max_failures: 3}}
train:
  prompts_per_step: 2
  num_generations: 4
  per_device_train_batch_size: 8
  max_steps: 4
  save_steps: 50
  learning_rate: 1e-3
rollout: {max_completion_length: 24}
eval: {enabled: false}
engine: {device: cpu, threads: 1}
"""


def train(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perl", "train", "recipe.yaml", *overrides]
    return warm.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(autouse=True)
def _recipe(tmp_path):
    (tmp_path / "flaky.py").write_text(FLAKY)
    (tmp_path / "recipe.yaml").write_text(RECIPE)


@pytest.mark.nightly
def test_a_reward_that_keeps_failing_ends_the_run_with_a_checkpoint_and_the_run_goes_on_when_it_is_mended():
    Path("broken").touch()
    failed = train()
    run = Path("runs/recipe")
    assert failed.returncode == 1
    assert (facts()["status"], facts()["steps"]) == ("failed", 3)
    assert "the judge is away" in facts()["error"]
    assert latest_checkpoint(run / "checkpoints").name == "checkpoint-3"
    last = failed.stderr.splitlines()[-1]
    assert last.startswith("error: recipe.yaml:4: rewards.flaky:reward: failed on 8 samples")
    assert re.search(r"reward: flaky\.py:\d+: \w+: .*the judge is away", last)
    assert "the same command goes on" in last
    assert "Traceback" not in failed.stderr
    Path("broken").unlink()
    Path("flaky.py").write_text(FLAKY.replace("len(text)", "-len(text)"))
    mended = train()
    assert mended.returncode == 0, mended.stderr
    assert (facts()["status"], facts()["steps"], "error" in facts()) == ("done", 4, False)
    assert "resuming from step 3" in mended.stderr
    assert "the code of flaky:reward was changed" in mended.stderr
    assert facts()["rewards_changed"] == [3]
    assert "was changed while it was trained: after step 3" in (run / "adapter" / "README.md").read_text()
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step for step in steps if step <= 3][:3] == [1, 2, 3]
    assert steps[-1] == 4


def facts() -> dict:
    return json.loads(Path("runs/recipe/run.json").read_text())


@pytest.mark.nightly
def test_a_reward_that_fails_on_another_process_ends_all_of_them_as_failed():
    elsewhere = "rewards.flaky:elsewhere"
    overrides = ["rewards.flaky:reward=null", f"{elsewhere}.max_failures=1", "train.max_steps=3"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "perl", "train", "recipe.yaml", *overrides, "train.per_device_train_batch_size=4"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert (facts()["status"], facts()["steps"]) == ("failed", 1)
    assert "failed too often on another process" in facts()["error"]
    assert "only here" in ended.stderr
    assert latest_checkpoint(Path("runs/recipe/checkpoints")).name == "checkpoint-1"
    rows = [json.loads(line) for line in Path("runs/recipe/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["reward/elsewhere/failed_frac"] == 0.5
