"""What packed attention keeps on a GPU, kept on a CPU: a stand-in for the kernel, and the ways that heads go.

Attention -> packed attention takes that way
"""

import torch

from perl.packing import attention as packed_attention
from perl.training.memory_estimate import Attention


class FlashAttention(torch.autograd.Function):
    """Keeps what the kernel keeps, queries, keys, values, the result and its normaliser; its numbers mean nothing."""

    @staticmethod
    def forward(ctx, q, k, v):
        attended = torch.ones_like(q)
        ctx.save_for_backward(q, k, v, attended, torch.ones(q.size(0), q.size(1)))
        return attended

    @staticmethod
    def backward(ctx, _):
        return tuple(torch.ones_like(tensor) for tensor in ctx.saved_tensors[:3])


def as_on_a_gpu(monkeypatch, attention: Attention) -> None:
    """Takes the way that packed attention takes there."""
    monkeypatch.setattr(packed_attention, "needs_every_head", lambda _: not attention.grouped)
    if attention.kernel:
        monkeypatch.setattr(packed_attention, "KERNEL_CALL", packed_attention.KernelCall(grouped=attention.grouped))
        monkeypatch.setattr(packed_attention, "why_by_segment", lambda *_: None)
        monkeypatch.setattr(packed_attention, "varlen_attn", lambda q, k, v, *_, **__: FlashAttention.apply(q, k, v))


EVERY_WAY = [Attention(kernel, grouped, True) for kernel in (True, False) for grouped in (True, False)]
