"""The divergence of a student from its teacher at the scored tokens, through the head by tiles of them.

logits of both -> (S,) divergences, their slopes; hidden states of both, head -> (S,) divergences with a gradient

Neither's logits are kept: of a tile at a time there are the logits of both and two more tensors of their size, however
many tokens are scored. Like a log-probability (``head.py``), a divergence depends on one hidden state only, so the
forward pass leaves one vector a token for the backward pass. Shapes: S scored tokens, T of a tile of them, D of a
hidden state, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch

from perl.packing.head import HeadStates, LogitSettings, memory_of, tile_rows, transformed_logits
from perl.run.products import linear, product


@dataclass(frozen=True)
class Divergence:
    """A student beside its teacher, token by token.

    Attributes:
        per_token_S: (S,) KL(student || teacher) in nats, 0 or more.
        slope_SV: (S, V) its derivative by the student's logits; None where it was not wanted.
        agrees_S: (S,) bool, whether both find the same token the likeliest.
    """

    per_token_S: torch.Tensor
    slope_SV: torch.Tensor | None
    agrees_S: torch.Tensor


@torch.no_grad()
def reverse_kl(
    student_logits_SV: torch.Tensor, teacher_logits_SV: torch.Tensor, *, top_k: int = 0, with_slope: bool = True
) -> Divergence:
    """KL(student || teacher) of each token's distribution.

    With p of the student, q of the teacher: KL = sum_v p_v (log p_v - log q_v), over the vocabulary. With ``top_k`` K
    the events are the K likeliest tokens of the student, and any other token: one event that has the rest of p and of
    q. That is never more than the whole divergence, never negative, and 0 only where both agree on all K. Either way
    dKL / dz_v = p_v (r_v - KL), r_v the log-ratio of the event that v belongs to.

    Args:
        student_logits_SV: (S, V) float32 or float64, tempered as they are sampled from; overwritten.
        teacher_logits_SV: (S, V) likewise, at the same temperature; overwritten.
        top_k: K; 0, or V and more: the whole vocabulary.
        with_slope: Whether the derivative is wanted.

    Returns:
        The divergence; no gradient is recorded.

    Source: Agarwal et al. 2023 (GKD), arXiv:2306.13649, section 3, reverse KL, as loss of a token (not of what follows
        it: nothing goes back through the sampling); the rest as one event: TRL 1.16's ``add_tail_bucket``, taken there
        from 1 - sum of the K, here from the others themselves.
    """
    agrees_S = student_logits_SV.argmax(dim=-1) == teacher_logits_SV.argmax(dim=-1)
    # log p = z - log sum_v exp z_v
    log_p_SV = student_logits_SV.sub_(student_logits_SV.logsumexp(dim=-1, keepdim=True))
    log_q_SV = teacher_logits_SV.sub_(teacher_logits_SV.logsumexp(dim=-1, keepdim=True))
    if 0 < top_k < log_p_SV.size(-1):
        ratio_SV = _ratios_of_events(log_p_SV, log_q_SV, top_k)
    else:
        ratio_SV = torch.sub(log_p_SV, log_q_SV, out=log_q_SV)
    p_SV = log_p_SV.exp_()
    # sum_v p_v r_v: the tokens of an event have its log-ratio, and together its probability
    kl_S = torch.linalg.vecdot(p_SV, ratio_SV)
    slope_SV = ratio_SV.sub_(kl_S.unsqueeze(-1)).mul_(p_SV) if with_slope else None
    return Divergence(kl_S, slope_SV, agrees_S)


def _ratios_of_events(log_p_SV: torch.Tensor, log_q_SV: torch.Tensor, top_k: int) -> torch.Tensor:
    """(S, V) log-ratio of the event that each token belongs to; takes ``log_q_SV`` for the result."""
    top_SK = log_p_SV.topk(top_k, dim=-1).indices
    ratio_SK = log_p_SV.gather(-1, top_SK) - log_q_SV.gather(-1, top_SK)
    log_rest_p_S, log_rest_q_S = (
        values_SV.scatter(-1, top_SK, -torch.inf).logsumexp(dim=-1, keepdim=True) for values_SV in (log_p_SV, log_q_SV)
    )
    rest_S1 = log_rest_p_S - log_rest_q_S
    ratio_SV = log_q_SV.copy_(rest_S1.expand_as(log_q_SV))
    return ratio_SV.scatter_(-1, top_SK, ratio_SK)


def head_divergence(
    student: HeadStates, teacher_SD: torch.Tensor, *, top_k: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(student || teacher) at each scored token; see :func:`perl.packing.divergence.reverse_kl`.

    Args:
        student: Its hidden states with their gradient; the head is also the teacher's, and is not trained.
        teacher_SD: (S, D) the teacher's last hidden states for the same tokens.
        top_k: As there.

    Returns:
        (S,) nats, float32 or float64 for float64 states, with the gradient of the student's states; (S,) 1 where both
        find the same token the likeliest, else 0.

    Raises:
        ValueError: The head is trained, which would have a gradient too.
    """
    trained = [p for p in (student.weight_VD, student.bias_V) if p is not None and p.requires_grad]
    if trained and torch.is_grad_enabled():
        raise ValueError("the head is trained, so its gradient would be missing")
    found: tuple[torch.Tensor, torch.Tensor] = _HeadDivergence.apply(  # type: ignore[no-untyped-call]
        student.hidden_SD, teacher_SD, student.weight_VD, student.bias_V, student.settings, top_k
    )
    return found


