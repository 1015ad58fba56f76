"""The language-model head for chosen tokens only: their log-probs, without the logits of all others.

hidden states, head, targets -> log-probs, entropies

A log-probability depends on one hidden state only, so its whole derivative is one vector of the hidden state's size.
The forward pass computes that vector while the logits are there, and the backward pass multiplies it: two products
with the head instead of the three of a pass that computes the logits again, and no logits are kept. Shapes: S scored
tokens, T of a tile of them, D of a hidden state, V vocabulary.

With z = (W h + b) / temperature: log p(y) = z_y - log sum_v exp z_v, so that d log p(y) / dz = e_y - p.
"""

import functools
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE, ChunkedLogProbFunction
from trl.trainer.utils import maybe_gather_lm_head_ctx

from perl.packing.compiled import compiled as compiled_function
from perl.packing.router import balancing_loss
from perl.packing.rows import ScoredTokens
from perl.run.products import linear, product

EntropyKind = Literal["none", "value", "gradient"]

# Numbers in a tile of logits on a CPU, 8 MiB of float32: a few passes over it stay in the cache.
_TILE = 2**21
# Bytes of a tile of logits in float32 on an accelerator, and the part of its memory that a tile may take: products of
# some hundred rows run at full speed, and up to three and a half tensors of its size are alive.
_LARGEST_TILE = 2**28
_SHARE_OF_MEMORY = 256
# Rows of a tile on an accelerator are a multiple of this, which its matrix units like.
_ROWS = 64
# Width of the tiles of TRL's kernel, which runs on accelerators; TRL's own value.
_KERNEL_WIDTH = 32768


@dataclass(frozen=True)
class HeadStates:
    """What the head makes logits of, at the scored tokens.

    Attributes:
        hidden_SD: (S, D) the last hidden states, with their gradient where there is one.
        weight_VD: (V, D) of the head.
        bias_V: (V,) or None.
        settings: Of the logits.
    """

    hidden_SD: torch.Tensor
    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None
    settings: "LogitSettings"


Beside = Callable[[HeadStates], tuple[torch.Tensor, ...]]
"""What is made of the states besides log-probabilities: tensors of (S, ...) each."""


@dataclass(frozen=True)
class LogitSettings:
    """What happens between the head's product and the softmax.

    Attributes:
        temperature: What the logits are divided by.
        scale: What they are multiplied by first (Cohere's ``logit_scale`` and its other names).
        softcap: c of c tanh(z / c), applied between the two; None: not.
        float32: Whether the head runs in float32.
    """

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    float32: bool = False


def logit_settings(config: PreTrainedConfig, *, temperature: float, float32: bool) -> LogitSettings:
    """The settings that a model's config asks for, under the names that models give them.

    Source: the same list as in TRL 1.16's ``add_fused_lm_head``.
    """
    text = config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(text, name, None) is not None:
            scale = float(getattr(text, name))
            break
    else:
        divisor = getattr(text, "logits_scaling", None)
        if divisor is not None:
            scale = float(divisor) if text.model_type == "hyperclovax" else 1 / float(divisor)
    return LogitSettings(temperature, scale, getattr(text, "final_logit_softcapping", None), float32)


