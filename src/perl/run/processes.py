"""What the processes of one run do together: average gradients, wait for each other, be alone.

model with a gradient on each process -> the same model with the mean gradient on all
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perl.errors import PerlError

# What a process may do alone, a score for one, takes hours; collectives of the run's own group give up after minutes.
_AS_LONG_AS_IT_TAKES = timedelta(days=365)
# Beside yes and no.
_FAILED = 2
# What a library asks of the processes that there are, and what it makes of them.
_OF_THE_WORLD = ("get_rank", "get_world_size", "new_group")
# Numbers that are exchanged at once: enough that the exchange runs at full speed, few beside a model's gradients.
_AT_ONCE = 2**24


def told_by_first(value: bool = True) -> bool:
    """The first process's value, on all of them; the others wait for it, however long it takes to get here.

    Args:
        value: Of the first process.

    Raises:
        PerlError: The first process has failed instead; see :func:`others_told`.
    """
    if not several():
        return value
    flag = torch.tensor([int(value)])
    torch.distributed.broadcast(flag, src=0, group=_patient_group())
    if int(flag) == _FAILED:
        raise PerlError("the first process of this run has failed, see what it says")
    return bool(flag)


@contextlib.contextmanager
def others_told() -> Iterator[None]:
    """What the first process does before it sends a value; if it fails, the others receive that and fail too."""
    with contextlib.ExitStack() as failed:
        failed.callback(_tell_of_failure)
        yield
        failed.pop_all()  # nothing has: it is not called


def _tell_of_failure() -> None:
    if several() and torch.distributed.get_rank() == 0:
        with contextlib.suppress(RuntimeError):  # they have ended already
            torch.distributed.broadcast(torch.tensor([_FAILED]), src=0, group=_patient_group())


def several() -> bool:
    """Whether this process is one of several that have joined."""
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    return joined and torch.distributed.get_world_size() > 1


@contextlib.contextmanager
def world_of_one() -> Iterator[None]:
    """Inside, a library that asks torch finds no other process, and groups that it makes wait for none.

    The run's own group stays. For what one process opens by itself while others are elsewhere.
    """
    if not several():
        yield
        return
    own = torch.distributed.get_rank()
    rank, size, new = (getattr(torch.distributed, name) for name in _OF_THE_WORLD)

    def of_this_process(_: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return new([own], *args, **{**kwargs, "use_local_synchronization": True})

    alone = (
        lambda group=None: 0 if group is None else rank(group),
        lambda group=None: 1 if group is None else size(group),
        of_this_process,
    )
    for name, function in zip(_OF_THE_WORLD, alone, strict=True):
        setattr(torch.distributed, name, function)
    try:
        yield
    finally:
        for name, function in zip(_OF_THE_WORLD, (rank, size, new), strict=True):
            setattr(torch.distributed, name, function)


@cache
def _patient_group() -> torch.distributed.ProcessGroup:
    """A second group of all processes, on the CPU, that notices a lost process but no passing of time."""
    group: torch.distributed.ProcessGroup = torch.distributed.new_group(backend="gloo", timeout=_AS_LONG_AS_IT_TAKES)
    return group


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
