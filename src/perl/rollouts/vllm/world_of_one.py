"""vLLM in one process of several: it must not count the run's other processes as its own.

torch.distributed of the run -> one in which this process is alone
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from perl.run.joint_work import several

# What a library asks of the processes that there are, and what it makes of them.
_OF_THE_WORLD = ("get_rank", "get_world_size", "new_group")


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
