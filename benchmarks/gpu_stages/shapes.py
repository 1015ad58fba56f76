"""Models of known shapes with random weights, and what a GPU of a name can do at most.

name -> Scale; name of a GPU -> FLOP/s; device -> measured FLOP/s, bytes/s

Nothing is read from the Hub. Knows nothing of trainers.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from step_cases import Case, Rollout, Scale, draw_rollouts
from step_flops import ModelSize
from torch.nn.functional import scaled_dot_product_attention

from gpu_stages.timing import fastest

# hidden_size, and the rest of the config, as published with the models of these names.
SHAPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Qwen2.5-1.5B": (
        "qwen2",
        1536,
        {"intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2},
    ),
    "Qwen3-0.6B": (
        "qwen3",
        1024,
        {
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "Qwen3-4B": (
        "qwen3",
        2560,
        {
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
}
VOCABULARY = 151_936
_TINY_WIDTH, _TINY_LAYERS, _TINY_VOCABULARY = 64, 2, 64

# Dense FLOP/s of the matrix units as the vendor states them: bfloat16, and float16 where there is no bfloat16 (T4).
# The first whose words stand in a name counts: other forms of the H100 are slower.
_STATED = {
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "T4": 65e12,
}


@dataclass(frozen=True)
class Roof:
    """What a device can do at most.

    Attributes:
        stated: FLOP/s of its matrix units as the vendor states them; None: not known here.
        flops: FLOP/s that a large matrix product reaches.
        bandwidth: Bytes/s, read and written, of a copy.
    """

    stated: float | None
    flops: float
    bandwidth: float

    @property
    def peak(self) -> float:
        """What MFU is counted against: stated, or measured where nothing is known."""
        return self.stated or self.flops


def stated_peak(name: str) -> float | None:
    """FLOP/s of a GPU by the name that its driver gives; None: not known, as of a part of a GPU (MIG)."""
    if re.search(r"\bMIG\b", name):
        return None
    return next((flops for words, flops in _STATED.items() if re.search(rf"\b{words}\b", name, re.IGNORECASE)), None)


def scale_of(name: str, *, tiny: bool, device: torch.device, **arguments: Any) -> Scale:  # noqa: ANN401
    """A model in bfloat16 and what both trainers are told; tiny: two narrow layers of the same architecture.

    Args:
        name: Of :data:`SHAPES`.
        tiny: Whether a toy of it.
        device: Where it trains.
        arguments: Of the trainers.
    """
    architecture, width, shape = SHAPES[name]
    if tiny:
        width = _TINY_WIDTH
        small = {"intermediate_size": 2 * width, "num_hidden_layers": _TINY_LAYERS, "num_attention_heads": 4}
        shape = {**shape, **small, "num_key_value_heads": 2}
        shape |= {"head_dim": 16} if "head_dim" in shape else {}
    arguments = {"use_cpu": device.type == "cpu", "bf16": True, **arguments}
    return Scale(width, architecture, {**shape, "tie_word_embeddings": True}, 1, 1, arguments, bf16=True)


def vocabulary(*, tiny: bool) -> int:
    """Of the models; of all three the same."""
    return _TINY_VOCABULARY if tiny else VOCABULARY


def one_row(tokens: int, *, tiny: bool, rows: int = 2) -> Case:
    """Rows of exactly so many tokens, a prompt of one token included, each a micro-batch; a group of them a step."""
    completion = tokens - 1
    return Case(
        f"{tokens}", (1, 1), (completion, completion), vocabulary=vocabulary(tiny=tiny), generations=max(rows, 2)
    )


def reasoning(*, tiny: bool) -> Case:
    """Completions of a reasoning model: lognormal, mean 3000, at most 16384; four groups of ten without a signal."""
    case = Case(
        "reasoning",
        (160, 240),
        (32, 16_384),
        lognormal=(3000.0, 0.8),
        dead=0.4,
        vocabulary=vocabulary(tiny=tiny),
    )
    return replace(case.shorter(128), vocabulary=case.vocabulary) if tiny else case


def warm_up(case: Case, groups: int) -> list[Rollout]:
    """Two steps of short rows: kernels are compiled, and every tensor of an adapter has been seen to move.

    LoRA's A moves in the second step only, and until then a run watches each tensor.
    """
    short = replace(case, completions=(8, 16), lognormal=None, dead=0.0)
    return draw_rollouts(short, 2 * groups)


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


def measure_roof(device: torch.device, *, tiny: bool) -> Roof:
    """The fastest of a few large products in bfloat16, and of a few copies."""
    size = 256 if tiny else 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**20 if tiny else 2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = fastest(lambda: torch.mm(left, right), device)
    copy = fastest(lambda: target.copy_(source), device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Roof(stated_peak(name), 2 * size**3 / product, 2 * source.numel() / copy)


def measure_masked_attention(device: torch.device, *, tiny: bool) -> float:
    """FLOP/s of SDPA with a mask, forward and backward, as transformers runs padded rows: five products backward."""
    heads, tokens, width = 12, 64 if tiny else 4096, 128
    query, key, value = (
        torch.randn(2, heads, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    mask = torch.ones(tokens, tokens, device=device, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    seconds = fastest(lambda: scaled_dot_product_attention(query, key, value, mask).sum().backward(), device)
    return (2 + 5) * 2 * 2 * heads * tokens**2 * width / seconds
