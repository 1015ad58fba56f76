"""Models of random weights and rows of random tokens; policies made ready for packed rows as a trainer does it.

seed -> random Qwen3, rows; policy with an adapter -> the same, its layers and head replaced

Nothing is read from the Hub; every draw has its own seed. Knows nothing of trainers.
"""

import contextlib
from collections.abc import Iterator

import torch
from peft import PeftModel
from transformers import Qwen3Config, Qwen3ForCausalLM

import perl.packing.compiled
from perl.packing.attention import use_packed_attention
from perl.packing.compiled import compile_layers
from perl.packing.fused_lora import fuse_lora
from perl.packing.head import add_scored_forward, logit_settings
from perl.packing.rows import Row
from perl.policy.model import base_of

# About 50 million parameters, most of them in the embeddings: few layers, so that every method is set up quickly.
FIFTY_MILLION = {
    "vocab_size": 65536,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
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

# Length of a prompt: those of its completions.
ROWS: dict[int, tuple[int, ...]] = {70: (300, 1, 161, 40), 1: (9, 2), 257: (129, 64), 33: (5,)}
SHORT_ROWS: dict[int, tuple[int, ...]] = {7: (3, 1, 16), 1: (9, 2), 20: (5,)}


def random_qwen3(*, tiny: bool, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """The same numbers each time, rounded to the type; on the CPU. Its guesses are far from uniform."""
    torch.manual_seed(0)
    shape = TOY if tiny else FIFTY_MILLION
    config = Qwen3Config(
        **shape,
        initializer_range=0.1 if tiny else 0.05,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).to(dtype)


def random_rows(vocabulary: int, device: torch.device, *, tiny: bool) -> tuple[list[Row], list[list[int]]]:
    """Rows of unequal lengths, some completions of one token, and which of them have their prompt in common."""
    generator = torch.Generator().manual_seed(5)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(2, vocabulary, (count,), generator=generator).to(device)

    lengths = SHORT_ROWS if tiny else ROWS
    rows: list[Row] = []
    groups: list[list[int]] = []
    for prompt_length, completions in lengths.items():
        prompt = tokens(prompt_length)
        groups.append(list(range(len(rows), len(rows) + len(completions))))
        for count in completions:
            scored = torch.rand(count, generator=generator) < 0.9
            scored[0] = True
            rows.append(Row(prompt, tokens(count), scored))
    return rows, groups


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


def recompute_activations(policy: PeftModel) -> None:
    """In the backward pass, as a trainer lets them be recomputed."""
    base = base_of(policy)
    base.activation_checkpointing_enable({"use_reentrant": False})
    base.enable_input_require_grads()


@contextlib.contextmanager
def compiling_quickly(tiny: bool) -> Iterator[None]:
    """For toys: graphs that are traced and run without code being generated, which takes seconds for each."""
    usual = perl.packing.compiled._BACKEND
    perl.packing.compiled._BACKEND = "aot_eager" if tiny else usual
    try:
        yield
    finally:
        perl.packing.compiled._BACKEND = usual
