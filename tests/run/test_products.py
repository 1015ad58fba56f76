"""Products by oneDNN: the numbers of float64, each gradient, and only where they are meant to run."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from perl.packing.fused_lora import fuse_lora
from perl.policy.export import merge
from perl.policy.save_adapter import log_probs_in_float32, reload_difference, write_adapter
from perl.run import products
from perl.run.products import QuickLinear, by_torch, linear, packed_weights, product, quicken, quickened

IN, OUT = 192, 160
quick = pytest.mark.skipif(not products._is_quicker(), reason="needs AVX-512 and torch's oneDNN")


@pytest.fixture
def calls(monkeypatch):
    """Products that oneDNN made: types and the rows of their inputs."""
    seen, own = [], torch.ops.mkldnn._linear_pointwise

    def noted(x, W, *rest):
        seen.append((x.dtype, W.is_mkldnn, x.numel() // x.shape[-1]))
        return own(x, W, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", noted)
    return seen


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def error(found, exact) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


@quick
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_has_the_numbers_of_float64(bias, calls):
    x, W, b = numbers(2, 40, IN), numbers(OUT, IN, seed=1), numbers(OUT, seed=2) if bias else None
    exact = functional.linear(x.double(), W.double(), None if b is None else b.double())
    assert error(linear(x, W, b if b is None else torch.stack([b, b], 1)[:, 0]), exact) < 1e-6
    assert error(product(x[0].T.contiguous().T, W.T), functional.linear(x[0].double(), W.double())) < 1e-6
    assert [rows for *_, rows in calls] == [80, 40]


@quick
@pytest.mark.parametrize("trains", [False, True])
def test_gradients_are_those_of_float64_once_and_twice(trains, calls):
    layer = nn.Linear(IN, OUT)
    layer.requires_grad_(trains)
    exact = copy.deepcopy(layer).double()
    quicken(layer)
    assert type(layer) is QuickLinear
    found = []
    for each, x in ((layer, numbers(2, 40, IN)), (exact, numbers(2, 40, IN, dtype=torch.float64))):
        x.requires_grad_()
        wanted = [x, *(each.parameters() if trains else [])]
        first = torch.autograd.grad(each(x).square().sum(), wanted, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), wanted)
        added = each(x)
        added += x.mean()  # in place, as PEFT's AdaLoRA does
        second = (*second, *torch.autograd.grad(added.square().sum(), wanted))
        # of an output that is summed the gradient is one number with strides of 0
        summed = torch.autograd.grad(each(x).sum(), wanted)
        found.append([*first, *second, *summed])
    assert all(error(ours.detach(), theirs.detach()) < 2e-6 for ours, theirs in zip(*found, strict=True))
    assert len(calls) >= (12 if trains else 8)


def test_other_products_stay_torchs(calls):
    layer = nn.Sequential(nn.Linear(IN, OUT))
    quicken(layer)
    quicken(layer)
    x = numbers(80, IN)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    few = layer(x[:2])
    double = copy.deepcopy(layer).double()(x.double())
    half = copy.deepcopy(layer).bfloat16()(x.bfloat16())
    compiled = torch.compile(layer, backend="eager", fullgraph=True)(x)
    vector = layer(x[0])
    assert not calls
    plain = nn.Linear(IN, OUT)
    plain.load_state_dict(layer[0].state_dict())
    for found, expected in ((few, plain(x[:2])), (compiled, plain(x)), (vector, plain(x[0]))):
        assert torch.equal(found, expected)
    assert (double.dtype, half.dtype) == (torch.float64, torch.bfloat16)


@quick
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_packed_matrices_give_the_same_numbers_and_are_let_go(dtype, tolerance, calls, monkeypatch):
    model = nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, IN), nn.Linear(IN, 4)).to(dtype)
    model[1].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)  # too few numbers
    quicken(model)
    x = numbers(20, OUT, dtype=dtype)
    exact = functional.linear(x.double(), model[1].weight.double(), model[1].bias.double())
    with torch.no_grad(), packed_weights(model, rows=20):
        assert len(products._packed) == 1  # frozen ones alone
        assert error(model[1](x), exact) < tolerance
        assert calls == [(dtype, True, 20)]
    with pytest.raises(KeyboardInterrupt), packed_weights(model, rows=20):
        raise KeyboardInterrupt
    assert not products._packed
    monkeypatch.setattr(products, "own_share", lambda _: 4 * OUT * IN * dtype.itemsize - 1)
    with packed_weights(model, rows=20):
        assert not products._packed  # no room


def test_a_weight_that_is_computed_is_left_to_torch(calls):
    layer = nn.Linear(IN, OUT)
    quicken(layer)
    exact = functional.linear(numbers(80, IN), layer.weight, layer.bias)
    nn.utils.parametrizations.weight_norm(layer)
    assert error(layer(numbers(80, IN)).detach(), exact.detach().double()) < 1e-6
    assert not calls


@quick
def test_a_quick_policy_is_merged_from_its_base_and_leaves_it_alone():
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, pad_token_id=0, **shape))
    policy = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    policy.eval()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    ids = torch.arange(8, 24)[None]
    with torch.no_grad():
        expected, plain = merge(policy)(ids).logits, policy(ids).logits
        quicken(policy)
        found = merge(policy)(ids).logits
    assert torch.equal(found, expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    with torch.no_grad():
        assert torch.allclose(policy(ids).logits, plain, atol=1e-5)


@quick
def test_what_is_saved_is_compared_as_whoever_loads_it_computes_and_layers_are_given_back(monkeypatch, tmp_path):
    monkeypatch.setattr(products, "_LEAST", 1)  # every product is worth it
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, pad_token_id=0, initializer_range=0.3, **shape))
    policy = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    fuse_lora(policy)
    kinds = [type(layer) for layer in policy.modules()]
    ids = torch.arange(8, 40)[None]
    with quickened(policy):
        assert QuickLinear in {type(layer) for layer in policy.modules()}
        write_adapter(policy, tmp_path / "adapter", "base", None)
        quick = log_probs_in_float32(policy, ids)
        assert reload_difference(policy, tmp_path / "adapter", ids) == 0.0
        with by_torch():
            assert not torch.equal(log_probs_in_float32(policy, ids), quick)
    assert [type(layer) for layer in policy.modules()] == kinds
