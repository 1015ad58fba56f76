"""Attention over packed rows: every segment by itself, no padding, no mask of the whole row.

query, key, value, Layout -> attended values

Registered with transformers under a name of its own. Where no layout is passed on (generation, evaluation of padded
rows), the model's own implementation runs. The layout travels as an argument of the forward pass and not as a global:
gradient checkpointing runs a layer's forward again inside the backward pass, when any global has moved on. Shapes: H
heads, K key-value heads, L tokens, C of a segment, S keys that are seen, D of a head.

Two ways give the same numbers: one call of torch's variable-length kernel for all segments, or SDPA segment by segment.
:func:`why_by_segment` says which, from the machine and the shapes alone. Soft caps and sinks have neither: their scores
are made in full, a segment at a time, as transformers' eager attention makes those of a whole row.
"""

import contextlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from perl.packing.rows import Layout
from perl.policy.model import HALF, beside
from perl.policy.precision import set_attention, with_attention

_PREFIX = "perl_packed_"
# Of transformers' arguments those of :class:`Scores`, in its order, and those that packed rows do not have.
_ASKED = ("scaling", "sliding_window", "softcap", "s_aux")
_UNKNOWN = ("position_bias", "dropout")
# What the variable-length kernel takes, as FlashAttention 2 in torch 2.11 to 2.15 checks it.
_OLDEST_GPU = (8, 0)
_LARGEST_HEAD, _HEAD_MULTIPLE = 256, 8
# Heads whose backward pass asks for more shared memory than GPUs for desktops, workstations and inference have.
_WIDE_HEADS = range(193, 225)
_LITTLE_SHARED_MEMORY = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))


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
        original = "sdpa" if model._supports_sdpa else "eager"
    if original != "eager" and original not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return f"its attention is {original!r}; packed rows need attn_implementation='sdpa'"
    if not model._can_set_attn_implementation():
        return "its attention is written into the model and cannot be exchanged"
    register(original)
    set_attention(model, _PREFIX + original)
    return None


