"""Updates of a base in half precision or quantised: its own numbers, rounded once."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from perl.methods.delta import adapted_layers, low_rank_update, update_of
from perl.methods.registry import METHODS
from perl.policy.fingerprint import base_fingerprint
from perl.policy.quantised import prepare_layers
from perl.rollouts.sync import adapter_update, base_update, choose_form, make_update
from perl.sandbox import BASE_FOLDER
from tests.rollouts.policies import base, engine_of, fresh, log_prob_difference, log_probs, policy_of

# PyTorch's own, once a process, about how PEFT makes SHiRA's sparse matrix.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_an_update_is_of_the_bases_type_and_rounded_once(method):
    policy = policy_of(method, base(torch.bfloat16))
    plan = choose_form(policy)
    update = make_update(policy, plan.form, "v1")
    assert plan.nbytes == update.nbytes
    assert {tensor.dtype for tensor in update.tensors.values()} == {torch.bfloat16}
    exact = make_update(policy_in_float64(policy), plan.form, "v1").tensors
    assert all(t.dtype == torch.float64 for t in exact.values())
    for name, tensor in update.tensors.items():
        torch.testing.assert_close(tensor, exact[name].to(torch.bfloat16), rtol=0, atol=0)


def policy_in_float64(policy):
    return copy.deepcopy(policy).double()


@pytest.mark.parametrize("method", ["pissa", "hra"])
def test_in_half_precision_factors_do_not_cancel_each_other(method):
    policy = fresh(method, base(torch.bfloat16))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 1e-3 * parameter.abs().mean() * torch.randn(parameter.shape)
    update = adapter_update(policy, "v1")
    assert choose_form(policy).largest_rank == METHODS[method].update_rank(policy.peft_config["default"])
    for name, layer in adapted_layers(policy):
        A, B = (update.tensors[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
        as_it_is = low_rank_update(layer, "default")
        rounded = as_it_is.B_OR.bfloat16().double() @ as_it_is.A_RI.bfloat16().double()
        exact = update_of_float64(layer)
        assert (B @ A - exact).norm() < 0.01 * exact.norm()
        assert (rounded - exact).norm() > 0.1 * exact.norm()


def update_of_float64(layer):
    """(out, in) of the trained numbers as they are, none rounded on the way."""
    return update_of(copy.deepcopy(layer).double(), "default")


def quantised(**how):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed, there is no quantised base")
    config = BitsAndBytesConfig(**how)
    model = AutoModelForCausalLM.from_pretrained(
        BASE_FOLDER, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    prepare_layers(model)
    return model.eval()


def nf4():
    return quantised(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


@pytest.mark.parametrize("method", ["lora", "dora", "ia3"])
def test_an_engine_with_the_numbers_of_a_quantised_base_answers_like_the_policy(method):
    policy = policy_of(method, nf4())
    expected, before = log_probs(policy), base_fingerprint(policy)
    dequantised = engine_of(base_update(policy, "v0"), base())
    assert log_prob_difference(dequantised, base()) > 1e-3
    with policy.disable_adapter():
        torch.testing.assert_close(log_probs(dequantised), log_probs(policy), rtol=0, atol=5e-5)
    assert (log_probs(dequantised) - expected).abs().max() > 0.02
    plan = choose_form(policy)
    update = make_update(policy, plan.form, "v1")
    assert (plan.form == "adapter") == METHODS[method].sync.startswith("adapter")
    assert (plan.nbytes, plan.tensors) == (update.nbytes, len(update.tensors))
    assert {tensor.dtype for tensor in update.tensors.values()} == {torch.float32}
    torch.testing.assert_close(log_probs(engine_of(update, dequantised)), expected, rtol=0, atol=5e-5)
    assert base_fingerprint(policy) == before
    assert torch.equal(log_probs(policy), expected)
