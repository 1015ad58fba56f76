"""A fused LoRA layer gives PEFT's numbers and keeps less for backward."""

import copy
import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.oracles.lora_twins import (
    INPUTS,
    OUTPUTS,
    PROBE,
    adapted,
    assert_close,
    error,
    fill,
    is_fused,
    layer_of,
    results,
    saved_bytes,
    twins,
)
from tests.packing.test_attention import COMMON


@pytest.mark.parametrize("shape", [(7,), (1, 1), (2, 3, 5), (0, 5), (65,)])
@pytest.mark.parametrize(
    "how",
    [
        *({"scaling": 1.0, "bias": True}, {"scaling": 2.0}, {"scaling": 1 / 3, "bias": True}),
        *({"rank": 1, "dtype": torch.float64}, {"rank": 3, "use_rslora": True}),  # of an irrational scale
        *({"rank": 256, "use_rslora": True, "dtype": torch.float64}, {"rank": 320}),
    ],
    ids=str,
)
def test_output_is_pefts_bit_for_bit_at_every_rank_and_scale_and_gradients_to_rounding(shape, how):
    theirs, ours = twins(adapted(**how))
    x = torch.randn(*shape, INPUTS, dtype=how.get("dtype", torch.float32))
    expected, got = results(theirs, x), results(ours, x)
    assert torch.equal(got["y"], expected["y"])
    if x.numel():
        assert_close(got, expected, 1e-6 if x.dtype == torch.float32 else 1e-13)
    else:
        assert {n: t.shape for n, t in got.items()} == {n: t.shape for n, t in expected.items()}


@pytest.mark.parametrize(
    "x",
    [
        *(torch.randn(INPUTS, 5).T, torch.randn(5, 3, INPUTS).transpose(0, 1)),
        *(torch.randn(3, INPUTS, 5).transpose(1, 2), torch.randn(3, 5, 2 * INPUTS)[..., ::2]),
        torch.randn(1, 1, INPUTS).expand(3, 5, INPUTS),
    ],
    ids=["transposed", "batch_second", "features_first", "strided", "expanded"],
)
def test_inputs_that_are_not_contiguous(x):
    theirs, ours = twins(adapted())
    expected, got = results(theirs, x), results(ours, x)
    assert torch.equal(got["y"], expected["y"])
    assert_close(got, expected, 1e-6)
    theirs, ours = theirs.to(torch.bfloat16), ours.to(torch.bfloat16)
    assert_close(results(ours, x.to(torch.bfloat16)), results(theirs, x.to(torch.bfloat16)), 1e-2)


@pytest.mark.parametrize("frozen", [["lora_A"], ["lora_B"], ["lora_A", "lora_B"]])
@pytest.mark.parametrize("x_needs_gradient", [True, False])
def test_only_what_is_needed_gets_a_gradient(frozen, x_needs_gradient):
    theirs, ours = twins(adapted())
    gradients = []
    for policy in (theirs, ours):
        for name, parameter in policy.named_parameters():
            parameter.requires_grad_("lora_" in name and not any(part in name for part in frozen))
        x = torch.randn(3, 5, INPUTS, generator=torch.Generator().manual_seed(3)).requires_grad_(x_needs_gradient)
        y = policy(x)
        assert y.requires_grad == (x_needs_gradient or len(frozen) < 2)
        if y.requires_grad:
            assert is_fused(y) == (policy is ours)
            y.square().sum().backward()
        parameters = {"x": x, **dict(policy.named_parameters())}
        gradients.append({name: p.grad for name, p in parameters.items() if p.grad is not None})
    assert_close(gradients[1], gradients[0], 1e-6)


def test_nothing_is_kept_without_gradients():
    theirs, ours = twins(adapted())
    x = torch.randn(3, 5, INPUTS)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(ours(x), theirs(x))
            assert saved_bytes(ours, lambda: ours(x)) == 0


