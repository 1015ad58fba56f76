"""Actors of a real Ray cluster that own fake servers: each brings updates into the memory of its node."""

import contextlib
import sys
import time

import fake_servers
import pytest
import torch
from fake_servers import TOKEN, log_prob_of
from safetensors.torch import load_file

from perl.rollouts.engine import EngineSampling, ExpectedLogProbs, Request, Update
from perl.rollouts.vllm.servers import ServerPool

pytest.importorskip("ray")

import ray

from perl.launch.on_ray.rollout_servers import KEY_VARIABLE, PORT, RayFleet, ServerCommand, started_servers

SAMPLING = EngineSampling(temperature=1.0, max_completion_length=4, end_token_ids=())
LINE = f"python {fake_servers.__file__} 1 '{{}}' --port {PORT}"


@pytest.fixture
def actors(tmp_path, monkeypatch):
    """Two, with the folder of their node's memory."""
    monkeypatch.setenv(KEY_VARIABLE, "a-key")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=1, object_store_memory=100_000_000, **quiet)
    try:
        with started_servers(2, ServerCommand(LINE, sys.executable, 0, "a-key"), str(tmp_path / "memory")) as found:
            yield found, tmp_path / "memory"
    finally:
        ray.shutdown()


def update(name):
    proof = ExpectedLogProbs((1, 2, 3), ({TOKEN: log_prob_of(name)},) * 3, 1.0, 2e-3)
    return Update(name, "adapter", {"a.weight": torch.arange(4.0)}, {"r": 2}, proof=proof)


def both_answer(pool, name):
    """Waits until two servers do; their addresses."""
    end = time.monotonic() + 300.0
    while len(found := pool.trial(Request((1, 2), 1), SAMPLING)) < 2:
        assert time.monotonic() < end
        time.sleep(0.1)
    log_probs = [log_prob for (sampled,) in found.values() for log_prob in sampled.log_probs]
    assert log_probs == pytest.approx([log_prob_of(name)] * 8)
    return set(found)


@pytest.mark.nightly
def test_updates_reach_servers_through_their_actors_also_one_that_was_started_again(actors):
    (_, killed), memory = actors
    fleet = RayFleet(2, str(memory))
    with contextlib.closing(ServerPool(fleet.addresses(), fleet, timeout_seconds=300.0)) as pool:
        pool.check(8, "adapter")
        before = both_answer(pool, "base")
        for number in range(6):
            pool.load(update(f"v{number}"))
        held = {path.name for path in memory.iterdir() if path.is_dir()}
        assert "v5" in held
        assert not held & {"v0", "v1"}
        tensors = load_file(memory / "v5" / "adapter_model.safetensors")
        torch.testing.assert_close(tensors["a.weight"], torch.arange(4.0))
        assert both_answer(pool, "v5") == before
        ray.kill(killed, no_restart=False)
        pool.load(update("v6"))
        assert len(both_answer(pool, "v6") - before) == 1  # the other one is where it was
        assert pool.counts["servers_lost"] == 1
