"""What the processes of one run do together: average gradients, wait for each other, part.

model with a gradient on each process -> the same model with the mean gradient on all

Knows nothing of losses, adapters or trainers.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Numbers that are exchanged at once: enough that the exchange runs at full speed, few beside a model's gradients.
_AT_ONCE = 2**24


def as_copies(model: nn.Module) -> DistributedDataParallel | None:
    """DDP's wrapper of a model of which every process has a copy, compiled or not; None: it is wrapped otherwise."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


@torch.no_grad()
def average_gradients(model: DistributedDataParallel) -> None:
    """Gives every process the mean of all processes' gradients, as DDP does at the end of a backward pass.

    For backward passes that ran under ``no_sync``: whether all of them succeeded everywhere is known only afterwards. A
    parameter without a gradient on some process counts as zero there; one without a gradient on all stays without.

    Args:
        model: Called on every process of its group.
    """
    group, world = model.process_group, torch.distributed.get_world_size(model.process_group)
    parameters = [p for name, p in model.module.named_parameters() if name not in model.parameters_to_ignore]
    parameters = [p for p in parameters if p.requires_grad]
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
