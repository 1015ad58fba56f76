"""The same adapter, the same KL divergence and the same base from every strategy: one process, DDP, FSDP2."""

import itertools
import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import method_properties as properties
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from perl.methods.registry import METHODS
from perl.training.decoder import ModelSharing, Types, bytes_into_node, decoder_of
from tests import warm
from tests.oracles.two_trainers import norm

FEW = ("pissa",)
STRATEGIES = ("ddp", "fsdp2")
# Methods that train tensors of the base.
OF_THE_BASE = ("full", "ln_tuning")
# What a KL divergence that is there at all exceeds: LoHa's grows slowest, to 9e-6 nats in these five steps.
LEAST_KL = 1e-6


@dataclass(frozen=True)
class Found:
    """What a training ended with, by method: of each process, and the adapter."""

    processes: list[dict[str, dict]]
    folder: Path

    def adapter(self, method: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{method}.safetensors")

    def kl(self, method: str) -> list[float]:
        return [entry["kl"] for entry in self.processes[0][method]["log"]]


def in_processes(
    module: str, folder: Path, processes: int, *arguments: str, of_node: int | None = None
) -> list[dict[str, dict]]:
    """What a script of the tests writes on each process, about a small base that it finds in the folder."""
    (folder / "base").symlink_to(properties.write_model("biases", folder))
    path = os.pathsep.join(filter(None, (str(Path(properties.__file__).parent), os.environ.get("PYTHONPATH"))))
    command = ["-m", f"tests.trainer.{module}", str(folder), *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    done = warm.run_distributed(command, Path.cwd(), processes, environment, of_node=of_node)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains some methods by a strategy, once."""

    @cache
    def train(strategy: str, processes: int, reference: str, dtype: str, methods: tuple[str, ...]) -> Found:
        folder = tmp_path_factory.mktemp(f"{strategy}-{processes}")
        found = in_processes("strategies", folder, processes, strategy, dtype, reference, *methods)
        return Found(found, folder)

    return train


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    apart = {name: one[name].double() - other[name].double() for name in one}
    return norm(apart) / norm(other)


def check(found: Found, alone: Found, ddp: Found, strategy: str, methods: tuple[str, ...], tolerance: float) -> None:
    """Every method ends as in one process, on all processes alike, or was refused by a line that names a way out."""
    for method in methods:
        results = [process[method] for process in found.processes]
        if strategy == "fsdp2" and method in OF_THE_BASE:
            assert all("(ddp" in result["refused"] for result in results)
            continue
        assert len({result["digest"] for result in results}) == 1, method
        assert {result["strategy"] for result in results} == {strategy}
        assert {result["base"] for result in results} == {alone.processes[0][method]["base"]}
        assert difference(found.adapter(method), alone.adapter(method)) <= tolerance, method
        assert found.kl(method) == pytest.approx(ddp.kl(method), abs=1e-5), method
        assert max(found.kl(method)) > LEAST_KL, method


def test_each_strategy_trains_the_adapter_that_one_process_trains(trained):
    alone, ddp = (trained("ddp", processes, "rolling:2", "float32", FEW) for processes in (1, 2))
    for strategy in STRATEGIES:
        found = trained(strategy, 2, "rolling:2", "float32", FEW)
        check(found, alone, ddp, strategy, FEW, 1e-5)


@pytest.mark.nightly
def test_a_base_in_shards_within_nodes_trains_the_same_bits_and_only_gradients_cross(tmp_path):
    """Two nodes of two processes. What a node receives in a step is what the plan says for as many passes."""
    processes = in_processes("distributed_nodes", tmp_path, 4, of_node=2)
    model, into_node = decoder_of(AutoConfig.from_pretrained(tmp_path / "base")), {}
    for found in processes:
        assert {way["digest"] for way in found.values()} == {processes[0]["ddp"]["digest"]}
        for name, parts in (("ddp", 1), ("node", 2), ("all", 4)):
            way, sharing = found[name], ModelSharing("ddp" if name == "ddp" else "fsdp2", 4, parts, of_node=2)
            counted = way["counted"].pop("into_node")
            assert counted == bytes_into_node(model, Types(4, 4), way["trained"], sharing, **way["counted"])
            assert way["of_copy"] == parts
            into_node[name] = counted
    assert into_node["node"] == into_node["ddp"] < into_node["all"] / 9


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_strategy_trains_the_same_bits_of_a_critic(trained, dtype):
    method = "lora:ppo"
    alone, ddp = (trained("ddp", processes, "base", dtype, (method,)) for processes in (1, 2))
    for strategy in STRATEGIES:
        found = trained(strategy, 2, "base", dtype, (method,))
        check(found, alone if dtype == "float32" else ddp, ddp, strategy, (method,), 1e-5)
        assert {process[method]["critic"] for process in found.processes} == {ddp.processes[0][method]["critic"]}
        assert found.processes[0][method]["digest"] == ddp.processes[0][method]["digest"]
    one, two = (load_file(found.folder / f"{method}.critic.safetensors") for found in (alone, ddp))
    assert difference(two, one) <= (1e-5 if dtype == "float32" else 2e-2)
    assert two["value_head.bias"] != 0


@pytest.mark.nightly
def test_in_bfloat16_a_base_in_shards_trains_the_same_bits(trained):
    ddp, shards = (trained(strategy, 2, "initial", "bfloat16", ("lora", "dora")) for strategy in ("ddp", "fsdp2"))
    for method in ("lora", "dora"):
        assert shards.processes[0][method]["digest"] == ddp.processes[0][method]["digest"]
        assert shards.kl(method) == ddp.kl(method)


@pytest.mark.nightly
def test_scripts_come_to_a_base_in_shards_by_a_name_a_model_or_a_divided_model_and_train_the_same_bits(tmp_path):
    found = in_processes("distributed_ways", tmp_path, 2)
    for process in found:
        for way in ("name", "model", "divided", "recomputed"):
            assert process[way]["sharded"], way
            assert process[way]["strategy"] == "fsdp2"
            assert process[way]["digest"] == process["ddp"]["digest"], way
        for twice in process["twice"].values():
            assert twice | {"strategy": "ddp"} == process["twice"]["ddp"]
        assert len({unchosen["digest"] for unchosen in process["unchosen"].values()}) == 1
        assert process["twice"]["ddp"]["log"][-1]["kl"] > 1e-3
        assert "PeftRLConfig(adapter=" in process["refused"]["adapted"]
        assert "save_adapter" in process["refused"]["pushed"]
        assert "lm_head is a part of the base" in process["refused"]["head"]
        assert "lora_A did not move" in process["broken"]
        other = "rank 1 holds another policy than rank 0"
        assert all(f"after step 2 {other}: 1 of" in said for said in process["drifting"].values())
        assert all(f"after step 1 {other}" in said for said in process["missed"].values())
    assert "rank 1" in found[0]["broken"]
    saved = [load_file(tmp_path / f"saved-{strategy}" / "adapter_model.safetensors") for strategy in ("ddp", "fsdp2")]
    assert difference(*saved) == 0.0


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_where_one_process_runs_out_of_memory_all_of_them_run_the_step_again(strategy, tmp_path):
    first, second = in_processes("distributed_memory", tmp_path, 2, strategy)
    places = ["forward", "backward", *(["scoring"] if strategy == "fsdp2" else [])]  # by DDP each scores by itself
    for who, where in itertools.product(("", "critic "), places):
        undisturbed, one, other = first[f"{who}none"], first[who + where], second[who + where]
        assert (one["failures"], other["failures"]) == (0, 1), who + where
        assert (one["digest"], one["critic"]) == (other["digest"], other["critic"])
        assert one["tokens"] == other["tokens"] != undisturbed["tokens"]
        assert one["sum"] == pytest.approx(undisturbed["sum"], rel=1e-6)
        assert one["critic/loss"] == pytest.approx(undisturbed["critic/loss"], rel=1e-5)
        for ours, whole in zip(one["log"], undisturbed["log"], strict=True):
            assert ours == pytest.approx(whole, rel=1e-5, abs=1e-7)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reference", ["base", "initial", "rolling:2"])
def test_every_method_by_every_strategy(trained, reference, dtype):
    methods = tuple(METHODS)
    alone, ddp = (trained("ddp", processes, reference, dtype, methods) for processes in (1, 2))
    for strategy in STRATEGIES:
        found = trained(strategy, 2, reference, dtype, methods)
        check(found, alone if dtype == "float32" else ddp, ddp, strategy, methods, 1e-5)