def test_a_second_derivative_is_refused_instead_of_wrong():
    _, ours = twins(adapted())
    x = torch.randn(3, INPUTS, requires_grad=True)
    (gradient,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


HALF, FULL = torch.bfloat16, torch.float32


def rounding(policy, x, autocast) -> dict[str, float]:
    """How far every number is from the same in float64, where the inputs are the same rounded ones."""

    def run(leaf):
        with torch.autocast("cpu", dtype=HALF, enabled=autocast):
            return policy(leaf)

    gradient = torch.randn(*x.shape[:-1], OUTPUTS, generator=torch.Generator().manual_seed(5)).to(HALF)
    got = results(policy, x, gradient, run)
    exact = results(copy.deepcopy(policy).double(), x.double(), gradient)
    for name, parameter in policy.named_parameters():
        assert name not in got or got[name].dtype == parameter.dtype
    assert got["x"].dtype == x.dtype
    return {name: error(tensor, exact[name]) for name, tensor in got.items()}


@pytest.mark.parametrize(
    ("base", "adapter", "x", "autocast"),
    [
        *((FULL, FULL, FULL, True), (FULL, FULL, HALF, True), (HALF, FULL, HALF, True), (HALF, HALF, HALF, True)),
        *((HALF, FULL, HALF, False), (HALF, HALF, HALF, False), (FULL, HALF, FULL, False)),
    ],
)
@pytest.mark.parametrize("scaling", [2.0, 16 / math.sqrt(8)])
def test_half_precision_is_no_further_from_float64_than_pefts(base, adapter, x, autocast, scaling):
    """Output and dx have fewer roundings here; dA and dB have as many as PEFT's, so they differ by chance only."""
    policy = adapted(rank=8, scaling=scaling, bias=True)
    layer_of(policy).base_layer.to(base)
    layer_of(policy).lora_A.to(adapter)
    layer_of(policy).lora_B.to(adapter)
    x_BTI = torch.randn(8, 200, INPUTS).to(x)
    theirs, ours = (rounding(policy, x_BTI, autocast) for policy in twins(policy))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name] <= theirs[name] * (1.15 if "lora_" in name else 1.05), name


SIZES = {**COMMON, "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
}


def language_model(kind="qwen3", dtype=torch.float32, **options) -> PeftModel:
    torch.manual_seed(0)
    policy = get_peft_model(
        MODELS[kind]().to(dtype), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **options)
    )
    fill(policy)
    return policy.train()


def model_results(policy, autocast=False) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    with torch.autocast("cpu", dtype=HALF, enabled=autocast):
        logits = policy(input_ids=PROBE, use_cache=False).logits
    logits.float().log_softmax(-1)[..., 5].sum().backward()
    return {"logits": logits.detach(), **{n: p.grad.clone() for n, p in policy.named_parameters() if p.requires_grad}}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("rslora", [False, True])
def test_logits_of_a_model_are_pefts_bit_for_bit(kind, rslora):
    theirs, ours = twins(language_model(kind, use_rslora=rslora))
    expected, got = model_results(theirs), model_results(ours)
    assert torch.equal(got["logits"], expected["logits"])
    assert_close(got, expected, 3e-6)
    theirs, ours = theirs.double(), ours.double()
    expected, got = model_results(theirs), model_results(ours)
    assert torch.equal(got["logits"], expected["logits"])
    # The loss takes its log-probabilities in float32, so the gradient that comes in is that of equal logits.
    assert_close(got, expected, 1e-13)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradient_checkpointing_changes_no_bit(reentrant, autocast):
    _, ours = twins(language_model())
    expected = model_results(ours, autocast)
    ours.enable_input_require_grads()
    ours.get_base_model().activation_checkpointing_enable({"use_reentrant": reentrant})
    got = model_results(ours, autocast)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize(
    ("base", "adapter", "autocast", "share"),
    [(FULL, FULL, False, 1), (FULL, FULL, True, 2 / 3), (HALF, FULL, True, 2 / 5), (HALF, FULL, False, 1 / 5)],
)
def test_projections_of_one_input_keep_it_once(base, adapter, autocast, share):
    """As q, k and v do. PEFT keeps a copy for each, in the dtype it is cast to, unless all is float32."""
    policy = nn.Sequential()
    policy.q, policy.k, policy.v = (adapted(rank=1, dtype=base) for _ in range(3))
    for module in policy.modules():
        if isinstance(module, Linear):
            module.lora_A.to(adapter)
            module.lora_B.to(adapter)
    theirs, ours = twins(policy)
    x = torch.randn(500, INPUTS, dtype=base, requires_grad=True) * 1  # no leaf, whose casts autocast would share

    def run(policy):
        with torch.autocast("cpu", dtype=HALF, enabled=autocast):
            return [projection(x) for projection in policy]

    kept, pefts = (saved_bytes(each, lambda each=each: run(each)) for each in (ours, theirs))
    computed_in = HALF if autocast else adapter
    assert kept == 500 * (INPUTS * base.itemsize + 3 * computed_in.itemsize)
    assert kept <= share * pefts
