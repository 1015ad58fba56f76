"""The update of every method as matrices: what merging and what the layer's own forward pass make of it."""

import copy

import pytest
import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from perl.methods.delta import (
    EXACT,
    LowRank,
    adapted_layers,
    closed_form,
    factorise,
    low_rank_update,
    merged_parameters,
    update_of,
)
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.recipe.sections import PeftSection
from perl.sandbox import BASE_FOLDER
from tests.a_few_methods import A_FEW, each

# PyTorch's own, once a process, about how PEFT makes SHiRA's sparse matrix.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

RANK = 4
ADAPTERS = [name for name, method in METHODS.items() if method.config]
ON_MATRICES = [name for name in ADAPTERS if METHODS[name].delta != "norms"]
LOW = [name for name in ON_MATRICES if METHODS[name].delta in ("lora", "low_rank")]
# Largest rank of an update at rank 4 where it is not 4.
RANKS = {"pissa": 8, "milora": 8, "olora": 8, "adalora": 6, "loha": 16, "gralora": 8}


def base():
    """One layer of the sandbox's base, at random."""
    config = AutoConfig.from_pretrained(BASE_FOLDER, num_hidden_layers=1, layer_types=["full_attention"])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def with_biases():
    config = Qwen2Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=128,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def policy_of(name, model=None, **settings) -> PeftModel:
    """A policy that is no longer the base."""
    if "rank" in METHODS[name].settings:
        settings = {"rank": RANK, **settings}
    policy = attach_adapter(base() if model is None else model, adaptation(PeftSection(method=name, **settings)))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape)
    return policy.eval()


def started(name) -> PeftModel:
    """A policy that is still the base."""
    settings = {"rank": RANK} if "rank" in METHODS[name].settings else {}
    return attach_adapter(base(), adaptation(PeftSection(method=name, **settings))).eval()


def merged_updates(policy) -> dict[str, torch.Tensor]:
    """What PEFT adds to each weight when it merges a copy in float64."""
    before = dict(policy.get_base_model().named_modules())
    weights = {n.replace(".base_layer", ""): m.weight for n, m in before.items() if n.endswith("base_layer")}
    merged = copy.deepcopy(policy).double().merge_and_unload()
    return {name: merged.get_submodule(name).weight - weight.double() for name, weight in weights.items()}


def forward_weight(layer: BaseTunerLayer) -> torch.Tensor:
    """(out, in) of a linear layer as its forward pass has it."""
    inputs = getattr(layer, "in_features", None) or layer.get_base_layer().in_features
    with torch.no_grad():
        return (layer(torch.eye(inputs)) - layer(torch.zeros(1, inputs))).T.double()


def product(factors: LowRank) -> torch.Tensor:
    return factors.B_OR.double() @ factors.A_RI.double()


def relative_difference(actual, expected) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", each(ON_MATRICES))
def test_the_update_is_what_merging_adds(name):
    policy = policy_of(name)
    expected = merged_updates(policy)
    layers = dict(adapted_layers(policy))
    assert layers.keys() == expected.keys()
    assert len(layers) == (3 if name == "ia3" else 7)
    for layer_name, layer in layers.items():
        assert relative_difference(update_of(layer, "default"), expected[layer_name]) < 1e-5


@pytest.mark.parametrize("name", each(ON_MATRICES))
def test_the_merged_weight_is_the_one_of_the_forward_pass(name):
    layers = dict(adapted_layers(policy_of(name)))
    for layer in layers.values():
        (weight,) = merged_parameters(layer, "default").values()
        assert weight.dtype == torch.float64
        update = forward_weight(layer) - layer.get_base_layer().weight.double()
        assert update.norm() > 1e-2
        assert relative_difference(weight - layer.get_base_layer().weight.double(), update) < 1e-4
        assert relative_difference(weight, forward_weight(layer)) < 1e-5


@pytest.mark.parametrize("name", each(ON_MATRICES))
def test_factors_of_the_lowest_rank_leave_nothing_out_or_say_what(name):
    policy = policy_of(name)
    expected = merged_updates(policy)
    for layer_name, layer in adapted_layers(policy):
        factors = low_rank_update(layer, "default")
        left_out = relative_difference(product(factors), expected[layer_name])
        if name not in LOW:
            assert factors.error == pytest.approx(left_out, rel=1e-2, abs=1e-5)
            continue
        assert factors.A_RI.dtype == factors.B_OR.dtype == torch.float32
        assert factors.A_RI.shape == (factors.rank, layer.get_base_layer().in_features)
        assert factors.B_OR.shape == (layer.get_base_layer().out_features, factors.rank)
        assert factors.rank == RANKS.get(name, RANK)
        assert factors.error <= EXACT
        assert left_out < 1e-5


