"""What is refused of sharing a base over processes, by name and line; real processes are in test_strategies.py."""

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

import perl
from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import RecipeError
from perl.methods.base_checks import strategy_mistakes
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.sharding import check_strategy, loaded_in_shards, shard, strategy_of
from perl.recipe import load_recipe
from perl.recipe.engine_section import processes_of_copy
from perl.recipe.sections import PeftSection
from perl.run.shards import gathered, is_sharded, whole, whole_state
from tests.a_few_methods import A_FEW
from tests.oracles.two_trainers import base

QUIET = {"use_cpu": True, "bf16": False, "report_to": []}


@pytest.mark.parametrize(("processes", "strategy"), [(1, None), (2, "ddp")])
def test_how_processes_share_the_work_has_a_name(processes, strategy):
    assert strategy_of(SimpleNamespace(num_processes=processes), base(torch.float32)) == strategy


def test_one_process_holds_the_whole_base_whatever_the_strategy():
    model = copy.deepcopy(base(torch.float32))
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert loaded_in_shards("fsdp2", "node") == {}
    shard(model, "node")
    assert not is_sharded(model)
    with gathered(model):
        assert {name: whole(parameter).data_ptr() for name, parameter in model.named_parameters()} == before


def test_launchers_that_shard_the_adapter_too_are_refused_before_a_model_is_loaded(monkeypatch, tmp_path):
    args = PeftRLConfig(str(tmp_path), **QUIET)
    check_strategy(args)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=2)
    with pytest.raises(RecipeError, match=r"DeepSpeed.*fsdp2"):
        check_strategy(args)
    with pytest.raises(RecipeError, match=r"deepspeed: .*fsdp2"):
        PeftRLConfig(str(tmp_path), deepspeed={"zero_optimization": {"stage": 2}}, **QUIET)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr("perl.training.policy_stage.load_base", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(RecipeError, match=r"FSDP.*fsdp2"):
        perl.train("quickstart", ["train.max_steps=1"], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_script_is_told_of_a_strategy_that_there_is_not(tmp_path):
    for name in ("fsdp3", "zero2"):
        with pytest.raises(RecipeError, match=rf"{name}.*fsdp2"):
            PeftRLConfig(str(tmp_path), strategy=name, **QUIET)


def test_a_method_that_trains_the_base_is_refused_at_construction(monkeypatch, tmp_path):
    monkeypatch.setattr("perl.policy.sharding.world_size", lambda: 2)
    args = PeftRLConfig(str(tmp_path), strategy="fsdp2", peft_method="full", **QUIET)
    with pytest.raises(RecipeError, match=r"full.*fsdp2"):
        PeftGRPOTrainer(copy.deepcopy(base(torch.float32)), lambda completions, **_: [0.0] * len(completions), args)


@pytest.mark.parametrize("method", A_FEW)
def test_what_is_saved_beside_shards_is_what_is_saved_of_a_whole_model(method):
    """FSDP2's own tensors are left out by their type; here there are none, so the two must be the same."""
    config = AutoConfig.for_model("qwen2", vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    section = PeftSection(method=method, rank=4) if "rank" in METHODS[method].settings else PeftSection(method=method)
    policy = attach_adapter(AutoModelForCausalLM.from_config(config), adaptation(section))
    options = {"adapter_name": policy.active_adapter, "save_embedding_layers": False}
    expected = get_peft_model_state_dict(policy, **options)
    found = get_peft_model_state_dict(policy, whole_state(policy), **options)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def read(strategy: str, processes: int | None = 2, **sections):
    engine = {"strategy": strategy, "processes": processes}
    return load_recipe({"engine": engine, **sections}, checks=(strategy_mistakes,))


SHARDED = [
    ("peft.method", {"peft": {"method": "full"}}),
    ("peft.method", {"peft": {"method": "ln_tuning"}}),
    ("peft.type", {"peft": {"type": "LN_TUNING"}}),
    ("peft.kwargs.modules_to_save", {"peft": {"kwargs": {"modules_to_save": ["lm_head"]}}}),
    ("peft.kwargs.trainable_token_indices", {"peft": {"kwargs": {"trainable_token_indices": [1]}}}),
    ("model.quantization", {"model": {"quantization": "nf4"}}),
    ("train.fsdp", {"train": {"fsdp": "full_shard"}}),
]


@pytest.mark.parametrize(("key", "sections"), SHARDED)
def test_what_trains_the_base_or_divides_it_otherwise_is_refused_by_its_key(key, sections):
    with pytest.raises(RecipeError) as caught:
        read("fsdp2", **sections)
    assert [mistake.where.rpartition(" ")[2] for mistake in caught.value.mistakes] == [key]
    read("ddp", **sections)


@pytest.mark.parametrize(("key", "sections"), [case for case in SHARDED if case[0] != "train.fsdp"])
def test_one_process_holds_the_whole_base_and_nothing_is_refused(monkeypatch, key, sections):
    for processes in (None, 1):
        read("fsdp2", processes, **sections)
    monkeypatch.setenv("WORLD_SIZE", "2")  # what a launcher has started counts
    with pytest.raises(RecipeError, match=key):
        read("fsdp2", None, **sections)


@pytest.mark.parametrize(
    ("shards", "processes", "of_node", "size"),
    [("node", 16, 8, 8), ("node", 8, 8, 8), ("all", 16, 8, 16), (4, 16, 8, 4), ("4", 8, 4, 4), ("node", 4, 1, 4)],
)
def test_a_copy_of_the_base_is_over_a_node_or_as_many_processes_as_asked(shards, processes, of_node, size):
    assert processes_of_copy(shards, processes, of_node) == size


def test_copies_that_do_not_come_out_even_are_one_line_before_a_model_loads(monkeypatch, tmp_path):
    with pytest.raises(RecipeError, match=r"engine\.shards: 4 processes do not make copies of the base over 3 each"):
        load_recipe({"engine": {"strategy": "fsdp2", "processes": 4, "shards": 3}}, checks=(strategy_mistakes,))
    load_recipe({"engine": {"strategy": "ddp", "processes": 4, "shards": 3}}, checks=(strategy_mistakes,))
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(RecipeError, match=r"engine\.shards: 6 processes do not make nodes of 4 \(all, or"):
        read("fsdp2", None)
    for shards, says in (("node", "nodes of 4"), ("4", "over 4 each"), ("some", "'some'"), ("1", "2 or more")):
        with pytest.raises(RecipeError, match=rf"^shards: .*{says}"):
            PeftRLConfig(str(tmp_path), strategy="fsdp2", shards=shards, **QUIET)


def test_every_other_method_may_be_asked_for():
    refused = []
    for name, method in METHODS.items():
        try:
            read("fsdp2", peft={"method": name})
        except RecipeError:
            refused.append(name)
        assert (name in refused) == method.trains_the_bases
    assert refused == ["ln_tuning", "full"]
