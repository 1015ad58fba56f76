"""A half-precision model computes in float32 for a while; the type and the tolerance of its own computing."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.model import load_base
from perl.policy.precision import in_float32
from perl.policy.reference import Reference, reference_log_probs, token_log_probs
from perl.recipe.sections import ModelSection, PeftSection

IDS = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "phi3": Phi3Config(**SIZES),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    ),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
    "mamba": MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2),
}


@pytest.fixture(autouse=True)
def _no_accelerator():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def log_probs(model):
    with torch.no_grad():
        return token_log_probs(model, IDS, torch.ones_like(IDS))


def moved_lora(dtype):
    torch.manual_seed(0)
    policy = attach_adapter(
        load_base(ModelSection(dtype=dtype), torch.device("cpu")), adaptation(PeftSection(method="dora", rank=2))
    )
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape)
    return policy.eval()


def of_the_config(name):
    """A model in half precision, and the same weights in float32."""
    torch.manual_seed(0)
    half = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in half.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    return half, AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()


# Mamba rounds its last hidden states to the type that it finds its head in.
@pytest.mark.parametrize(
    ("name", "tolerance"), [(name, 2e-2 if name == "mamba" else 1e-5) for name in [*CONFIGS, "adapter"]]
)
def test_a_half_precision_model_gives_the_numbers_of_its_weights_in_float32(name, tolerance):
    half, exact = (moved_lora("bfloat16"), moved_lora("float32")) if name == "adapter" else of_the_config(name)
    exact.load_state_dict(half.state_dict())
    rounded, places = log_probs(half), [p.data_ptr() for p in half.parameters()]
    with in_float32(half):
        found = log_probs(half)
    assert (found - log_probs(exact)).abs().max() <= tolerance
    assert (rounded - log_probs(exact)).abs().max() > tolerance / 2
    assert [p.data_ptr() for p in half.parameters()] == places
    assert torch.equal(log_probs(half), rounded)


def test_autocast_is_off_and_then_on_again():
    policy = moved_lora("float32")
    exact = log_probs(policy)
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(policy)
    rounded = log_probs(prepared)
    assert not torch.equal(rounded, exact)
    with in_float32(prepared), torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert torch.equal(log_probs(prepared), exact)
    with torch.autocast("cpu", torch.bfloat16), in_float32(prepared):
        assert torch.equal(log_probs(prepared), exact)
    assert torch.equal(log_probs(prepared), rounded)


def test_an_error_in_between_leaves_the_model_as_it_was():
    model = load_base(ModelSection(dtype="bfloat16"), torch.device("cpu"))
    before = log_probs(model)
    with pytest.raises(IndexError), in_float32(model):
        model(input_ids=torch.tensor([[10**6]]))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert torch.equal(log_probs(model), before)


def test_what_others_put_into_a_parameter_in_between_stays_where_they_put_it_back():
    policy = moved_lora("bfloat16")
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    reference = Reference(policy, "initial")
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.05
    trained = {name: p.detach().clone() for name, p in policy.named_parameters()}
    with in_float32(policy):
        found = reference_log_probs(policy, IDS, torch.ones_like(IDS), reference)
    assert all(torch.equal(p, trained[name]) for name, p in policy.named_parameters())
    assert not torch.equal(found, log_probs(policy))
    kept = {p.data_ptr() for p in reference.snapshot.values()}
    assert not kept & {p.data_ptr() for p in policy.parameters()}
