"""What processes exchange in an optimizer step: the mean of their gradients, once all passes are through.

model with a gradient on each process -> the same model with the mean gradient on all
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perl.run.shards import is_sharded

# Numbers that are exchanged at once: enough that the exchange runs at full speed, few beside a model's gradients.
_AT_ONCE = 2**24


@dataclass(frozen=True)
class Exchange:
    """Whose gradients the processes average, and in which group; None: of all processes."""

    parameters: list[nn.Parameter]
    group: torch.distributed.ProcessGroup | None


def exchange_of(model: nn.Module) -> Exchange | None:
    """What is left to the caller to exchange after passes that did not; None: nothing, or something else does it.

    Args:
        model: As it is trained, compiled or not: wrapped by DDP, or with its base in shards and its adapter whole.
    """
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, DistributedDataParallel):
        named = [p for name, p in inner.module.named_parameters() if name not in inner.parameters_to_ignore]
        return Exchange([p for p in named if p.requires_grad], inner.process_group)
    if is_sharded(inner):
        return Exchange([p for p in inner.parameters() if p.requires_grad], None)
    return None


@torch.no_grad()
def average_gradients(exchange: Exchange) -> None:
    """Gives every process the mean of all processes' gradients, as DDP does at the end of a backward pass.

    For backward passes that did not: whether all of them succeeded everywhere is known only afterwards. A parameter
    without a gradient on some process counts as zero there; one without a gradient on all stays without.

    Args:
        exchange: Every process of its group must ask.
    """
    parameters, group = exchange.parameters, exchange.group
    world = torch.distributed.get_world_size(group)
    if not parameters:
        return
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    torch.distributed.all_reduce(present, torch.distributed.ReduceOp.MAX, group=group)
    for same in _buckets([p for p, anywhere in zip(parameters, present.tolist(), strict=True) if anywhere]):
        for parameter in same:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in same if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat /= world  # before the sum, as DDP: half precision must not overflow
        torch.distributed.all_reduce(flat, group=group)
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in order, those of a bucket of one type on one device."""
    buckets: list[list[nn.Parameter]] = []
    filled, kind = 0, None
    for parameter in parameters:
        own = (parameter.dtype, parameter.device)
        if not buckets or own != kind or filled + parameter.numel() > _AT_ONCE:
            buckets.append([])
            filled, kind = 0, own
        buckets[-1].append(parameter)
        filled += parameter.numel()
    return buckets