def divergence_bytes(sizes: tuple[int, int], stored: torch.dtype, compute: torch.dtype, memory: int | None) -> int:
    """Bytes that a divergence holds while it is computed, besides the vector of each token; see ``head_bytes``.

    Args:
        sizes: V and D.
        stored: Type of the head's weights.
        compute: In which it multiplies.
        memory: Of the accelerator, all bytes; None: on a CPU.
    """
    vocabulary, width = sizes
    exact = torch.promote_types(compute, torch.float32)
    converted = 0 if stored == compute else vocabulary * width * compute.itemsize
    # The logits of both or what becomes of them, and one more.
    return _rows(vocabulary, memory) * vocabulary * 3 * exact.itemsize + converted


def _rows(vocabulary: int, memory: int | None) -> int:
    """Of a tile: twice as many logits as of a log-probability, so half as many rows of them."""
    return max(tile_rows(vocabulary, memory) // 2, 1)


class _HeadDivergence(torch.autograd.Function):
    """The divergence and, if needed, its derivative by the student's hidden states; tile by tile."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden_SD: torch.Tensor,
        teacher_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        settings: LogitSettings,
        top_k: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = hidden_SD.device.type
        compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_SD.dtype
        if settings.float32 and compute != torch.float64:
            compute = torch.float32
        exact = torch.promote_types(compute, torch.float32)
        rows = _rows(weight_VD.size(0), memory_of(hidden_SD.device))
        weight_VD = weight_VD.to(compute)
        bias_V = None if bias_V is None else bias_V.to(compute)
        slopes_SD = torch.empty_like(hidden_SD, dtype=exact) if ctx.needs_input_grad[0] else None
        kl_S = hidden_SD.new_empty(hidden_SD.size(0), dtype=exact)
        agrees_S = torch.empty_like(kl_S)
        with torch.autocast(kind, enabled=False):  # it would round what is computed exactly
            for start in range(0, hidden_SD.size(0), rows):
                tile = slice(start, start + rows)
                student_TV, cap_slope_TV = _logits(hidden_SD[tile].to(compute), weight_VD, bias_V, settings)
                teacher_TV, _ = _logits(teacher_SD[tile].to(compute), weight_VD, bias_V, settings)
                found = reverse_kl(student_TV, teacher_TV, top_k=top_k, with_slope=slopes_SD is not None)
                kl_S[tile], agrees_S[tile] = found.per_token_S, found.agrees_S.to(exact)
                if slopes_SD is not None and found.slope_SV is not None:
                    slope_TV = found.slope_SV if cap_slope_TV is None else found.slope_SV * cap_slope_TV
                    slopes_SD[tile] = product(slope_TV.to(compute), weight_VD)
                    del slope_TV
                del student_TV, teacher_TV, cap_slope_TV, found  # before the next ones are made
        if slopes_SD is not None:
            # dz / d(W h) = scale / temperature, alike for all logits
            ctx.save_for_backward(slopes_SD.mul_(settings.scale / settings.temperature))
            ctx.hidden_dtype = hidden_SD.dtype
        ctx.mark_non_differentiable(agrees_S)
        return kl_S, agrees_S

    @staticmethod
    def backward(ctx: Any, grad_S: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        (slopes_SD,) = ctx.saved_tensors
        # dL/dh = dL/dKL * dKL/dh
        return (slopes_SD * grad_S.unsqueeze(-1)).to(ctx.hidden_dtype), None, None, None, None, None


def _logits(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, settings: LogitSettings
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(T, V) logits at the temperature, of the exact type, and the derivative of a cap on them, if there is one."""
    logits_TV = linear(hidden_TD, weight_VD)
    if bias_V is not None:
        logits_TV += bias_V
    return transformed_logits(logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)), settings)
