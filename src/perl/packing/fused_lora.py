"""Plain LoRA layers as one autograd function: W x + s B (A x) with fewer casts, copies and temporaries than PEFT's.

policy -> the same policy, whose plain LoRA layers run fused; x, W, bias, A, B, s -> y

In float32 and float64 the output is PEFT's bit for bit, at every rank and scale, where the same library multiplies
(:mod:`perl.run.products` may take a quicker one): the same products are taken and added in place, in one go where
the library gives the same bits then. In half precision they always are, with one rounding where PEFT has three.
Backward keeps A x and x as it came, which projections of the same input share; where dtypes differ PEFT keeps a cast
copy of x for each of them and, under autocast, of W, A and B. Layers of other methods and of LoRA's variants keep
PEFT's forward pass.
"""

import contextlib
import functools
import math
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from perl.run.products import QuickLinear, linear, product

_HALF = (torch.float16, torch.bfloat16)


def fuse_lora(policy: nn.Module) -> int:
    """Gives every eligible LoRA layer the fused forward pass; once more changes nothing.

    Eligible is a layer that is exactly PEFT's LoRA ``Linear`` around exactly an ``nn.Linear`` with an ordinary weight
    (not quantised), whose ``forward`` nobody has replaced, with an adapter that is neither a variant
    (DoRA, an anchored start, ...) nor has a bias. Parameters, their names and what PEFT does with them (merging,
    switching off, saving) stay as they are. Everything that may change later is looked at in each call
    (:class:`FusedLinear`).

    Args:
        policy: Any module; its LoRA layers are changed in place.

    Returns:
        How many layers are fused now, those that were fused before included.
    """
    layers = [layer for layer in policy.modules() if _is_eligible(layer)]
    for layer in layers:
        # Another class and not another ``forward`` on the instance: a function in the instance's dictionary is bound to
        # this instance, so a copy would have to carry it along and a pickle could not; and whoever wraps ``forward``
        # later (accelerate) would find it taken. A subclass is still PEFT's Linear to ``isinstance``, has the same
        # state, and ``super().forward`` is PEFT's own.
        layer.__class__ = FusedLinear
    return len(layers)


