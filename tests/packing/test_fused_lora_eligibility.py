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

from perl.methods.delta import adapted_layers, low_rank_update
from perl.methods.settings import adaptation
from perl.packing.fused_lora import FusedLinear, fuse_lora
from perl.policy.attach import attach_adapter
from perl.recipe.sections import PeftSection
from perl.sandbox import BASE_FOLDER
from tests.oracles.lora_twins import (
    INPUTS,
    adapted,
    error,
    fill,
    is_fused,
    layer_of,
    results,
    twins,
)


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


def test_subclasses_of_pefts_layer_and_replaced_forward_passes_are_not_eligible():
    class OwnLoraLinear(Linear):
        """Might do anything."""

    policy = adapted()
    layer_of(policy).__class__ = OwnLoraLinear
    assert fuse_lora(policy) == 0
    policy = adapted()
    layer = layer_of(policy)
    layer.forward = layer.forward
    assert fuse_lora(policy) == 0


def test_dropout_is_pefts_in_training_and_none_in_evaluation():
    theirs, ours = twins(adapted(lora_dropout=0.5))
    x = x_leaf()
    assert_left_to_peft(theirs.train(), ours.train(), x)
    y = ours.eval()(x)
    assert is_fused(y)
    assert torch.equal(y, theirs.eval()(x))


def test_adapter_switched_off_and_on_again():
    theirs, ours = twins(adapted())
    x = x_leaf()
    with theirs.disable_adapter(), ours.disable_adapter():
        assert_left_to_peft(theirs, ours, x)
        assert torch.equal(ours(x), layer_of(ours).base_layer(x))
    y = ours(x)
    assert is_fused(y)
    assert torch.equal(y, theirs(x))


def test_merged_and_unmerged():
    theirs, ours = twins(adapted())
    x = x_leaf()
    before = ours(x)
    theirs.merge_adapter()
    ours.merge_adapter()
    assert_left_to_peft(theirs, ours, x)
    theirs.unmerge_adapter()
    ours.unmerge_adapter()
    assert is_fused(ours(x))
    assert torch.equal(ours(x), theirs(x))
    assert error(ours.merge_and_unload()(x), before) < 1e-6


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


def test_an_adapter_of_another_kind_that_is_added_later_is_left_to_peft():
    theirs, ours = twins(adapted())
    for policy in (theirs, ours):
        policy.add_adapter("second", LoraConfig(r=4, target_modules=["proj"], use_dora=True))
        fill(policy, seed=2)
        policy.set_adapter("second")
    assert_left_to_peft(theirs, ours, x_leaf())


def test_mixed_batches_are_pefts():
    policy = adapted()
    policy.add_adapter("second", LoraConfig(r=6, target_modules=["proj"]))
    fill(policy, seed=2)
    theirs, ours = (each.eval() for each in twins(policy))
    assert_left_to_peft(theirs, ours, x_leaf(), adapter_names=["default", "second", "__base__", "default"])


@pytest.mark.parametrize("part", ["base_layer", "lora_A", "lora_B"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
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


def test_a_forward_pass_that_is_replaced_inside_is_called():
    """As accelerate does where it offloads weights."""
    _, ours = twins(adapted())
    base = layer_of(ours).base_layer
    original, calls = base.forward, []

    def forward(x):
        calls.append(x)
        return original(x)

    base.forward = forward
    ours(x_leaf())
    assert len(calls) == 1


def test_hooks_on_the_layer_itself_see_input_and_output():
    _, ours = twins(adapted())
    seen = []
    layer_of(ours).register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    x = x_leaf()
    y = ours(x)
    assert seen[0][0] is x
    assert seen[0][1] is y
    assert is_fused(y)


def test_a_base_that_trains_and_a_weight_that_is_no_parameter_are_left_to_peft():
    theirs, ours = twins(adapted())
    for policy in (theirs, ours):
        layer_of(policy).base_layer.weight.requires_grad_(True)
    assert_left_to_peft(theirs, ours, x_leaf())
    assert "base_model.model.proj.base_layer.weight" in results(ours, x_leaf())

    theirs, ours = twins(adapted())
    for policy in (theirs, ours):  # as sharding does for the time of a forward pass
        base = layer_of(policy).base_layer
        weight = base._parameters.pop("weight")
        base.weight = weight.detach() * 2
    assert_left_to_peft(theirs, ours, x_leaf())


def test_a_scale_that_trains_is_left_to_peft():
    theirs, ours = twins(adapted())
    for policy in (theirs, ours):
        layer_of(policy).scaling["default"] = torch.tensor(2.0, requires_grad=True)
    assert_left_to_peft(theirs, ours, x_leaf())


def test_casting_that_peft_is_told_to_leave_out_is_left_out():
    theirs, ours = twins(adapted())
    with disable_input_dtype_casting(theirs), disable_input_dtype_casting(ours):
        assert_left_to_peft(theirs, ours, x_leaf())


def test_one_dimension_is_pefts():
    theirs, ours = twins(adapted())
    assert_left_to_peft(theirs, ours, torch.randn(INPUTS, requires_grad=True))


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


def test_the_update_as_matrices_is_the_same():
    theirs, ours = twins(adapted())
    for (name, ours_layer), (other, theirs_layer) in zip(adapted_layers(ours), adapted_layers(theirs), strict=True):
        assert name == other
        a, b = low_rank_update(ours_layer, "default"), low_rank_update(theirs_layer, "default")
        assert torch.equal(a.A_RI, b.A_RI)
        assert torch.equal(a.B_OR, b.B_OR)
