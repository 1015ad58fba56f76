"""Products on a CPU at the speed that its processor has.

torch multiplies float32 by MKL, which on processors of other makers than Intel leaves AVX-512 unused. oneDNN, by which
torch multiplies in half precision, uses it on all: 235 GFLOP/s against 107 on a core of an AMD Zen 5, with sums as
exact, in another order. And it reads a matrix faster that was brought into its own order once, which pays where few
rows go through the same matrices many times: while completions are written.
"""

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from perl.run.launched import own_share

# Multiplications below which a call of oneDNN, 11 microseconds, costs more than it gains; measured on that processor.
# Half of them where the matrix is in its order.
_LEAST = 1 << 20
_packed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""Matrices that are in oneDNN's order now, and those in it, by the identity of the first."""


_paused: list[None] = []
"""Holds an entry while all products are torch's."""


@contextlib.contextmanager
def by_torch() -> Iterator[None]:
    """All products by torch, as whoever loads what was saved computes: two libraries round otherwise.

    On a pretrained model of 135M log-probabilities differ by up to 2e-4 nats.
    """
    _paused.append(None)
    try:
        yield
    finally:
        _paused.pop()


def linear(x: torch.Tensor, W: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """W x + b, as ``torch.nn.functional.linear``; without a gradient.

    Args:
        x: (..., in).
        W: (out, in).
        bias: (out,) or None.
    """
    if torch.compiler.is_compiling():
        return functional.linear(x, W, bias)
    found = None if _paused else _packed.get(id(W))
    if found is not None and x.dtype is W.dtype and 2 * x.numel() * W.size(0) >= _LEAST:
        W = found[1]
    elif not _pays(x, W):
        return functional.linear(x, W, bias)
    bias = None if bias is None else bias.contiguous()  # its strides are not looked at
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x.reshape(-1, x.size(-1)), W, bias, "none", [], "")
    if x.dim() == 2:
        return y
    # As torch's own: no view to autograd, so that a layer's result can be added to in place, as AdaLoRA's is.
    shaped: torch.Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.size(-1)])
    return shaped


def product(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """(M, N) a b; without a gradient."""
    return linear(a_MK, b_KN.t())


class QuickLinear(nn.Linear):
    """``nn.Linear`` by :func:`linear`."""

    stands_for = nn.Linear  # to whoever compares a model's layers with those of a clean one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        W, bias = self._parameters.get("weight"), self._parameters.get("bias")  # absent: somebody computes the weight
        if type(x) is torch.Tensor and type(W) is nn.Parameter:
            if not torch.is_grad_enabled():
                return linear(x, W, bias)
            if _pays(x, W):
                return _Linear.apply(x, W, bias)  # type: ignore[no-untyped-call]
        return super().forward(x)


class _Linear(torch.autograd.Function):
    """y = W x + b, differentiable as often as one likes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, W: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:  # noqa: ANN401
        x_needed, W_needed, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if W_needed else None, W if x_needed else None)
        return linear(x, W, bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        x, W = ctx.saved_tensors
        x_needed, W_needed, bias_needed = ctx.needs_input_grad
        dy_NO, dx, dW = dy.reshape(-1, dy.size(-1)), None, None
        if x_needed:
            dx = _Linear.apply(dy, W.t(), None)  # type: ignore[no-untyped-call]
        if W_needed:
            dW = _Linear.apply(dy_NO.t(), x.reshape(-1, x.size(-1)).t(), None)  # type: ignore[no-untyped-call]
        return dx, dW, dy_NO.sum(0) if bias_needed else None


@contextlib.contextmanager
def quickened(model: nn.Module) -> Iterator[None]:
    """The model as :func:`quicken` makes it, for a while: then whoever looks for ``nn.Linear`` finds it again."""
    layers = quicken(model)
    try:
        yield
    finally:
        for layer in layers:
            if type(layer) is QuickLinear:
                layer.__class__ = QuickLinear.stands_for  # type: ignore[assignment]


def quicken(model: nn.Module) -> list[nn.Module]:
    """Has the linear layers of a model multiply by oneDNN where that is quicker; once more changes nothing.

    Args:
        model: Any; layers on the CPU that are exactly ``nn.Linear`` become :class:`QuickLinear`, which is one too.

    Returns:
        Those layers.
    """
    layers: list[nn.Module] = []
    for layer in model.modules() if _is_quicker() else ():
        if type(layer) is nn.Linear and "forward" not in vars(layer) and layer.weight.is_cpu:
            layer.__class__ = QuickLinear
            layers.append(layer)
    return layers


@contextlib.contextmanager
def packed_weights(model: nn.Module, rows: int) -> Iterator[None]:
    """Keeps the frozen matrices of linear layers in oneDNN's order too, for passes without a gradient.

    That takes as much memory as they do. Nothing is kept where they are more than a quarter of this process's share of
    the machine's memory, all and not what is free: last bits of a product depend on it, and a run that resumes must
    have the same.

    Args:
        model: Went through :func:`quicken`; its matrices must not change meanwhile.
        rows: That will go through a layer at once.
    """
    layers = [layer for layer in model.modules() if type(layer) is QuickLinear]
    wanted = [W for W in {id(layer.weight): layer.weight for layer in layers}.values() if _can_be_packed(W, rows)]
    here = own_share(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if 4 * sum(W.numel() * W.element_size() for W in wanted) > here:
        wanted = []
    _packed.update({id(W): (W, torch.ops.mkldnn._reorder_linear_weight(W.detach(), rows)) for W in wanted})
    try:
        yield
    finally:
        for W in wanted:
            _packed.pop(id(W), None)


def _can_be_packed(W: torch.Tensor, rows: int) -> bool:
    ordinary = type(W) is nn.Parameter and W.is_cpu and W.dtype in (torch.float32, torch.bfloat16)
    return ordinary and not W.requires_grad and 2 * rows * W.numel() >= _LEAST


def _pays(x: torch.Tensor, W: torch.Tensor) -> bool:
    return (
        x.dtype is W.dtype is torch.float32
        and x.is_cpu
        and x.dim() > 1
        and x.numel() * W.size(0) >= _LEAST
        and not _paused
        and _is_quicker()
    )


@cache
def _is_quicker() -> bool:
    """Whether the processor has AVX-512, and torch has the function of oneDNN that takes ordinary tensors."""
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return known and torch.backends.cpu.get_cpu_capability() == "AVX512"
