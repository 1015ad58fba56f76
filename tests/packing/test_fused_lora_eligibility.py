"""A fused LoRA layer leaves all it does not know to PEFT, and the policy as it was."""

import copy
import pickle
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.helpers import disable_input_dtype_casting
from peft.tuners.lora.layer import Linear
from torch import nn
from transformers import AutoModelForCausalLM

from perl.methods.settings import adaptation
from perl.packing.fused_lora import FusedLinear, fuse_lora
from perl.policy.attach import attach_adapter
from perl.recipe.sections import PeftSection
from perl.sandbox import BASE_FOLDER
from tests.oracles.lora_twins import INPUTS, adapted, fill, is_fused, layer_of, twins


def assert_left_to_peft(theirs, ours, x, **arguments) -> None:
    y = ours(x, **arguments)
    assert not is_fused(y)
    torch.manual_seed(7)
    expected = theirs(x, **arguments)
    torch.manual_seed(7)
    assert torch.equal(ours(x, **arguments), expected)


def x_leaf() -> torch.Tensor:
    return torch.randn(4, INPUTS, requires_grad=True)


def of_our_method(method: str) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
    return attach_adapter(model, adaptation(PeftSection(method=method, rank=4)))


NOT_ELIGIBLE = {
    **{name: partial(adapted, bias=True, **{name: True}) for name in ("use_dora", "lora_bias")},
    **{method: partial(of_our_method, method) for method in ("pissa", "olora", "milora", "dora")},
}


@pytest.mark.parametrize("kind", NOT_ELIGIBLE)
def test_dora_biases_of_the_adapter_and_variants_of_our_own_methods_are_not_eligible(kind):
    policy = NOT_ELIGIBLE[kind]()
    assert fuse_lora(policy) == 0
    assert FusedLinear not in {type(module) for module in policy.modules()}


def test_other_layers_are_not_eligible():
    class OwnLinear(nn.Linear):
        """Might do anything."""

    base = nn.Sequential()
    base.embed, base.conv, base.own = nn.Embedding(9, INPUTS), nn.Conv1d(3, 4, 1), OwnLinear(INPUTS, 5)
    base.plain = nn.Linear(INPUTS, 5)
    policy = get_peft_model(base, LoraConfig(r=2, target_modules=["embed", "conv", "own", "plain"]))
    assert fuse_lora(policy) == 1
    assert [name for name, m in policy.named_modules() if type(m) is FusedLinear] == ["base_model.model.plain"]


def merge(policy):
    policy.merge_adapter()


def add_another_kind(policy):
    policy.add_adapter("second", LoraConfig(r=4, target_modules=["proj"], use_dora=True))
    fill(policy, seed=2)
    policy.set_adapter("second")


def train_the_base(policy):
    layer_of(policy).base_layer.weight.requires_grad_(True)


def shard_the_weight(policy):
    """As sharding does for the time of a forward pass."""
    base = layer_of(policy).base_layer
    weight = base._parameters.pop("weight")
    base.weight = weight.detach() * 2


def train_the_scale(policy):
    layer_of(policy).scaling["default"] = torch.tensor(2.0, requires_grad=True)


def switch_off(policy):
    policy.base_model.disable_adapter_layers()


@pytest.mark.parametrize(
    "change", [merge, add_another_kind, train_the_base, shard_the_weight, train_the_scale, switch_off]
)
def test_what_the_fused_layer_does_not_know_is_left_to_peft(change):
    theirs, ours = twins(adapted())
    for policy in (theirs, ours):
        change(policy)
    assert_left_to_peft(theirs, ours, x_leaf())


def test_calls_that_the_fused_layer_does_not_know_are_left_to_peft():
    """A batch for several adapters, rows without a batch, and casting that PEFT is told to leave out."""
    policy = adapted()
    policy.add_adapter("second", LoraConfig(r=6, target_modules=["proj"]))
    fill(policy, seed=2)
    theirs, ours = (each.eval() for each in twins(policy))
    assert_left_to_peft(theirs, ours, x_leaf(), adapter_names=["default", "second", "__base__", "default"])
    assert_left_to_peft(theirs, ours, torch.randn(INPUTS, requires_grad=True))
    with disable_input_dtype_casting(theirs), disable_input_dtype_casting(ours):
        assert_left_to_peft(theirs, ours, x_leaf())


def test_after_merging_and_switching_off_the_layer_is_fused_again():
    theirs, ours = twins(adapted())
    x = x_leaf()
    for policy in (theirs, ours):
        policy.merge_adapter()
        policy.unmerge_adapter()
        with policy.disable_adapter():
            assert torch.equal(policy(x), layer_of(policy).base_layer(x))
    assert is_fused(ours(x))
    assert torch.equal(ours(x), theirs(x))


def test_dropout_is_pefts_in_training_and_none_in_evaluation():
    theirs, ours = twins(adapted(lora_dropout=0.5))
    x = x_leaf()
    assert_left_to_peft(theirs.train(), ours.train(), x)
    y = ours.eval()(x)
    assert is_fused(y)
    assert torch.equal(y, theirs.eval()(x))


def test_the_active_adapter_of_several_is_fused_and_several_at_once_are_not():
    policy = adapted()
    policy.add_adapter("second", LoraConfig(r=6, lora_alpha=3, target_modules=["proj"]))
    fill(policy, seed=2)
    theirs, ours = twins(policy)
    x = x_leaf()
    outputs = []
    for name in ("default", "second"):
        for each in (theirs, ours):
            each.set_adapter(name)
        y = ours(x)
        assert is_fused(y)
        assert torch.equal(y, theirs(x))
        outputs.append(y)
    assert not torch.equal(*outputs)
    for each in (theirs, ours):
        each.base_model.set_adapter(["default", "second"])
    assert_left_to_peft(theirs, ours, x)
    for each in (theirs, ours):
        each.base_model.set_adapter("default")
        with pytest.warns(UserWarning, match="active adapter to second"):
            each.delete_adapter("default")
    assert is_fused(ours(x))
    assert torch.equal(ours(x), outputs[1])


@pytest.mark.parametrize(
    ("part", "kind"), [("base_layer", "forward"), ("lora_A", "full_backward"), ("lora_B", "forward_pre")]
)
def test_hooks_on_inner_layers_are_called_until_they_are_removed(part, kind):
    _, ours = twins(adapted())
    layer = layer_of(ours)
    inner = layer.base_layer if part == "base_layer" else getattr(layer, part)["default"]
    calls = []
    handle = getattr(inner, f"register_{kind}_hook")(lambda *_: calls.append(kind))
    ours(x_leaf()).sum().backward()
    assert calls == [kind]
    handle.remove()
    assert is_fused(ours(x_leaf()))


def test_fusing_twice_is_fusing_once():
    policy = adapted()
    layer = layer_of(policy)
    before = {name: tensor.data_ptr() for name, tensor in policy.state_dict().items()}
    assert fuse_lora(policy) == fuse_lora(policy) == 1
    assert layer_of(policy) is layer
    assert isinstance(layer, Linear)
    assert {name: tensor.data_ptr() for name, tensor in policy.state_dict().items()} == before
    assert get_peft_model_state_dict(policy).keys() == get_peft_model_state_dict(adapted()).keys()


def test_copies_and_pickles_are_fused_and_stand_alone():
    _, ours = twins(adapted())
    x = x_leaf()
    before = ours(x)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):  # noqa: S301 (our own)
        assert is_fused(other(x))
        assert torch.equal(other(x), before)
        fill(other, seed=9)
        assert not torch.equal(other(x), before)
    assert torch.equal(ours(x), before)