@pytest.mark.parametrize("name", each(ON_MATRICES))
def test_the_methods_of_a_low_rank_are_those_that_keep_factors(name):
    for layer in (layer for policy in (policy_of(name), started(name)) for _, layer in adapted_layers(policy)):
        factors = closed_form(layer, "default")
        assert (factors is None) == (name not in LOW)
        if factors is not None:
            assert factors.rank == RANKS.get(name, RANK)
            expected = update_of(layer, "default")
            assert (product(factors) - expected).norm() <= 1e-5 * max(1e-2, expected.norm())


@pytest.mark.parametrize("name", A_FEW)
def test_looking_leaves_the_layers_as_they_were(name):
    policy = policy_of(name)
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    trained = [key for key, p in policy.named_parameters() if p.requires_grad]
    for _, layer in adapted_layers(policy):
        merged_parameters(layer, "default")
        low_rank_update(layer, "default")
        assert not layer.merged
    after = policy.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert [key for key, p in policy.named_parameters() if p.requires_grad] == trained


def test_the_merged_norms_are_the_trained_ones():
    policy = policy_of("ln_tuning")
    layers = dict(adapted_layers(policy))
    expected = copy.deepcopy(policy).merge_and_unload()
    assert len(layers) == 4 + 1
    for name, layer in layers.items():
        (weight,) = merged_parameters(layer, "default").values()
        assert torch.equal(weight, expected.get_submodule(name).weight.double())
        assert not torch.equal(weight, layer.get_base_layer().weight.double())


@pytest.mark.parametrize("name", ["lora", "ia3", "road", "oft"])
def test_weight_and_bias_are_merged_to_those_of_the_forward_pass(name):
    policy = policy_of(name, with_biases())
    for layer_name, layer in adapted_layers(policy):
        merged = merged_parameters(layer, "default")
        assert set(merged) == ({"weight", "bias"} if layer_name[-6:] in ("q_proj", "k_proj", "v_proj") else {"weight"})
        assert relative_difference(merged["weight"], forward_weight(layer)) < 1e-5
        with torch.no_grad():
            bias = layer(torch.zeros(1, layer.get_base_layer().in_features))[0].double()
        torch.testing.assert_close(merged.get("bias", torch.zeros_like(bias)), bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["lora", "dora", "adalora", "vera", "milora"])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_a_weight_that_is_kept_transposed_has_its_update_as_out_times_in(name):
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)).eval()
    policy = policy_of(name, model, target_modules=["c_attn"])
    ((_, layer),) = adapted_layers(policy)
    expected = forward_weight(layer) - layer.get_base_layer().weight.T.double()
    assert expected.shape == (96, 32)
    assert relative_difference(update_of(layer, "default"), expected) < 1e-4
    if name != "dora":
        assert relative_difference(product(low_rank_update(layer, "default")), expected) < 1e-4


def of_rank(rank, outputs=200, inputs=150):
    return torch.randn(outputs, rank, dtype=torch.float64) @ torch.randn(rank, inputs, dtype=torch.float64)


@pytest.mark.parametrize(
    ("rank", "shape", "scale", "noise"),
    [
        *((rank, (200, 150), 1.0, 0.0) for rank in (2, 32, 33, 85)),
        *((1, shape, 1.0, 0.0) for shape in ((1, 8), (1, 1), (2, 300))),
        *((3, (200, 150), scale, 0.0) for scale in (1e-12, 1e12)),
        (7, (200, 150), 1.0, 1e-9),  # rounding is not taken for rank
    ],
)
def test_a_matrix_of_a_low_rank_has_factors_of_exactly_that_rank(rank, shape, scale, noise):
    matrix = of_rank(rank, *shape) * scale
    factors = factorise(matrix + noise * torch.randn_like(matrix))
    assert factors.rank == rank
    assert factors.error <= EXACT
    assert relative_difference(product(factors), matrix) < 1e-6


def test_factors_of_a_matrix_of_full_rank_are_the_best_and_say_what_they_leave_out():
    matrix = of_rank(150)
    factors = factorise(matrix)
    S = torch.linalg.svdvals(matrix)
    assert factors.rank == 200 * 150 // (200 + 150)
    assert factors.error == pytest.approx(relative_difference(product(factors), matrix), rel=1e-6)
    assert factors.error == pytest.approx((S[factors.rank :].norm() / S.norm()).item(), rel=0.05)
