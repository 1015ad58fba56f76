"""What packed attention keeps on a GPU, kept on a CPU: a stand-in for the kernel, and the ways that heads go.

Attention -> packed attention takes that way
"""

import torch

import perl.attention
from perl.memory_estimate import Attention


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
    monkeypatch.setattr(perl.attention, "needs_every_head", lambda _: not attention.grouped)
    if attention.kernel:
        monkeypatch.setattr(perl.attention, "KERNEL_CALL", perl.attention.KernelCall(grouped=attention.grouped))
        monkeypatch.setattr(perl.attention, "why_by_segment", lambda *_: None)
        monkeypatch.setattr(perl.attention, "varlen_attn", lambda q, k, v, *_, **__: FlashAttention.apply(q, k, v))


EVERY_WAY = [Attention(kernel, grouped, True) for kernel in (True, False) for grouped in (True, False)]
