"""How the processes of one run wait for each other, hear of a failure, and are alone.

a value of the main process -> the same value on all
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch

from perl.errors import PerlError

# What a process may do alone, a score for one, takes hours; collectives of the run's own group give up after minutes.
_AS_LONG_AS_IT_TAKES = timedelta(days=365)
# Instead of a number.
_FAILED = -1
# What a library asks of the processes that there are, and what it makes of them.
_OF_THE_WORLD = ("get_rank", "get_world_size", "new_group")


class MainFailedError(PerlError):
    """The main process of the run has failed, and says why itself."""

    exit_code = 1


def told_by_first(value: bool = True) -> bool:
    """The main process's value, on all of them; the others wait for it, however long it takes to get here.

    Args:
        value: Of the main process.

    Raises:
        MainFailedError: The main process has failed instead; see :func:`others_told`.
    """
    return bool(number_told_by_first(int(value)))


def number_told_by_first(number: int) -> int:
    """The main process's number, which is 0 or more, on all of them; otherwise as :func:`told_by_first`."""
    if not several():
        return number
    sent = torch.tensor([number])
    torch.distributed.broadcast(sent, src=0, group=patient_group())
    if int(sent) == _FAILED:
        raise MainFailedError("the main process of this run has failed, see what it says")
    return int(sent)


@contextlib.contextmanager
def others_told() -> Iterator[None]:
    """What the main process does before it sends a value; if it fails, the others receive that and fail too."""
    with contextlib.ExitStack() as failed:
        failed.callback(_tell_of_failure)
        yield
        failed.pop_all()  # it has not failed: nothing is told


def _tell_of_failure() -> None:
    if several() and torch.distributed.get_rank() == 0:
        with contextlib.suppress(RuntimeError):  # they have ended already
            torch.distributed.broadcast(torch.tensor([_FAILED]), src=0, group=patient_group())


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
def patient_group() -> torch.distributed.ProcessGroup:
    """A second group of all processes, on the CPU, that notices a lost process but no passing of time."""
    group: torch.distributed.ProcessGroup = torch.distributed.new_group(backend="gloo", timeout=_AS_LONG_AS_IT_TAKES)
    return group
