"""Linear layers with weights of torchao's that hold nothing but codes between the passes.

base -> its layers, whose backward pass makes numbers of the codes anew
"""

from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from perl.methods.packed import is_packed, numbers_of

# DeepSpeed's own mark of a weight that each process has for itself.
_OF_DEEPSPEED = "ds_optim_param"


class WeightOnlyLinear(nn.Linear):
    """``nn.Linear`` over codes: the same numbers as torchao's own, without a copy of the weight for the gradient.

    torchao multiplies with the weight as numbers, and autograd keeps these for the gradient of the input: after a
    forward pass every layer's weight would be there in full, and quantising it would have saved nothing.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As ``nn.Linear``: under autocast input, bias and result have its type, whatever the base was loaded in."""
        device, bias = input.device.type, cast("torch.Tensor | None", self.bias)
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            # torchao adds a bias to fp8's product itself, and the wider of the two types would be the result's.
            input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
        if is_packed(self.weight) and torch.is_grad_enabled():
            return _Product.apply(input, self.weight, bias)  # type: ignore[no-untyped-call]
        return functional.linear(input, self.weight, bias)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """As ``nn.Module``, which cannot exchange a parameter of torchao's; codes move, and have no other type."""
        weight = self._parameters["weight"]
        if weight is None or not is_packed(weight):
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = fn(weight.detach())
        kept = weight if moved.device == weight.device else nn.Parameter(moved, requires_grad=False)
        if hasattr(weight, _OF_DEEPSPEED):
            setattr(kept, _OF_DEEPSPEED, getattr(weight, _OF_DEEPSPEED))
        self._parameters["weight"] = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._parameters["weight"] = kept
        return self


class _Product(torch.autograd.Function):
    """x W^T + b, W frozen and in codes."""

    @staticmethod
    def forward(ctx: Any, input_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:  # noqa: ANN401
        ctx.weight_OI = weight_OI  # it belongs to the base, and is never written
        result_NO = functional.linear(input_NI, weight_OI, bias_O)
        # A view, which torchao's int8 gives, could not be added to in place, as some adapters do.
        return result_NO.clone() if result_NO._is_view() else result_NO

    @staticmethod
    def backward(ctx: Any, slope_NO: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:  # noqa: ANN401
        of_input = slope_NO @ numbers_of(ctx.weight_OI, slope_NO.dtype) if ctx.needs_input_grad[0] else None
        of_bias = slope_NO.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return of_input, None, of_bias


def leave_in_processes(model: nn.Module) -> None:
    """Keeps DDP and DeepSpeed from sending a base's codes to the other processes, which have loaded the same.

    Both send every parameter when they begin, trained or not, by operations that torchao's tensors do not have.

    Args:
        model: As it will be wrapped.
    """
    packed = {name: p for name, p in model.named_parameters() if p.is_floating_point() and is_packed(p)}
    if packed:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(packed))
    for parameter in packed.values():
        setattr(parameter, _OF_DEEPSPEED, True)


def keep_codes_only(model: nn.Module) -> None:
    """Makes a base's layers over weights of torchao's :class:`WeightOnlyLinear`; others stay as they are."""
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.weight.is_floating_point() and is_packed(layer.weight):
            layer.__class__ = WeightOnlyLinear
