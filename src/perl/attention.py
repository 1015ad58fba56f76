"""Attention over packed rows: every segment by itself, no padding, no mask of the whole row.

query, key, value, Layout -> attended values

Registered with transformers under a name of its own. Where no layout is passed on (generation, evaluation of padded
rows), the model's own implementation runs. The layout travels as an argument of the forward pass and not as a global:
gradient checkpointing runs a layer's forward again inside the backward pass, when any global has moved on. Shapes: H
heads, K key-value heads, L tokens, D of a head.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from perl.packing import Layout

_PREFIX = "perl_packed_"
# Types that the variable-length kernel takes.
_KERNEL_TYPES = (torch.bfloat16, torch.float16)


def use_packed_attention(model: PreTrainedModel) -> str | None:
    """Lets a model run packed rows.

    Passes that are not packed stay what they were, but for FlashAttention, whose place SDPA takes there.

    Args:
        model: A model of transformers, without wrappers.

    Returns:
        Why it cannot; None if it can.
    """
    original = model.config._attn_implementation
    if original.startswith(_PREFIX):
        return None
    if "flash" in original:  # finds its kernel by the name that the model is given, which will be ours
        original = "sdpa"
    if original not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return f"its attention is {original!r}; packed rows need attn_implementation='sdpa'"
    if not model._can_set_attn_implementation():
        return "its attention is written into the model and cannot be exchanged"
    register(original)
    model.set_attn_implementation(_PREFIX + original)
    return None


@contextlib.contextmanager
def without_packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """The model with the attention it was loaded with, for code that looks at its name."""
    ours = model.config._attn_implementation
    if not ours.startswith(_PREFIX):
        yield
        return
    model.set_attn_implementation(ours.removeprefix(_PREFIX))
    try:
        yield
    finally:
        model.set_attn_implementation(ours)


def register(original: str) -> None:
    """Makes ``perl_packed_<original>`` known to transformers: packed rows by us, all else by the original."""
    unpacked = ALL_ATTENTION_FUNCTIONS[original]

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,  # noqa: ANN401 (transformers')
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        layout = options.pop("packed_layout", None)
        if layout is None:
            return unpacked(module, query, key, value, attention_mask, **options)
        return _outside_graphs(query, key, value, layout, options), None

    AttentionInterface.register(_PREFIX + original, attention)
    AttentionMaskInterface.register(_PREFIX + original, AttentionMaskInterface()[original])


@torch.compiler.disable(reason="the number and lengths of the segments differ from row to row")
def _outside_graphs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, options: dict[str, Any]
) -> torch.Tensor:
    """Attention of a packed row, never part of a compiled graph, which would be made anew for each layout."""
    refuse_unknown(options)
    return packed_attention(query, key, value, layout, scaling=options.get("scaling"))


def refuse_unknown(options: dict[str, Any]) -> None:
    """What a model asks of its attention and packed rows do not have.

    Raises:
        NotImplementedError: It would be left out in silence.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise NotImplementedError(f"its attention uses {name}")
    if options.get("dropout"):
        raise NotImplementedError("its attention uses dropout")


def packed_attention(
    query_1HLD: torch.Tensor,
    key_1KLD: torch.Tensor,
    value_1KLD: torch.Tensor,
    layout: Layout,
    *,
    scaling: float | None = None,
) -> torch.Tensor:
    """Causal attention within each segment, to its prefix besides.

    Args:
        query_1HLD: (1, H, L, D) float.
        key_1KLD: (1, K, L, D) float, K divides H.
        value_1KLD: (1, K, L, D) float.
        layout: Covers the L tokens.
        scaling: What the scores are multiplied by; None: 1 / sqrt(D).

    Returns:
        (1, L, H, D), as transformers' attention functions return it.
    """
    if query_1HLD.is_cuda and query_1HLD.dtype == torch.float32 and torch.is_autocast_enabled("cuda"):
        # What SDPA does under autocast; queries and keys that were rotated are float32 there if the weights are.
        dtype = torch.get_autocast_dtype("cuda")
        query_1HLD, key_1KLD, value_1KLD = query_1HLD.to(dtype), key_1KLD.to(dtype), value_1KLD.to(dtype)
    if query_1HLD.is_cuda and query_1HLD.dtype in _KERNEL_TYPES:
        return _by_kernel(query_1HLD, key_1KLD, value_1KLD, layout, scaling)
    return _by_segment(query_1HLD, key_1KLD, value_1KLD, layout, scaling)


def _by_segment(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, scaling: float | None
) -> torch.Tensor:
    """One call a segment: no more scores are computed than there are pairs, but for the triangle's other half."""
    grouped = query.size(1) != key.size(1)
    lengths = [segment.length for segment in layout.segments]
    # Pieces of one split, prompts included: the gradients of slices would each be as long as the whole row.
    pieces = zip(key.split(lengths, dim=2), value.split(lengths, dim=2), strict=True)
    seen = {segment.start: piece for segment, piece in zip(layout.segments, pieces, strict=True)}
    attended = []
    for segment, q in zip(layout.segments, query.split(lengths, dim=2), strict=True):
        k, v = seen[segment.start]
        mask = None
        if segment.prefix_length:
            prompt_k, prompt_v = seen[segment.prefix_start]
            k, v = torch.cat([prompt_k, k], dim=2), torch.cat([prompt_v, v], dim=2)
            mask = layout.masks[segment.prefix_length, segment.length]
        attended.append(
            functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous()


def _by_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, scaling: float | None
) -> torch.Tensor:
    """One call for all segments; a segment's keys end where its queries end, which is where the kernel aligns them."""
    grouped = query.size(1) != key.size(1)
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    if layout.shares:
        k, v = k[layout.keys], v[layout.keys]
    longest_query, longest_key = layout.longest
    attended_LHD = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        layout.query_ends,
        layout.key_ends,
        longest_query,
        longest_key,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=grouped,
    )
    return attended_LHD.unsqueeze(0)  # type: ignore[union-attr]  # a pair only if asked for