class FusedLinear(Linear):
    """PEFT's LoRA layer, which runs as one function when its only active adapter is plain.

    PEFT's own forward pass runs whenever the adapter is off, merged, a variant, one of several that are active, or in a
    mixed batch; with dropout in training; when somebody has hooked or replaced one of the layers inside, or trains the
    base's weight; and for float64 under autocast, subclasses of tensors (shards) and inputs of one dimension.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401 (PEFT's signature)
        """(..., in) -> (..., out)."""
        fused = None if args or kwargs or type(x) is not torch.Tensor or x.dim() < 2 else _fusable(self)
        if fused is None:
            return super().forward(x, *args, **kwargs)
        W, bias, A, B, scaling = fused
        autocast = _autocast_dtype(x.device.type)
        if autocast is not None and torch.float64 in (x.dtype, W.dtype, A.dtype, B.dtype):
            return super().forward(x)  # autocast leaves float64 as it is
        inputs = (x, W, bias, A, B, scaling, autocast)
        if torch.is_grad_enabled():
            return _LoraLinear.apply(*inputs)  # type: ignore[no-untyped-call]
        return _outputs(*inputs)[0]


class _LoraLinear(torch.autograd.Function):
    """y = W x + b + s B (A x), W frozen.

    Notation of gradients: dy is that of y. dB = s dy^T (A x); g = s dy B; dA = g^T x; dx = dy W + g A.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's context)
        x: torch.Tensor,
        W: torch.Tensor,
        bias: torch.Tensor | None,
        A: torch.Tensor,
        B: torch.Tensor,
        scaling: float,
        autocast: torch.dtype | None,
    ) -> torch.Tensor:
        """Shapes as in :func:`_outputs`; backward keeps x if A trains, and A x if B trains."""
        y, xa = _outputs(x, W, bias, A, B, scaling, autocast)
        _, _, _, A_trains, B_trains, *_ = ctx.needs_input_grad
        ctx.scaling, ctx.autocast, ctx.x_dtype = scaling, autocast, x.dtype
        # x as it came, even where it is wider than what it is cast to: q, k and v, or gate and up, then hold one tensor
        # together instead of a copy each. A x is kept: it is rank / in of x, and to take it again x is read again,
        # which is 1 to 7 % of the layer's time on a CPU and more where products are fast and memory is not.
        ctx.save_for_backward(x if A_trains else None, xa if B_trains else None, W, A, B)
        return y

    @staticmethod
    @once_differentiable  # A x is no output, so a second derivative would miss it
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Gradients of x, bias, A and B, each in its tensor's dtype; None for whom none is needed."""
        x, xa, W, A, B = ctx.saved_tensors
        x_needed, _, bias_trains, A_trains, B_trains, *_ = ctx.needs_input_grad
        dx = dbias = dA = dB = None
        on = _autocast_dtype(dy.device.type) is not None  # a loop may call backward inside it; all casts are explicit
        with torch.autocast(dy.device.type, enabled=False) if on else contextlib.nullcontext():
            dtype = ctx.autocast or A.dtype
            dy_NO = dy.reshape(-1, W.shape[0])
            up_NO = dy_NO.to(dtype)
            if bias_trains:
                dbias = dy_NO.sum(0)
            if B_trains:  # transposed, which MKL takes in two thirds of the time
                dB = product(xa.reshape(-1, A.shape[0]).T, up_NO).T.mul_(ctx.scaling).to(B.dtype)
            if x_needed or A_trains:
                g_NR = product(up_NO, B.to(dtype)).mul_(ctx.scaling)
            if A_trains:
                dA = product(g_NR.T, x.reshape(-1, W.shape[1]).to(dtype)).to(A.dtype)
            if x_needed:
                dx_ND, A_RD = product(dy_NO, W.to(dy.dtype)).to(ctx.x_dtype), A.to(dtype)
                dx_ND = dx_ND.addmm_(g_NR, A_RD) if dx_ND.dtype == dtype else dx_ND.add_(product(g_NR, A_RD))
                dx = dx_ND.view(*dy.shape[:-1], W.shape[1])
        return dx, None, dbias, dA, dB, None, None


