"""A vLLM server that two processes share, each of which holds a part of the base: it is given the whole policy."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests import warm

RUN = (
    *("train.max_steps=3", "train.prompts_per_step=4", "train.num_generations=4"),
    *("train.per_device_train_batch_size=4", "rollout.max_completion_length=16", "rollout.check_every=1"),
    *("rollout.backend=vllm-server", "eval.limit=8", "eval.k=1", "engine.threads=1", "engine.strategy=fsdp2"),
    *("train.reference=initial", "train.beta=0.04"),
)
# As the servers of these tests compute: in float32, so that what is left is the order of additions.
PARITY = 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize(("method", "sync"), [("lora", "adapter"), ("dora", "merged")])
def test_a_server_answers_like_the_policy_of_two_processes_in_shards(lone_server, tmp_path, method, sync):
    settings = (*RUN, f"rollout.servers=[{lone_server}]", f"peft.method={method}", f"rollout.sync={sync}")
    command = ["-m", "perl", "train", "quickstart", *settings, "--output", "run"]
    done = warm.run_distributed(command, tmp_path, 2)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert facts["status"] == "done"
    assert facts["hardware"]["count"] == 2
    assert max(row["sync/logp_diff"] for row in rows) <= PARITY
    assert len(rows) == 3
    adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in adapter.values())
    assert set(facts["eval"]["sandbox:addition"]) >= {"base", "adapter"}
