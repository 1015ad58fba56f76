"""The divergence of a student from its teacher at the scored tokens, through the head by tiles of them.

hidden states of both, head -> (S,) divergences with a gradient, (S,) whether both prefer the same token

Neither's logits are kept: of a tile at a time there are the logits of both and two more tensors of their size, however
many tokens are scored. Like a log-probability (``head.py``), a divergence depends on one hidden state only, so the
forward pass leaves one vector a token for the backward pass. Shapes: S scored tokens, T of a tile of them, D of a
hidden state, V vocabulary.
"""

from typing import Any

import torch

from perl.algorithms.distillation import reverse_kl
from perl.packing.head import HeadStates, LogitSettings, memory_of, tile_rows, transformed_logits


def head_divergence(
    student: HeadStates, teacher_SD: torch.Tensor, *, top_k: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(student || teacher) at each scored token; see :func:`perl.algorithms.distillation.reverse_kl`.

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
    found: tuple[torch.Tensor, torch.Tensor] = _Divergence.apply(  # type: ignore[no-untyped-call]
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


class _Divergence(torch.autograd.Function):
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
                    slopes_SD[tile] = torch.mm(slope_TV.to(compute), weight_VD)
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
    logits_TV = torch.mm(hidden_TD, weight_VD.t())
    if bias_V is not None:
        logits_TV += bias_V
    return transformed_logits(logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)), settings)