def _outputs(
    x: torch.Tensor,
    W: torch.Tensor,
    bias: torch.Tensor | None,
    A: torch.Tensor,
    B: torch.Tensor,
    scaling: float,
    autocast: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's output, and A x.

    Under autocast all is computed in its dtype. Without it each branch is computed in the dtype of its weights and the
    update is rounded to the base's at the end: float32 adapters on a bfloat16 base, as PEFT has them.

    Args:
        x: (..., in), two dimensions or more.
        W: (out, in).
        bias: (out,) or None.
        A: (rank, in).
        B: (out, rank).
        scaling: s.
        autocast: The dtype that autocast computes in, or None without autocast.

    Returns:
        (..., out) in the base's dtype; (..., rank) in the adapter's.
    """
    if autocast is not None:
        x, W, bias = x.to(autocast), W.to(autocast), None if bias is None else bias.to(autocast)
    dtype = autocast or A.dtype
    y = linear(x, W, bias)
    xa = linear(x.to(dtype), A.to(dtype))
    power_of_two = abs(math.frexp(scaling)[0]) == 0.5  # s times a number is then that number but for its exponent
    # addmm_ gives the bits of a product that is added only where the library sums over all of the rank first.
    exact = power_of_two and xa.is_cpu and not torch.compiler.is_compiling()
    in_one_go = dtype in _HALF or (exact and _library_sums_first(xa.dtype, xa.shape[-1]))
    if y.dtype == dtype and in_one_go:
        y.view(-1, y.shape[-1]).addmm_(xa.view(-1, xa.shape[-1]), B.to(dtype).T, alpha=scaling)
        return y, xa
    update = linear(xa, B.to(dtype))
    if not power_of_two:  # rounded before it is added
        update, scaling = update.mul_(scaling), 1.0
    return y.add_(update, alpha=scaling), xa


@functools.cache
def _library_sums_first(dtype: torch.dtype, rank: int) -> bool:
    """Whether ``addmm_`` sums over all of the rank before it adds to y.

    A library is free to add earlier, and then the last bit differs. MKL 2024.2 sums first in float32 up to a rank
    between 192 and 256, and in float64 not from rank 2 on; others are not known, so each is asked once. Not so on a
    GPU, where it may depend on more than the rank.
    """
    xa_NR, B_OR, y_NO = (
        torch.arange(rows * columns, dtype=dtype, device="cpu").mul_(0.7).sin_().view(rows, columns)
        for rows, columns in ((64, rank), (96, rank), (64, 96))
    )
    return torch.equal(y_NO + torch.mm(xa_NR, B_OR.T), y_NO.addmm_(xa_NR, B_OR.T))


def _is_eligible(layer: Linear) -> bool:
    """Whether a module may ever run fused; what can change later is for :func:`_fusable`."""
    if type(layer) not in (Linear, FusedLinear) or "forward" in vars(layer) or layer.fan_in_fan_out:
        return False
    is_linear = _is_ordinary(layer.base_layer, sharded=True)  # a weight in shards is whole, and ordinary, in a pass
    return is_linear and any(_is_plain(layer, adapter) for adapter in layer.lora_A)


def _fusable(layer: Linear) -> tuple[nn.Parameter, nn.Parameter | None, nn.Parameter, nn.Parameter, float] | None:
    """(W, bias, A, B, s) of the one active adapter of a layer if it can run fused in this call, else None.

    Runs for every layer and every token that is generated, so modules and parameters are looked up where torch keeps
    them: as attributes they would cost more than all of these questions.
    """
    active, parts = layer.active_adapters, layer._modules
    if len(active) != 1 or layer.disable_adapters or layer.merged or not layer.cast_input_dtype_enabled:
        return None
    adapter: str = active[0]
    if adapter not in parts["lora_A"]._modules or not _is_plain(layer, adapter):
        return None
    dropout = parts["lora_dropout"]._modules[adapter]
    if dropout.training and not isinstance(dropout, nn.Identity):
        return None
    base, down, up = parts["base_layer"], parts["lora_A"]._modules[adapter], parts["lora_B"]._modules[adapter]
    for module in (base, down, up):
        # Calling a hooked one does more than its forward pass, or another one (accelerate's offloading).
        hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        if any(hooks) or "forward" in vars(module) or not _is_ordinary(module):
            return None
    W: nn.Parameter = base._parameters["weight"]
    scaling = layer.scaling[adapter]
    if W.requires_grad or not isinstance(scaling, float):  # a scale that somebody trains is a tensor
        return None
    return W, base._parameters["bias"], down._parameters["weight"], up._parameters["weight"], scaling


def _is_plain(layer: Linear, adapter: str) -> bool:
    """Whether an adapter is s B A and nothing else."""
    return adapter not in layer.lora_variant and not layer.lora_bias.get(adapter)


def _is_ordinary(module: nn.Module, *, sharded: bool = False) -> bool:
    """Whether a module is ``nn.Linear`` itself, with a weight that is not quantised, computed or, here, in shards."""
    own = module._parameters
    kind = type(own.get("weight"))
    return (
        type(module) in (nn.Linear, QuickLinear)
        and (kind is nn.Parameter or (sharded and isinstance(own.get("weight"), DTensor)))
        and "bias" in own
    )


def _autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype that autocast computes in on a type of device, or None where it is off or unknown (meta)."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None