def without_packed_attention(model: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
    """The model with the attention it was loaded with, for code that looks at its name."""
    return with_attention(model, model.config._attn_implementation.removeprefix(_PREFIX))


def register(original: str) -> None:
    """Makes ``perl_packed_<original>`` known to transformers: packed rows by us, all else by the original."""
    unpacked = _eager if original == "eager" else ALL_ATTENTION_FUNCTIONS[original]

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,  # noqa: ANN401 (transformers')
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        layout = options.get("packed_layout")
        if layout is None:
            return unpacked(module, query, key, value, attention_mask, **options)
        # One by one: torch's compiler hands on a dict as it was when the graph was made, whatever has come into it.
        asked = [options.get(name) for name in (*_ASKED, *_UNKNOWN)]
        return _outside_graphs(query, key, value, layout, *asked), None

    AttentionInterface.register(_PREFIX + original, attention)
    AttentionMaskInterface.register(_PREFIX + original, AttentionMaskInterface()[original])


def _eager(module: torch.nn.Module, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:  # noqa: ANN401
    """The attention that is written beside the layer, which has no entry in transformers' list."""
    plain = beside(module, "eager_attention_forward")
    attended: tuple[torch.Tensor, torch.Tensor | None] = plain(module, *args, **options)
    return attended


@torch.compiler.disable(reason="the number and lengths of the segments differ from row to row")
def _outside_graphs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    *asked: Any,  # noqa: ANN401 (transformers')
) -> torch.Tensor:
    """Attention of a packed row, never part of a compiled graph, which would be made anew for each layout.

    Raises:
        NotImplementedError: A model asks for what packed rows do not have, which would be left out in silence.
    """
    for name, value_of in zip(_UNKNOWN, asked[len(_ASKED) :], strict=True):
        if isinstance(value_of, torch.Tensor) or value_of:
            raise NotImplementedError(f"its attention uses {name}")
    return packed_attention(query, key, value, layout, Scores(*asked[: len(_ASKED)]))


@dataclass(frozen=True)
class Scores:
    """What a layer does to the products of its queries and keys.

    Attributes:
        scaling: What they are multiplied by; None: 1 / sqrt(D).
        window: Tokens that one sees, itself included; None: all before it.
        softcap: c of c tanh(s / c) (Gemma 2); None: not.
        sinks: (H,) a score of each head that takes its share of the softmax and adds nothing (GPT-OSS); None: no.
    """

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether SDPA and the kernel know how."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True)
class Machine:
    """What decides whether a device can run the variable-length kernel.

    Attributes:
        device: Its type, ``cuda``.
        capability: Of a GPU by NVIDIA.
        rocm: Whether torch was built for GPUs by AMD, which call themselves ``cuda`` too.
        flash: Whether torch holds FlashAttention, and nobody has switched it off.
    """

    device: str
    capability: tuple[int, int] = (0, 0)
    rocm: bool = False
    flash: bool = False


@dataclass(frozen=True)
class KernelCall:
    """How this torch's kernel is asked for causal attention.

    Attributes:
        grouped: Whether it takes fewer key-value heads than heads; if not, they are repeated.
    """

    grouped: bool

    def keywords(self, scaling: float | None, grouped: bool, window: int | None = None) -> dict[str, Any]:
        """Besides the tensors and the lengths."""
        # so many tokens to the left besides itself, -1 for all, none to the right: causal
        asked: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
        return asked | {"enable_gqa": grouped} if self.grouped else asked


def machine_of(device: torch.device) -> Machine:
    """What is known of a device."""
    if device.type != "cuda":
        return Machine(device.type)
    flash = torch.backends.cuda.is_flash_attention_available() and torch.backends.cuda.flash_sdp_enabled()
    return Machine("cuda", torch.cuda.get_device_capability(device), torch.version.hip is not None, flash)


def kernel_call(signature: inspect.Signature) -> KernelCall | None:
    """How a ``varlen_attn`` of this signature is called; None: it lacks what causal attention needs.

    Torch 2.11 has no ``enable_gqa``; 2.12 to 2.15 have it.
    """
    if not {"scale", "window_size"} <= signature.parameters.keys():
        return None
    return KernelCall(grouped="enable_gqa" in signature.parameters)


PLAIN = Scores()
"""Scaled by the root of D, all tokens seen, neither cap nor sinks."""

KERNEL_CALL = kernel_call(inspect.signature(varlen_attn))
"""Of the torch that is installed."""


def why_by_segment(
    machine: Machine, dtype: torch.dtype, head_size: int, value_head_size: int, call: KernelCall | None
) -> str | None:
    """Why SDPA runs segment by segment; None: the variable-length kernel runs, all segments in one call.

    Args:
        machine: Where the queries are.
        dtype: Of queries, keys and values, after autocast.
        head_size: Numbers of a head of queries and keys.
        value_head_size: Numbers of a head of values; another one in DeepSeek's latent attention.
        call: :data:`KERNEL_CALL`.
    """
    capability = machine.capability
    whys = {
        f"no GPU by NVIDIA ({'ROCm' if machine.rocm else machine.device})": machine.device != "cuda" or machine.rocm,
        f"numbers are {str(dtype).removeprefix('torch.')}": dtype not in HALF,
        f"a GPU of compute capability {capability[0]}.{capability[1]}, below 8.0": capability < _OLDEST_GPU,
        "torch without FlashAttention, or it is switched off": not machine.flash,
        "an unknown varlen_attn": call is None,
        f"heads of {head_size} with values of {value_head_size}": head_size != value_head_size,
        f"heads of {head_size}, not a multiple of {_HEAD_MULTIPLE}": head_size % _HEAD_MULTIPLE != 0,
        f"heads of {head_size}, above {_LARGEST_HEAD}": head_size > _LARGEST_HEAD,
        f"heads of {head_size} on a GPU of little shared memory": head_size in _WIDE_HEADS
        and capability in _LITTLE_SHARED_MEMORY,
    }
    return next((why for why, holds in whys.items() if holds), None)


def needs_every_head(machine: Machine) -> bool:
    """Whether SDPA gets as many key-value heads as heads, though it could be given fewer.

    On a GPU on which FlashAttention does not run, its memory-efficient kernel does, but not with grouped heads: those
    would take plain products, which keep all scores of a segment for the backward pass.
    """
    return machine.device == "cuda"


def packed_attention(
    query_1HLD: torch.Tensor,
    key_1KLD: torch.Tensor,
    value_1KLD: torch.Tensor,
    layout: Layout,
    scores: Scores = PLAIN,
) -> torch.Tensor:
    """Causal attention within each segment, to its prefix besides.

    Args:
        query_1HLD: (1, H, L, D) float.
        key_1KLD: (1, K, L, D) float, K divides H.
        value_1KLD: (1, K, L, V) float; V is D but for a few models.
        layout: Covers the L tokens; on any device.
        scores: What is done to them.

    Returns:
        (1, L, H, V), as transformers' attention functions return it.
    """
    if query_1HLD.is_cuda and query_1HLD.dtype == torch.float32 and torch.is_autocast_enabled("cuda"):
        # What SDPA does under autocast; queries and keys that were rotated are float32 there if the weights are.
        dtype = torch.get_autocast_dtype("cuda")
        query_1HLD, key_1KLD, value_1KLD = query_1HLD.to(dtype), key_1KLD.to(dtype), value_1KLD.to(dtype)
    layout = layout.on(query_1HLD.device)  # of a model in parts the layers are on other devices than its input
    machine, sizes = machine_of(query_1HLD.device), (query_1HLD.size(-1), value_1KLD.size(-1))
    by_segment = why_by_segment(machine, query_1HLD.dtype, *sizes, KERNEL_CALL) or not scores.plain
    if KERNEL_CALL is None or by_segment:
        groups = query_1HLD.size(1) // key_1KLD.size(1)
        if groups > 1 and (needs_every_head(machine) or not scores.plain):
            key_1KLD, value_1KLD = (tensor.repeat_interleave(groups, dim=1) for tensor in (key_1KLD, value_1KLD))
        return _by_segment(query_1HLD, key_1KLD, value_1KLD, layout, scores)
    return _by_kernel(query_1HLD, key_1KLD, value_1KLD, layout, scores, KERNEL_CALL)


def _by_segment(
    query_1HLD: torch.Tensor, key_1KLD: torch.Tensor, value_1KLD: torch.Tensor, layout: Layout, scores: Scores
) -> torch.Tensor:
    """One call a segment: no more scores are computed than there are pairs, but for those that a mask hides."""
    grouped = query_1HLD.size(1) != key_1KLD.size(1)
    lengths = [segment.length for segment in layout.segments]
    # Pieces of one split, prompts included: the gradients of slices would each be as long as the whole row.
    pieces = zip(key_1KLD.split(lengths, dim=2), value_1KLD.split(lengths, dim=2), strict=True)
    seen = {segment.start: piece for segment, piece in zip(layout.segments, pieces, strict=True)}
    attended = []
    for segment, q_1HCD in zip(layout.segments, query_1HLD.split(lengths, dim=2), strict=True):
        k_1KCD, v_1KCD = seen[segment.start]
        if segment.prefixes:  # C tokens see S = P + C keys: all P of the segments before them, then their own
            pieces_seen = [seen[start] for start, _ in segment.prefixes]
            keys, values = zip(*pieces_seen, (k_1KCD, v_1KCD), strict=True)
            k_1KCD, v_1KCD = torch.cat(keys, dim=2), torch.cat(values, dim=2)
        mask_CS = None  # causal: token i of the segment sees tokens 0 to i
        narrow = scores.window is not None and scores.window < k_1KCD.size(2)
        if segment.prefix_length or narrow or not scores.plain:
            mask_CS = layout.mask(segment.prefix_length, segment.length, scores.window if narrow else None)
        if not scores.plain and mask_CS is not None:
            attended.append(_in_full(q_1HCD, k_1KCD, v_1KCD, mask_CS, scores))
            continue
        attended.append(
            functional.scaled_dot_product_attention(
                q_1HCD,
                k_1KCD,
                v_1KCD,
                attn_mask=mask_CS,
                is_causal=mask_CS is None,
                scale=scores.scaling,
                enable_gqa=grouped,
            )
        )
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous()  # (1, H, L, V) -> (1, L, H, V)


def _in_full(
    query_1HCD: torch.Tensor, key_1HSD: torch.Tensor, value_1HSD: torch.Tensor, mask_CS: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Attention with a soft cap or sinks: products, cap, mask, softmax in float32, as the two models' own code."""
    scaling = query_1HCD.size(-1) ** -0.5 if scores.scaling is None else scores.scaling
    scores_1HCS = query_1HCD @ key_1HSD.transpose(2, 3) * scaling
    if scores.softcap is not None:
        scores_1HCS = torch.tanh(scores_1HCS / scores.softcap) * scores.softcap
    scores_1HCS = scores_1HCS.masked_fill(~mask_CS, float("-inf"))
    if scores.sinks is not None:  # a column of its own, which no value belongs to
        sinks_1HC1 = scores.sinks.reshape(1, -1, 1, 1).expand(*scores_1HCS.shape[:3], 1)
        scores_1HCS = torch.cat([scores_1HCS, sinks_1HC1.to(scores_1HCS)], dim=-1)
    exact = torch.promote_types(scores_1HCS.dtype, torch.float32)
    shares = torch.softmax(scores_1HCS, dim=-1, dtype=exact).to(query_1HCD.dtype)
    return shares[..., : key_1HSD.size(2)] @ value_1HSD


def _by_kernel(
    query_1HLD: torch.Tensor,
    key_1KLD: torch.Tensor,
    value_1KLD: torch.Tensor,
    layout: Layout,
    scores: Scores,
    call: KernelCall,
) -> torch.Tensor:
    """One call for all segments; a segment's keys end where its queries end, which is where FlashAttention aligns them.

    cuDNN aligns them where they begin. Torch 2.15 prefers it, but only where one tensor has the lengths of both: it is
    given two, also where they are equal.
    """
    groups = query_1HLD.size(1) // key_1KLD.size(1)
    # The kernel has tokens first and no batch: (1, H, L, D) -> (L, H, D).
    q_LHD, k_SKD, v_SKD = (tensor.squeeze(0).transpose(0, 1) for tensor in (query_1HLD, key_1KLD, value_1KLD))
    if layout.shares:  # S > L keys: those of a shared prompt stand before each completion that sees it
        k_SKD, v_SKD = k_SKD[layout.keys], v_SKD[layout.keys]
    if groups > 1 and not call.grouped:  # head h reads key-value head h // groups
        k_SKD, v_SKD = k_SKD.repeat_interleave(groups, dim=1), v_SKD.repeat_interleave(groups, dim=1)
    longest_query, longest_key = layout.longest
    attended_LHD = varlen_attn(
        q_LHD.contiguous(),
        k_SKD.contiguous(),
        v_SKD.contiguous(),
        layout.query_ends,
        layout.key_ends,
        longest_query,
        longest_key,
        **call.keywords(scores.scaling, grouped=groups > 1, window=scores.window),
    )
    return attended_LHD.unsqueeze(0)  # type: ignore[union-attr]  # a pair only if asked for
