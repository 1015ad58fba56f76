"""The mean of the processes' gradients, once the passes of an optimizer step are through.

parameters with a gradient on each process -> the mean gradient on all

Nothing exchanges gradients inside a backward pass: only afterwards is it known that memory sufficed on all processes,
so that a step can be run again. So the policy needs no wrapper of torch's, which would hold each gradient twice.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from perl.trainer.live import LiveTrainer

# Numbers that are exchanged at once: enough that the exchange runs at full speed, few beside a model's gradients.
_AT_ONCE = 2**24


@contextlib.contextmanager
def unwrapped(trainer: Trainer, *, ours: bool) -> Iterator[None]:
    """While transformers prepares a training of several processes: DDP wraps no model whose step is ours.

    transformers wraps none that it takes for divided as it was loaded; it sends what is trained from rank 0 all the
    same. Its hooks on gradients, which stay, are what :func:`unexchanged` keeps out.

    Args:
        trainer: New.
        ours: Whether gradients are averaged here; else DDP does it, as TRL has it.
    """
    found: Any = trainer
    theirs = found.is_distributed_loading_by_transformers
    several = ours and found.place_model_on_device and found.accelerator.num_processes > 1
    found.is_distributed_loading_by_transformers = theirs or several
    try:
        yield
    finally:
        found.is_distributed_loading_by_transformers = theirs


@contextlib.contextmanager
def unexchanged(live: LiveTrainer) -> Iterator[None]:
    """For a backward pass after which gradients are added up on this process only: transformers' hooks stay out."""
    state = live.accelerator.gradient_state
    state._set_sync_gradients(False)
    try:
        yield
    finally:
        state._set_sync_gradients(True)


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Gives every process the mean of all processes' gradients; all must ask, and one alone has it.

    A parameter without a gradient on some process counts as zero there; one without a gradient on all stays without.

    Args:
        parameters: That are trained, whole on each process.
    """
    if not parameters or not torch.distributed.is_initialized() or (world := torch.distributed.get_world_size()) == 1:
        return
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    torch.distributed.all_reduce(present, torch.distributed.ReduceOp.MAX)
    for same in _buckets([p for p, anywhere in zip(parameters, present.tolist(), strict=True) if anywhere]):
        for parameter in same:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in same if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat /= world  # before the sum: half precision must not overflow
        torch.distributed.all_reduce(flat)
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
