"""What is refused in shards, by name, and what is done otherwise there; real shards are in test_distributed.py."""

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

import perl
import perl.policy.sharding
from perl import PeftRLConfig
from perl.errors import ModelError, RecipeError
from perl.policy.attach import attach_adapter
from perl.policy.reference import Reference
from perl.policy.sharding import check_push, check_reference, check_unsharded_run, strategy_of, whole_adapter
from tests.oracles.two_trainers import base

LORA = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
STRATEGIES = ["FSDP1", "FSDP2", "DeepSpeed ZeRO-3"]


def accelerator(fsdp: int | None = None, zero: int | None = None) -> SimpleNamespace:
    """As accelerate describes what it was told."""
    state = SimpleNamespace()
    if fsdp is not None:
        state.fsdp_plugin = SimpleNamespace()
    if zero is not None:
        state.deepspeed_plugin = SimpleNamespace(zero_stage=zero)
    return SimpleNamespace(state=state, is_fsdp2=fsdp == 2)


@pytest.mark.parametrize(
    ("told", "strategy"),
    [({}, None), ({"fsdp": 1}, "FSDP1"), ({"fsdp": 2}, "FSDP2"), ({"zero": 3}, "DeepSpeed ZeRO-3")]
    + [({"zero": stage}, None) for stage in (0, 1, 2)],
)
def test_what_shards_parameters_has_a_name(told, strategy):
    assert strategy_of(accelerator(**told), base(torch.float32)) == strategy


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_copy_as_reference_is_refused_where_the_loss_needs_it(strategy):
    with pytest.raises(RecipeError, match=f"{strategy}.*base"):
        check_reference(strategy, snapshot=True, beta=0.04)
    check_reference(strategy, snapshot=False, beta=0.04)
    check_reference(strategy, snapshot=True, beta=0.0)
    check_reference(None, snapshot=True, beta=0.04)


@pytest.mark.parametrize("sharded", ["empty", "flat"])
def test_a_copy_never_takes_the_place_of_a_shard(sharded):
    policy = get_peft_model(copy.deepcopy(base(torch.float32)), copy.deepcopy(LORA))
    reference = Reference(policy, "initial")
    one = next(p for p in policy.parameters() if p.requires_grad)
    one.data = one.data[:0] if sharded == "empty" else one.data.flatten()[:3]  # as under ZeRO-3; as under FSDP1
    with pytest.raises(ModelError, match=r"in shards.*base, or DDP"), reference.in_place_of(policy):
        pass


@pytest.mark.parametrize("strategy", ["FSDP1", "DeepSpeed ZeRO-3"])
def test_an_adapter_that_nothing_is_known_to_gather_is_not_saved(strategy):
    with pytest.raises(ModelError, match=f"{strategy}.*save_model"):
        whole_adapter(get_peft_model(copy.deepcopy(base(torch.float32)), copy.deepcopy(LORA)), strategy)


def test_recipes_and_pushes_in_shards_are_refused_before_a_model_is_loaded(monkeypatch, tmp_path):
    quiet = {"use_cpu": True, "bf16": False, "report_to": []}
    args = PeftRLConfig(str(tmp_path), **quiet)
    check_unsharded_run(args)
    check_push(args, asked=True)
    for stage, refused in ((2, False), (3, True)):
        args.deepspeed_plugin = SimpleNamespace(zero_stage=stage)
        for check in (lambda: check_unsharded_run(args), lambda: check_push(args, asked=True)):
            if refused:
                with pytest.raises(RecipeError, match="ZeRO-3"):
                    check()
            else:
                check()
    check_push(args, asked=False)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr("perl.training.stages.load_base", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(RecipeError, match=r"FSDP.*DDP"):
        perl.train("quickstart", ["train.max_steps=1"], tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("zero3", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_under_zero_3_an_adapter_has_its_bases_type(monkeypatch, zero3, dtype):
    monkeypatch.setattr(perl.policy.sharding, "is_deepspeed_zero3_enabled", lambda: zero3)
    policy = attach_adapter(copy.deepcopy(base(torch.bfloat16)), copy.deepcopy(LORA))
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {dtype}
