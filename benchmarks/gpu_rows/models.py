"""Models of known shapes with random weights, and policies made ready for packed rows as a trainer does it.

name -> Scale; seed -> random Qwen3; policy with an adapter -> the same, its layers and head replaced

Nothing is read from the Hub. Knows nothing of trainers.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from step_cases import Scale
from step_flops import ModelSize
from transformers import Qwen3Config, Qwen3ForCausalLM

import perl.packing.compiled
from perl.packing.attention import use_packed_attention
from perl.packing.compiled import compile_layers
from perl.packing.fused_lora import fuse_lora
from perl.packing.head import add_scored_forward, logit_settings
from perl.policy.model import base_of

# hidden_size, and the rest of the config, as published with Qwen3-0.6B, Qwen3-4B and Qwen2.5-1.5B.
_HEADS_OF_QWEN3 = {"num_key_value_heads": 8, "head_dim": 128}
SHAPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "0.6B": (
        "qwen3",
        1024,
        {"intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, **_HEADS_OF_QWEN3},
    ),
    "1.5B": (
        "qwen2",
        1536,
        {"intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2},
    ),
    "4B": (
        "qwen3",
        2560,
        {"intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, **_HEADS_OF_QWEN3},
    ),
}
VOCABULARY = 151_936
TINY_VOCABULARY = 64
# About 50 million parameters, most of them in the embeddings, with the heads of Qwen3; and a toy.
FIFTY_MILLION = {
    "vocab_size": 65536,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
TOY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
# Dense FLOP/s in bfloat16 as the vendor states them. The first whose words stand in a name counts.
_STATED = {
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
}


def stated_peak(name: str) -> float | None:
    """FLOP/s of a GPU by the name that its driver gives; None: not known, as of a part of a GPU (MIG)."""
    if re.search(r"\bMIG\b", name):
        return None
    return next((flops for words, flops in _STATED.items() if re.search(rf"\b{words}\b", name, re.IGNORECASE)), None)


def scale_of(name: str, *, tiny: bool, device: torch.device, **arguments: Any) -> Scale:  # noqa: ANN401
    """A model in bfloat16 and what all trainers are told; tiny: two narrow layers of the same architecture.

    Args:
        name: Of :data:`SHAPES`.
        tiny: Whether a toy of it.
        device: Where it trains.
        arguments: Of the trainers.
    """
    architecture, width, shape = SHAPES[name]
    if tiny:
        width = 64
        small = {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        shape = {**shape, **small} | ({"head_dim": 16} if "head_dim" in shape else {})
    arguments = {"use_cpu": device.type == "cpu", "bf16": True, **arguments}
    return Scale(width, architecture, {**shape, "tie_word_embeddings": True}, 1, 1, arguments, bf16=True)


def flops_per_token_of_prime_rl(size: ModelSize, *, layers: int, width: int, tokens: int) -> float:
    """FLOPs a token that prime-rl counts for MFU of LoRA training.

    4 N + 6 N_l + 12 L d T: N weights of all matrix products, the head's included, for every token; N_l of the adapter;
    attention over all T^2 pairs of a row, masked or not, with d, the residual stream's width, for heads x head_dim.

    Source: ``src/prime_rl/trainer/perf.py`` of prime-rl, commit 0e6c67f; the published rows follow from it.

    Args:
        size: Of the model.
        layers: L.
        width: d.
        tokens: T, of a row.
    """
    return 4 * (size.block + size.head) + 6 * size.adapter + 12 * layers * width * tokens


def random_qwen3(*, tiny: bool, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """The same numbers each time, rounded to the type; on the CPU. Its guesses are far from uniform."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **(TOY if tiny else FIFTY_MILLION),
        initializer_range=0.1 if tiny else 0.05,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).to(dtype)


def make_ready(policy: PeftModel, *, fused: bool | None = None, compiled: bool = False) -> None:
    """What a trainer does with a LoRA before its first packed pass.

    Args:
        policy: Changed in place.
        fused: Whether the head takes its derivative in the forward pass; None: as a trainer decides.
        compiled: Whether its layers are compiled, and what a fused head does with a tile.
    """
    fuse_lora(policy)
    base = base_of(policy)
    settings = logit_settings(base.config, temperature=1.0, float32=False)
    add_scored_forward(base, settings, fused=fused, compiled=compiled)
    why = use_packed_attention(base) or (compile_layers(base, packed=True) if compiled else None)
    if why:
        raise RuntimeError(why)


@contextlib.contextmanager
def compiling_quickly(tiny: bool) -> Iterator[None]:
    """For toys: graphs that are traced and run without code being generated, which takes seconds for each."""
    usual = perl.packing.compiled._BACKEND
    perl.packing.compiled._BACKEND = "aot_eager" if tiny else usual
    try:
        yield
    finally:
        perl.packing.compiled._BACKEND = usual
