"""Tensors of which each process holds a part (FSDP2), read whole.

sharded tensor or layer -> the same, whole, for a while

Reading one, like every forward pass of a model with such tensors, is collective: all processes must do it at once.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def is_sharded(model: nn.Module) -> bool:
    """Whether each process holds a part of the model, so that a forward pass is collective."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def any_goes_on(this_one: bool, device: torch.device) -> bool:
    """Whether any process has a forward pass to make; all ask at once, before each pass and after their last.

    Args:
        this_one: Whether this process has.
        device: Of the model.
    """
    going = torch.tensor(int(this_one), device=device)
    torch.distributed.all_reduce(going, torch.distributed.ReduceOp.MAX)
    return bool(going)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, gathered where it is in shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What ``state_dict`` has of a model but its shards, by the same names, with nothing gathered.

    An adapter on a base in shards, and what else was not divided. Buffers that a module does not save are not in it.
    """
    state = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        saved = {name: b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *saved.items()):
            if tensor is not None and not isinstance(tensor, DTensor):
                state[f"{prefix}.{name}" if prefix else name] = tensor
    return state


@contextlib.contextmanager
def gathered(layer: nn.Module) -> Iterator[None]:
    """A layer with its parameters whole; afterwards it has its shards again. Nothing may be written to them."""
    parts: list[tuple[nn.Module, str, Any]] = [
        (m, name, p) for m in layer.modules() for name, p in m._parameters.items() if isinstance(p, DTensor)
    ]
    found = {id(p): nn.Parameter(p.full_tensor(), requires_grad=False) for _, _, p in parts}
    try:
        for module, name, parameter in parts:
            module._parameters[name] = found[id(parameter)]
        yield
    finally:
        for module, name, parameter in parts:
            module._parameters[name] = parameter