def tile_rows(vocabulary: int, memory: int | None) -> int:
    """Tokens whose logits are there at once.

    Args:
        vocabulary: Rows of the head.
        memory: Bytes of the accelerator, all of them; None: on a CPU.
    """
    if memory is None:
        return max(64, _TILE // vocabulary)
    rows = min(_LARGEST_TILE, memory // _SHARE_OF_MEMORY) // (4 * vocabulary)
    return max(rows - rows % _ROWS, _ROWS)


def add_scored_forward(
    model: PreTrainedModel, settings: LogitSettings, *, fused: bool | None = None, compiled: bool = False
) -> None:
    """Teaches a causal model ``model(..., scored=Scored)``, which returns (log-probabilities, entropies) of (S,) each.

    With ``beside`` it returns what that makes of the head's states too; with ``entropy="alone"`` nothing else. With
    ``balance`` the loss of :func:`perl.packing.router.balancing_loss` comes last. Through
    the model's own forward, so that the wrappers around it (PEFT, DDP, autocast) act as on any other call.

    Args:
        model: Without wrappers.
        settings: Of its logits.
        fused: As in :func:`head_log_probs`.
        compiled: As in :func:`head_log_probs`.
    """
    held = model.forward
    # By its function: a copy of the model has its own weights then.
    bound = getattr(held, "__self__", None) is model
    original = held.__func__ if bound else lambda _, *args, **kwargs: held(*args, **kwargs)

    @functools.wraps(type(model).forward)  # generation reads the signature
    def forward(
        self: PreTrainedModel,
        *args: Any,  # noqa: ANN401
        scored: ScoredTokens | None = None,
        entropy: EntropyKind | Literal["alone"] = "value",
        beside: Beside | None = None,
        balance: bool = False,
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        if scored is None:
            return original(self, *args, **kwargs)
        for name in ("labels", "use_cache"):
            kwargs.pop(name, None)
        inner = self.base_model if self.base_model is not self else self.model  # Llama 4 names none
        routed = {"output_router_logits": True} if balance else {}
        outputs = inner(*args, use_cache=False, **routed, **kwargs)
        hidden = outputs.last_hidden_state
        hidden = hidden[:, hidden.size(1) - scored.width :].flatten(0, 1)  # virtual tokens stand in front
        head = self.get_output_embeddings()
        # PEFT's wrapper of single tokens has no bias. FSDP2 has parts.
        parts: Any = (head.weight, getattr(head, "bias", None))
        weight_VD, bias_V = (p.full_tensor() if isinstance(p, DTensor) else p for p in parts)
        hidden_SD = hidden[scored.predictors.to(hidden.device)].to(weight_VD.device)
        targets_S = scored.targets.to(weight_VD.device)
        with maybe_gather_lm_head_ctx(weight_VD, bias_V):  # ZeRO-3: the head's own forward, which would, does not run
            others = () if beside is None else beside(HeadStates(hidden_SD, weight_VD, bias_V, settings))
            if entropy == "alone":
                return others
            log_probs = head_log_probs(
                hidden_SD, weight_VD, bias_V, targets_S, settings, entropy=entropy, fused=fused, compiled=compiled
            )
        if not balance:
            return (*log_probs, *others)
        mask, layout = kwargs.get("attention_mask"), kwargs.get("packed_layout")
        return (*log_probs, *others, balancing_loss(self, outputs.router_logits, mask, layout))

    model.forward = types.MethodType(forward, model)


def head_log_probs(
    hidden_SD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_S: torch.Tensor,
    settings: LogitSettings,
    *,
    entropy: EntropyKind = "value",
    fused: bool | None = None,
    compiled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities of the targets and entropies of the distributions they were drawn from.

    Args:
        hidden_SD: (S, D) float.
        weight_VD: (V, D) float; of the head.
        bias_V: (V,) float or None.
        targets_S: (S,) int64.
        settings: Temperature and the like.
        entropy: ``none``; ``value``: without a gradient; ``gradient``: with one.
        fused: Whether the derivative is taken in the forward pass, which needs a head and an entropy without
            gradient; else TRL's kernel runs. None: on a CPU.
        compiled: Whether torch compiles what a fused pass does with a tile of logits.

    Returns:
        (S,) log-probabilities and (S,) entropies in nats or None; float32, or from a fused pass float64 for float64
        hidden states.
    """
    trains = weight_VD.requires_grad or (bias_V is not None and bias_V.requires_grad)
    if settings.float32 and hidden_SD.dtype != torch.float64:
        hidden_SD = hidden_SD.float()  # the head's weight follows: in TRL's kernel by tiles, in a fused pass as a whole
    with torch.autocast(
        hidden_SD.device.type, enabled=torch.is_autocast_enabled(hidden_SD.device.type) and not settings.float32
    ):
        wanted = hidden_SD.device.type == "cpu" if fused is None else fused
        if wanted and not (trains and torch.is_grad_enabled()) and entropy != "gradient":
            result: tuple[torch.Tensor, torch.Tensor | None]
            result = _Head.apply(  # type: ignore[no-untyped-call]
                hidden_SD, weight_VD, bias_V, targets_S, settings, entropy == "value", compiled
            )
            return result
        log_probs_S, entropies_S, *_ = ChunkedLogProbFunction.apply(
            hidden_SD,
            weight_VD,
            bias_V,
            targets_S,
            settings.temperature,
            _KERNEL_WIDTH,
            settings.softcap,
            settings.scale,
            () if entropy == "none" else ("entropy",),
        )
    return log_probs_S, entropies_S.detach() if entropy == "value" else entropies_S


def head_bytes(
    sizes: tuple[int, int], stored: torch.dtype, compute: torch.dtype, memory: int | None, *, fused: bool
) -> int:
    """Bytes that the head holds on an accelerator while it computes, besides what it keeps for the backward pass.

    Args:
        sizes: V and D.
        stored: Type of the head's weights.
        compute: In which it multiplies.
        memory: Of the accelerator, all bytes; None: on a CPU.
        fused: As in :func:`head_log_probs`; else TRL's kernel runs, which holds one tile of logits.
    """
    vocabulary, width = sizes
    if not fused:
        return TOKEN_CHUNK_SIZE * min(vocabulary, _KERNEL_WIDTH) * compute.itemsize
    exact = torch.promote_types(compute, torch.float32)
    # Logits, exponentials and the product of both for the entropy; the head's products where they are of another type.
    of_tile = 3 * exact.itemsize + (0 if compute == exact else compute.itemsize)
    converted = 0 if stored == compute else vocabulary * width * compute.itemsize
    return tile_rows(vocabulary, memory) * vocabulary * of_tile + converted


class _Head(torch.autograd.Function):
    """Log-probability, entropy and, if needed, the derivative of the first by the hidden state; tile by tile."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_S: torch.Tensor,
        settings: LogitSettings,
        with_entropy: bool,
        compiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        kind = hidden_SD.device.type
        compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_SD.dtype
        exact = torch.promote_types(compute, torch.float32)
        rows = tile_rows(weight_VD.size(0), memory_of(hidden_SD.device))
        weight_VD = weight_VD.to(compute)
        bias_V = None if bias_V is None else bias_V.to(compute)
        slopes_SD = torch.empty_like(hidden_SD, dtype=exact) if ctx.needs_input_grad[0] else None
        log_probs_S = hidden_SD.new_empty(hidden_SD.size(0), dtype=exact)
        entropies_S = torch.empty_like(log_probs_S) if with_entropy else None
        of_tile: Callable[..., Any] = compiled_function(_of_tile) if compiled else _of_tile
        with torch.autocast(kind, enabled=False):  # it would round the exponentials of an entropy
            for start in range(0, hidden_SD.size(0), rows):
                tile = slice(start, start + rows)
                logits_TV = linear(hidden_SD[tile].to(compute), weight_VD)
                log_probs_S[tile], entropies_T, slope_TV = of_tile(
                    logits_TV, bias_V, targets_S[tile], settings, with_entropy, slopes_SD is not None
                )
                if entropies_S is not None:
                    entropies_S[tile] = entropies_T
                if slopes_SD is not None:
                    slopes_SD[tile] = product(slope_TV, weight_VD)
                del logits_TV, slope_TV  # before the next ones are made
        if slopes_SD is not None:
            # dz / d(W h) = scale / temperature, alike for all logits
            ctx.save_for_backward(slopes_SD.mul_(settings.scale / settings.temperature))
            ctx.hidden_dtype = hidden_SD.dtype
        if entropies_S is not None:
            ctx.mark_non_differentiable(entropies_S)
        return log_probs_S, entropies_S

    @staticmethod
    def backward(ctx: Any, grad_S: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        (slopes_SD,) = ctx.saved_tensors
        # dL/dh = dL/dlog p * dlog p/dh
        return (slopes_SD * grad_S.unsqueeze(-1)).to(ctx.hidden_dtype), None, None, None, None, None, None


def _of_tile(
    logits_TV: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_T: torch.Tensor,
    settings: LogitSettings,
    with_entropy: bool,
    with_slope: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """From the head's products: (T,) log-probabilities, (T,) entropies, (T, V) derivative of the first by the products.

    The derivative is in the products' type and without the factors that are alike for all, scale and temperature.
    """
    compute, exact = logits_TV.dtype, torch.promote_types(logits_TV.dtype, torch.float32)
    if bias_V is not None:
        logits_TV += bias_V
    logits_TV, cap_slope_TV = transformed_logits(logits_TV.to(exact), settings)
    logits_TV -= logits_TV.amax(dim=-1, keepdim=True)  # softmax stays the same, and no exponential overflows
    wanted_T1 = targets_T.unsqueeze(-1)
    target_logits_T = logits_TV.gather(-1, wanted_T1).squeeze(-1)
    exp_TV = logits_TV.exp()
    total_T = exp_TV.sum(dim=-1)
    log_probs_T, entropies_T, slope_TV = target_logits_T - total_T.log(), None, None
    if with_entropy:  # H = -sum_v p_v log p_v = log Z - sum_v exp(z_v) z_v / Z, with Z = sum_v exp z_v
        entropies_T = total_T.log() - torch.linalg.vecdot(exp_TV, logits_TV) / total_T
    if with_slope:
        # d log p(target) / d logit = [is target] - p, then back through the cap.
        slope_TV = exp_TV.div_(-total_T.unsqueeze(-1))
        slope_TV.scatter_add_(-1, wanted_T1, torch.ones_like(wanted_T1, dtype=exact))
        if cap_slope_TV is not None:
            slope_TV *= cap_slope_TV
        slope_TV = slope_TV.to(compute)
    return log_probs_T, entropies_T, slope_TV


@functools.cache
def memory_of(device: torch.device) -> int | None:
    """All bytes of an accelerator; None for a CPU."""
    if device.type == "cpu":
        return None
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def transformed_logits(logits_TV: torch.Tensor, settings: LogitSettings) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scaled, capped and tempered logits, in place; the cap's derivative, if there is a cap."""
    if settings.scale != 1.0:
        logits_TV *= settings.scale
    slope_TV = None
    if settings.softcap is not None:
        bounded_TV = torch.tanh(logits_TV / settings.softcap)
        logits_TV = bounded_TV * settings.softcap
        slope_TV = 1 - bounded_TV.square()  # d c tanh(z / c) / dz = 1 - tanh(z / c)^2
    if not math.isclose(settings.temperature, 1.0):
        logits_TV /= settings.temperature
    return logits_TV, slope_TV
