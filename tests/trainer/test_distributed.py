"""Two processes on one machine train one adapter: one of them writes, both take the same steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import method_properties as properties
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
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"status": "done"')
    command = [*launcher, "-m", "perl", "train", "quickstart", *SMALL, "--output", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, done.stderr  # the others end, and leave it to the first to say why
    assert "run.json" in told[0]


METHODS = ["lora_plus", "lora_fa", "adalora", "pissa", "slicefine"]


def test_methods_with_an_optimizer_a_start_or_a_step_of_their_own_train_alike_in_two_processes(tmp_path):
    model = properties.write_model("biases", tmp_path)
    script = str(Path(__file__).with_name("distributed_methods.py"))
    benchmarks = str(Path(properties.__file__).parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (benchmarks, os.environ.get("PYTHONPATH")))),
    }
    for processes, rows in ((1, 8), (2, 4)):
        done = warm.run_distributed(
            [script, model, str(tmp_path), str(rows), *METHODS], tmp_path, processes, environment
        )
        assert done.returncode == 0, done.stderr
    alone, first, second = (json.loads((tmp_path / f"found-{end}.json").read_text()) for end in ("8-0", "4-0", "4-1"))
    for method in METHODS:
        assert first[method]["digest"] == second[method]["digest"]
        assert first[method]["logits"] == pytest.approx(alone[method]["logits"], abs=1e-4)
        assert first[method]["optimizer"] == {"lora_plus": "LoRA+", "lora_fa": "LoRA-FA"}.get(method, "AdamW")


def in_two_processes(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script of the tests."""
    return warm.run_distributed(["-m", script, str(folder), *arguments], folder)


def test_a_step_of_one_pass_runs_again_on_both_processes_when_one_is_out_of_memory(tmp_path):
    done = in_two_processes("tests.trainer.distributed_step", tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    assert first["passes"] == [1, 1]  # the usual step is a single pass
    for rank, found in enumerate((first, second)):
        for run in found["runs"]:
            assert run["failures"] == rank
            assert run["passes"][0] > 1
            assert run["difference"] == pytest.approx([0, 0], abs=1e-5)
            assert run["norms"] == pytest.approx(found["norms"], rel=1e-4)
    # The mean of 1 and 2; 2 of the second process alone, of two; nothing.
    assert first["averaged"] == second["averaged"] == [[1.5, 1.5], [1.0, 1.0], None]
    assert [run["sum"] for run in first["runs"]] == [run["sum"] for run in second["runs"]]


def test_the_others_wait_for_a_score_that_takes_longer_than_a_collective_may(tmp_path):
    done = in_two_processes("tests.trainer.distributed_waiting", tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "done"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["eval/sandbox:chain/avg@1"] == 0.5
