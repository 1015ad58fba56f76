"""Two processes on one machine train one adapter: one of them writes, both take the same steps."""

import json
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from perl.sandbox import BASE_FOLDER
from tests import warm

SMALL = [
    "train.max_steps=2",
    "train.prompts_per_step=4",
    "train.num_generations=4",
    "train.per_device_train_batch_size=4",
    "rollout.max_completion_length=24",
    "eval.limit=8",
    "eval.k=1",
    "engine.threads=1",
]


def test_two_processes_train_one_adapter(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "perl", "train", "quickstart", *SMALL, "--output", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["status"] == "done"
    assert set(facts["eval"]["sandbox:addition"]) >= {"base", "adapter"}
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    recipe = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "prompts_per_step: 4" in recipe
    checkpoint = tmp_path / "run" / "checkpoints" / "checkpoint-2"
    assert {"random-rank0.safetensors", "random-rank1.safetensors"} <= {path.name for path in checkpoint.iterdir()}
    sandbox = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
    PeftModel.from_pretrained(sandbox, tmp_path / "run" / "adapter")
    assert done.stdout.count("card  ") == 1


def test_what_the_first_process_fails_at_the_others_hear_of(tmp_path):
    """It is refused before it trains: a run of another recipe lies there."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"status": "done"')
    done = warm.run_distributed(["-m", "perl", "train", "quickstart", *SMALL, "--output", "run"], tmp_path)
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, done.stderr  # the others end, and leave it to the first to say why
    assert "run.json" in told[0]


@pytest.mark.nightly
def test_the_others_wait_for_a_score_that_takes_longer_than_a_collective_may(tmp_path):
    done = warm.run_distributed(["-m", "tests.trainer.distributed_waiting", str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "done"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["eval/sandbox:chain/avg@1"] == 0.5
