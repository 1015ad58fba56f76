"""Floating point operations of a GRPO training step: what its gradient needs at least, and what is executed.

model, groups -> ideal FLOPs; a step inside counter() -> executed FLOPs

Here are the formula of what is needed, the counter of what is executed and the sizes of a real model; what plans derive
is in ``perl.training.cost_flops``.

**Ideal**, for a frozen base with LoRA, N_b weights in its linear layers, N_l in the adapter, a head of V x d, L layers
of attention over heads x head_dim = d_a, and D distinct tokens (each prompt once, and the completions that have a
gradient; see ``ideal_flops``): ::

    (4 N_b - 2 N_f) D  +  6 N_l D  +  4 V d sum(c)  +  3 * 4 d_a L pairs

Frozen weights take a forward and one backward product (no gradient of their own), the adapter's take three, the head is
run where a completion token is predicted, attention runs for the pairs that are not masked, backward twice. The first
layer's projections of queries, keys and values (N_f) pass no gradient on to the embeddings, nor do their adapters. No
padding, no recomputation, no pass for the old policy. Still in it, though nobody need compute them: the last layer at
positions that predict nothing, and the last token of a completion.

**Executed** are the matrix products and attention calls that PyTorch dispatches, also backward and inside of autograd
functions. A causal call counts the pairs it needs; a call with a mask counts all pairs, since its kernel runs them all;
attention's backward pass counts five products, since the kernels compute the scores again. Products are counted by
formulas of our own: PyTorch's raise where a product's type is given (``out_dtype``, as TRL's head does on CUDA).
Kernels of other packages (flash-attn) are not seen.

Shapes of sdpa: (B, heads, T, head_dim); of varlen attention: (tokens, heads, head_dim).
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.attention.varlen  # registers torch_attn's operations
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from perl.training.cost_flops import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, Group, ModelSize, attention_pairs

__all__ = ["Group", "ModelSize", "attention_pairs", "counter", "ideal_flops", "model_size"]

_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: FORWARD_PRODUCTS,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: BACKWARD_PRODUCTS,
    torch.ops.aten._scaled_dot_product_flash_attention: FORWARD_PRODUCTS,
    torch.ops.aten._scaled_dot_product_flash_attention_backward: BACKWARD_PRODUCTS,
    torch.ops.aten._scaled_dot_product_efficient_attention: FORWARD_PRODUCTS,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward: BACKWARD_PRODUCTS,
    torch.ops.aten._scaled_dot_product_cudnn_attention: FORWARD_PRODUCTS,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward: BACKWARD_PRODUCTS,
    torch.ops.torch_attn._varlen_attn: FORWARD_PRODUCTS,
    torch.ops.torch_attn._varlen_attn_backward: BACKWARD_PRODUCTS,
}
# Which argument is the product's left side.
_PRODUCTS = {
    torch.ops.aten.mm: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.addmm_: 1,
    torch.ops.aten.bmm: 0,
    torch.ops.aten.baddbmm: 1,
}


def model_size(base: PreTrainedModel, rank: int) -> ModelSize:
    """The sizes of a plain base, on which a LoRA of this rank on all linear layers but the head is to be trained."""
    head = base.get_output_embeddings()
    layers = [m for m in base.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    attention = base.model.layers[0].self_attn
    first = (attention.q_proj, attention.k_proj, attention.v_proj)
    config = base.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelSize(
        block=sum(layer.weight.numel() for layer in layers),
        adapter=sum(rank * (layer.in_features + layer.out_features) for layer in layers),
        to_embeddings=sum(layer.weight.numel() + rank * layer.in_features for layer in first),
        head=head.weight.numel(),
        attention=config.num_attention_heads * width * config.num_hidden_layers,
    )


def ideal_flops(size: ModelSize, groups: Iterable[Group], *, with_reference: bool) -> int:
    """The least that the gradient of a step takes.

    Args:
        size: The model's.
        groups: Of one optimizer step.
        with_reference: Whether the loss has a KL term (beta > 0). Then all rows have a gradient, and the base runs
            forward once more, without an adapter: 2 N_b D + 2 V d sum(c) + attention.
    """
    total = 0
    for group in groups:
        if not (group.live or with_reference):
            continue
        scored = sum(group.completions)
        distinct = group.prompt + scored
        pairs = attention_pairs(group.prompt, group.prompt, causal=True) + sum(
            attention_pairs(length, group.prompt + length, causal=True, at_end=True) for length in group.completions
        )
        attention = 4 * size.attention * pairs
        linear = 4 * size.block + 6 * size.adapter - 2 * size.to_embeddings
        total += linear * distinct + 4 * size.head * scored + 3 * attention
        if with_reference:
            total += 2 * size.block * distinct + 2 * size.head * scored + attention
    return total


def counter() -> FlopCounterMode:
    """A context that counts what is executed in it: ``get_total_flops()``."""
    attention = {operation: _formula(operation, products) for operation, products in _ATTENTION.items()}
    products = {operation: _of_product(place) for operation, place in _PRODUCTS.items()}
    return FlopCounterMode(display=False, custom_mapping={**attention, **products})


def _of_product(place: int) -> Callable[..., int]:
    """FLOPs of a matrix product, or of a batch of them, whatever else the operation is given, by place or by name.

    Args:
        place: Of its left side among the arguments; the right side is the next.
    """

    def flops(*shapes: Any, **_: Any) -> int:  # noqa: ANN401 (the counter's signature)
        left, right = shapes[place], shapes[place + 1]
        return 2 * math.prod(left) * right[-1]

    return flops


def _formula(operation: Any, products: int) -> Callable[..., int]:  # noqa: ANN401 (an OpOverloadPacket)
    """FLOPs of an attention operation; PyTorch's own formulas know neither causal masks nor the CPU's kernel."""
    names = [argument.name for argument in operation.default._schema.arguments]

    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:  # noqa: ANN401, ARG001 (the counter's signature)
        given = dict(zip(names, args, strict=False)) | kwargs
        query, key, causal = given["query"], given["key"], bool(given.get("is_causal", False))
        if "cu_seq_q" in given:
            offsets_q, offsets_k = given["cu_seq_q"], given.get("cu_seq_k")
            queries = offsets_q.diff().tolist()
            keys = queries if offsets_k is None else offsets_k.diff().tolist()
            window = given.get("window_size") or (-1, -1)
            causal = causal or window[1] == 0
            each = zip(queries, keys, strict=True)
            pairs = sum(attention_pairs(q, k, causal=causal, at_end=True) for q, k in each)
            return 2 * products * pairs * query.shape[1] * query.shape[2]
        rows, heads, queries, width = query.shape
        return 2 * products * attention_pairs(queries, key.shape[2], causal=causal) * rows * heads * width

    flops._get_raw = True  # type: ignore[attr-defined] (tensors, not their shapes)
    return flops
