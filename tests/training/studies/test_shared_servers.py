"""Cells of one real vLLM server: each is its solo run to the parity of servers; one that is too small is refused."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file

import perl
from perl.errors import RecipeError
from perl.recipe.server_address import server_address
from perl.rollouts.vllm.adapter_room import adapter_rooms
from perl.training.studies.shared_servers import check_room, room_lines, served
from perl.training.studies.written_plan import load_study
from tests.ports import free_port
from tests.rollouts.loopback import Proxy

ROOM = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
STEPS = 2
OVERRIDES = {
    "train.max_steps": STEPS,
    "train.prompts_per_step": 4,
    "train.num_generations": 4,
    "train.per_device_train_batch_size": 16,
    "rollout.max_completion_length": 24,
    "rollout.backend": "vllm-server",
    "rollout.check_every": 1,
    "eval.limit": 8,
    "eval.k": 1,
}


def study_on(url, **changes):
    grid = [{"peft.method": ["lora"], "peft.rank": [2]}, {"peft.method": ["hra"], "peft.rank": [4]}]
    overrides = OVERRIDES | {"rollout.servers": [url]} | changes.pop("overrides", {})
    return {"recipe": "quickstart", "overrides": overrides, "grid": grid, "seeds": {"score": [1]}} | changes


class Seeded(Proxy):
    """Before a server whose completions then depend on what is asked, so that two runs can be compared."""

    def forward(self, method, path, headers, body):
        if path == "/v1/completions":
            asked = json.loads(body)
            plain = json.dumps({key: value for key, value in asked.items() if key != "model"}, sort_keys=True)
            if asked.get("seed") is None:
                asked["seed"] = int.from_bytes(hashlib.sha256(plain.encode()).digest()[:4], "little")
            body = json.dumps(asked).encode()
            headers = {key: value for key, value in headers.items() if key.lower() != "content-length"}
        return super().forward(method, path, headers, body)


@pytest.fixture(scope="module")
def small_server(own_servers):
    """Room for two adapters of rank 8; as `perl rollout command` starts it, so that it does not report its settings."""
    return own_servers(1, ROOM, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"})[0].url


@pytest.fixture(scope="module")
def both(small_server, tmp_path_factory):
    """Run folders of each cell, of the study in which they trained side by side and of its recipe alone."""
    folder = tmp_path_factory.mktemp("shared")
    with Seeded(small_server)() as url:
        study = study_on(url, at_once=2)
        result = perl.study(study, folder / "out")
        assert [row.status for row in result.rows] == ["done", "done"], result.rows
        for row in result.rows:
            settings = study["overrides"] | dict(row.settings) | {"train.seed": row.seed}
            perl.train(
                "quickstart", [f"{key}={json.dumps(value)}" for key, value in settings.items()], folder / row.name
            )
    return [(folder / "out" / "cells" / "score" / row.name, folder / row.name) for row in result.rows]


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_cells_of_one_server_are_proven_like_their_solo_runs(both):
    for shared, alone in both:
        for run in (shared, alone):
            rows = rows_of(run)
            assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
            near_nothing = pytest.approx([0.0] * STEPS, abs=1e-4)
            assert [row["sync/logp_diff"] for row in rows] == near_nothing
            assert [row["sampling/sampling_logp_difference/mean"] for row in rows] == near_nothing
            assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 2e-3
        print([row["reward"] for row in rows_of(shared)], [row["reward"] for row in rows_of(alone)])
        mine, other = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (shared, alone))
        print(max(float((mine[n] - other[n]).abs().max()) for n in mine), max(float(mine[n].abs().max()) for n in mine))
    ranks = [json.loads((shared / "adapter" / "adapter_config.json").read_text())["r"] for shared, _ in both]
    assert ranks == [2, 4]
