"""What hosts this process where it is not a program of its own: who may stop its run, where its numbers and files go.

worker loop of a cluster -> Host -> the run's callbacks, its rollouts; signals, handler -> handled for a while

A program of its own has none of it: it hears signals, draws its progress, and writes into its folder.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from perl.recipe.server_address import ServerAddress


class Fleet(Protocol):
    """vLLM servers that were started for the run, each with somebody on its node who brings updates there.

    Used by the main process. What is awaited runs in the loop of who asks, of any number of servers at a time.
    """

    def addresses(self) -> list[ServerAddress]:
        """Where they are now, always in the same order, with their key; waits until one is being started.

        Raises:
            RolloutError: None is.
        """

    async def address(self, index: int) -> str:
        """Where one of them is now, which may be elsewhere than before; raises OSError where it is nowhere."""

    def path(self, name: str) -> str:
        """The folder in which every server finds an update that was brought to it."""

    def publish(self, name: str, files: Mapping[str, bytes]) -> None:
        """Keeps the files of an update for the servers' nodes."""

    async def bring(self, index: int, name: str) -> None:
        """Brings the files of an update to the node of a server; raises OSError where nobody answers there."""

    def forget(self, name: str) -> None:
        """The files of an update are not needed any more; a node deletes its copy when it gets a newer one."""


class Host:
    """The default host: that of a standalone process."""

    fleet: Fleet | None = None
    """The servers that it has started; None: it starts none."""
    is_ray = False
    """Whether it is a Ray cluster."""
    keeps_files = False
    """Whether it keeps the run's files, so that the processes' folders need not be one."""

    def stop_asked(self) -> bool:
        """Whether the run is to end after this step; asked on every process."""
        return False

    def leaves(self) -> bool:
        """Whether a node of the run is about to go, as this process knows; others may hear of it a step later."""
        return False

    def logged(self, step: int, logs: Mapping[str, Any]) -> None:
        """A step was logged; called on the main process."""

    def saved(self, folder: Path) -> None:
        """The run folder holds a new whole checkpoint, or is done; called on every process at the same place."""


_hosts: list[Host] = [Host()]


def host() -> Host:
    """The host of this process."""
    return _hosts[-1]


@contextlib.contextmanager
def hosted_by(who: Host) -> Iterator[None]:
    """Inside, runs of this process are hosted so."""
    _hosts.append(who)
    try:
        yield
    finally:
        _hosts.remove(who)


@contextlib.contextmanager
def handled(numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handles signals inside the block; only the main thread can.

    One that was ignored when the process started stays ignored, since the program is to go on: ``nohup`` starts it with
    SIGHUP ignored, a shell without a terminal starts ``command &`` with SIGINT ignored.

    Args:
        numbers: Which.
        handler: As :func:`signal.signal` takes it.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    ours = [number for number, found in before.items() if found is not signal.SIG_IGN]
    try:
        for number in ours:
            signal.signal(number, handler)
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number] or signal.SIG_DFL)
