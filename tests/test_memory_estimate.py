"""The estimate from a config against what is measured on the model itself, and against arithmetic by hand."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from perl.adapter import attach_adapter
from perl.attention import use_packed_attention
from perl.head import LogitSettings, add_scored_forward
from perl.memory import measure
from perl.memory_estimate import Decoder, Types, cached_bytes, decoder_of, estimate_memory, token_bytes, weight_bytes
from perl.methods.fused_lora import fuse_lora
from perl.methods.settings import adaptation
from perl.model import total_parameters, trainable_parameters
from perl.recipe.sections import PeftSection

GIB = 2**30
WITHIN = 0.01
# Type, layers, hidden, inner, heads, key-value heads, vocabulary, rank, further.
SHAPES = {
    "qwen3": ("qwen3", 2, 64, 192, 4, 2, 128, 8, {"head_dim": 32}),
    "qwen3, many layers": ("qwen3", 5, 32, 64, 4, 4, 256, 4, {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", 3, 64, 256, 8, 2, 128, 16, {"tie_word_embeddings": True}),
    "llama": ("llama", 2, 96, 256, 6, 2, 64, 8, {}),
    "llama with biases": ("llama", 2, 64, 128, 4, 1, 64, 2, {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", 2, 64, 160, 4, 2, 64, 32, {"head_dim": 32, "sliding_window": None}),
}
every_shape = pytest.mark.parametrize("name", SHAPES)


def config_of(name: str):
    kind, layers, hidden, inner, heads, key_heads, vocabulary, _, further = SHAPES[name]
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 1024,
    }
    return AutoConfig.for_model(kind, **sizes, **further)


def policy_of(name: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config_of(name), dtype=dtype)
    policy = attach_adapter(base, adaptation(PeftSection(rank=SHAPES[name][7]))).train()
    fuse_lora(policy)
    add_scored_forward(base, LogitSettings())
    assert use_packed_attention(base) is None
    return policy


@every_shape
def test_parameters_of_base_and_adapter_are_those_of_the_model(name):
    policy, decoder = policy_of(name), decoder_of(config_of(name))
    trained = trainable_parameters(policy)
    assert decoder.lora_parameters(SHAPES[name][7]) == trained
    assert decoder.parameters == total_parameters(policy) - trained
    assert weight_bytes(decoder, Types(weights=2)) == 2 * decoder.parameters


@every_shape
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
    ids=["float32", "bfloat16", "float32 under autocast"],
)
def test_bytes_of_a_token_are_those_that_are_measured(name, dtype, autocast):
    policy = policy_of(name, dtype)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        measured = measure(policy, packed=True)
    types = Types(weights=dtype.itemsize, compute=(autocast or dtype).itemsize)
    estimated = token_bytes(decoder_of(config_of(name)), types, SHAPES[name][7], kernel=False)
    assert estimated.kept == pytest.approx(measured.kept, rel=WITHIN)
    assert estimated.recomputed == pytest.approx(measured.recomputed, rel=WITHIN)
