"""Where the processes of a run find each other before torch has joined them: torch's own store of keys and values.

RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT -> a store that all processes read and write
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, in its documentation
from torch.distributed.distributed_c10d import Store

from perl.errors import ProcessError, RecipeError
from perl.recipe.recipe import launched, rank, world_size
from perl.recipe.sections import EngineSection
from perl.run.devices import accelerator
from perl.run.launched import started_by_srun

# Until all processes have started: nodes of a cluster do not do so at the same time.
PATIENCE_SECONDS = 600.0
# Between two looks for something that another process writes.
_LOOK_EVERY_SECONDS = 0.1

_NEVER_HEARD = (
    "it has ended before it came here, as the output of its node says, was never started, or its node cannot reach "
    "MASTER_ADDR at MASTER_PORT"
)


class MeetingError(ProcessError):
    """The processes of a run do not find each other."""

    code = "PRL216"


class Meeting:
    """What the processes tell each other, by topic and rank.

    Attributes:
        rank: This process's.
        size: Number of processes.
    """

    def __init__(self, store: Store, rank: int, size: int, name: str = "") -> None:
        """Processes with the same store and name meet."""
        self.rank, self.size = rank, size
        self._store, self._name = store, name

    def put(self, topic: str, value: Any) -> None:  # noqa: ANN401 (JSON values)
        """Says something to all processes, once."""
        self._store.set(f"{self._name}{topic}/{self.rank}", json.dumps(value))

    def has(self, topic: str, rank: int) -> bool:
        """Whether a process has said something."""
        return bool(self._store.check([f"{self._name}{topic}/{rank}"]))

    def get(
        self, topic: str, rank: int = 0, look: Callable[[], None] = lambda: None, seconds: float | None = None
    ) -> Any:  # noqa: ANN401 (JSON values)
        """What a process has said, or says while this one waits.

        Args:
            topic: On what.
            rank: Which process.
            look: Called meanwhile; raises if waiting is of no use any more.
            seconds: How long to wait; None: as long as it takes.

        Raises:
            MeetingError: It has said nothing in that time, or the store is gone.
        """
        began = time.monotonic()
        while True:
            look()
            try:
                if self.has(topic, rank):
                    return json.loads(self._store.get(f"{self._name}{topic}/{rank}"))
            except RuntimeError as error:  # torch's: whoever kept the store has ended
                look()
                raise MeetingError(f"rank {self.rank} has lost the other processes of this run") from error
            if seconds is not None and time.monotonic() - began > seconds:
                break
            time.sleep(_LOOK_EVERY_SECONDS)
        absent = [rank]
        if self.rank == 0:  # which waits for all of them
            with contextlib.suppress(RuntimeError):
                absent = [other for other in range(1, self.size) if not self.has(topic, other)] or absent
        shown = ", ".join(map(str, absent[:8])) + (", ..." if absent[8:] else "")
        what = f"nothing from rank {shown} of {self.size} in {seconds:.0f} s"
        raise MeetingError(what, "launcher", _NEVER_HEARD)


def meeting(name: str) -> Meeting:
    """The meeting of this process's run; only for one of several.

    Args:
        name: All processes meet under several names in the same order.

    Raises:
        MeetingError: The main process cannot be reached.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Meeting(_store(), rank(), world_size(), f"perl/{attempt}/{name}/")


@cache
def _store() -> Store:
    """The launcher's store, else one that the main process keeps, in which torch's processes join later too."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise MeetingError("the launcher has set no MASTER_ADDR and MASTER_PORT", "launcher")
    kept_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return TCPStore(
            address,
            int(port),
            is_master=rank() == 0 and not kept_by_launcher,
            wait_for_workers=False,
            timeout=timedelta(seconds=PATIENCE_SECONDS),
            multi_tenant=True,
        )
    except RuntimeError as error:  # torch's DistError is one
        what = f"rank {rank()} cannot meet the others at {address}:{port}: {' '.join(str(error).split())[:200]}"
        hint = "set MASTER_ADDR and MASTER_PORT to a free port of the first node"
        if rank() > 0:  # which never listens there itself
            hint = f"rank 0 has ended, as its output says, or cannot be reached from this node; else {hint}"
        raise MeetingError(what, "launcher", hint) from None


def check_joined(size: int) -> None:
    """Compares the processes that have joined, as the libraries count them, with those that were started.

    Args:
        size: How many have joined.

    Raises:
        RecipeError: They are not as many.
    """
    if size != world_size():
        what = f"{world_size()} processes were started, and accelerate has joined {size}"
        raise RecipeError(what, "launcher", "perl train RECIPE --processes N, or torchrun")


def check_size(asked: int | None) -> None:
    """Compares the processes that were asked for with those that were started.

    Args:
        asked: How many a recipe asks for; None: whatever there is.

    Raises:
        RecipeError: They are not as many.
    """
    if asked is None or asked == world_size():
        return
    where = "engine.processes"
    if launched():
        what = f"{asked} processes are asked for, and the launcher has started {world_size()}"
        raise RecipeError(what, where, f"perl train RECIPE --processes {asked}, or leave it out")
    line = f"perl train RECIPE --processes {asked}, or torchrun --nproc-per-node {asked} SCRIPT"
    raise RecipeError(f"perl.train runs in one process, but the recipe asks for {asked}", where, line)


def check_machine(engine: EngineSection, processes: int) -> None:
    """Refuses several processes on this machine that it has no GPUs for.

    Args:
        engine: Of the recipe: the device.
        processes: How many there are to be, or are, on this machine.

    Raises:
        RecipeError: They are more than there are GPUs.
    """
    device = accelerator() if engine.device == "auto" else None
    gpus = torch.accelerator.device_count() if device is not None else processes
    if processes > gpus:
        hint = f"at most {gpus}, a process for each; over several machines: torchrun --nnodes M --nproc-per-node {gpus}"
        raise RecipeError(f"{processes} processes, and this machine has {gpus} GPUs", "engine.processes", hint)


def processes_here() -> int:
    """Processes on this machine that see the same GPUs; ``srun --gpus-per-task 1`` shows each one of its own."""
    if started_by_srun() and torch.accelerator.device_count() == 1:
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
