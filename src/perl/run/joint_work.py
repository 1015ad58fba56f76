"""Work that the processes of a run do together: it succeeds on all of them, or fails on all with the same error.

a piece of work on each process -> its result, or the error of the process that failed

One process may take hours for its part; the others wait for it. They notice a process that ends, but no passing of
time.

Outcomes go over the gloo group of the results: in one order with them, also where somebody else's script has started
the processes. An error that is survived is no process's end, which ``launch/channel.py`` alone tells.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from perl.errors import ProcessError
from perl.run.failure import LONGEST_FAILURE, Failure
from perl.run.files import write_file

_T = TypeVar("_T")

# What a process may do alone, a score for one, takes hours; collectives of the run's own group give up after minutes.
_AS_LONG_AS_IT_TAKES = timedelta(days=365)
# In which the others must come to hear that a process has failed; then it ends, and they find it gone.
_TELLING_SECONDS = 10.0
# Of a file that is being written, beside its place: its name and the process.
_STAGED = re.compile(r"\..+\.\d+")


@dataclass
class Processes:
    """The processes that do a piece of work together; without arguments this one alone.

    Every process calls the same methods in the same order. What raises between two of them must do so inside
    :meth:`failing_together`.

    Attributes:
        rank: Of this process; that of the main process is 0.
        count: How many there are.
    """

    rank: int = 0
    count: int = 1
    _failed: bool = False

    @property
    def main(self) -> bool:
        """Whether this is the main process, which writes."""
        return self.rank == 0

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """If the block raises on one process it raises on all, where they next meet."""
        try:
            yield
        except BaseException as error:
            if self.count > 1 and not self._failed:  # else it is known
                self._failed = True
                with contextlib.suppress(RuntimeError):  # they have ended, or are where they cannot listen
                    self._exchanged(Failure.of(error, self.rank).encoded(), timedelta(seconds=_TELLING_SECONDS))
            raise

    def meet(self) -> None:
        """Waits until all processes are here.

        Raises:
            PerlError: One of them has failed instead, or ended.
        """
        if self.count == 1:
            return
        try:
            messages = self._exchanged(b"", None)
        except RuntimeError as error:
            self._failed = True
            raise ProcessError("another process exited; see its log") from error
        for message in filter(None, messages):
            self._failed = True
            failed = Failure.decoded(message).error()
            failed.already_reported = not self.main
            raise failed
        self._failed = False  # an error of before was dealt with on all of them

    def by_main(self, work: Callable[[], _T]) -> _T:
        """What the main process does alone, while the others wait; its result goes to all of them.

        Args:
            work: Called on the main process only.

        Returns:
            What it has returned there, on every process.

        Raises:
            PerlError: Another process has failed instead, or ended.
        """
        with self.failing_together():
            done = [work() if self.main else None]
        if self.count > 1:
            self.meet()
            torch.distributed.broadcast_object_list(done, src=0, group=patient_group())
        return done[0]  # type: ignore[return-value]  # the main process's

    def scattered(self, work: Callable[[], Sequence[_T]]) -> _T:
        """What the main process alone makes for each of the processes, while the others wait.

        Args:
            work: Called on the main process only; a part for each process, in the order of their ranks.

        Returns:
            The part of this process.

        Raises:
            PerlError: Another process has failed instead, or ended.
        """
        with self.failing_together():
            parts = list(work()) if self.main else []
        if self.count == 1:
            return parts[0]
        self.meet()
        own: list[Any] = [None]
        torch.distributed.scatter_object_list(own, parts if self.main else None, src=0, group=patient_group())
        return own[0]

    def collected(self, part: _T) -> list[_T]:
        """What every process contributes, brought to the main process.

        Args:
            part: Of this process.

        Returns:
            The parts of all processes in the order of their ranks; an empty list on others than the main process.

        Raises:
            PerlError: Another process has failed instead, or ended.
        """
        if self.count == 1:
            return [part]
        self.meet()
        parts: list[Any] | None = [None] * self.count if self.main else None
        torch.distributed.gather_object(part, parts, dst=0, group=patient_group())
        return parts or []

    def _exchanged(self, message: bytes, patience: timedelta | None) -> list[bytes]:
        """Every process's message."""
        own = torch.zeros(LONGEST_FAILURE, dtype=torch.uint8)
        own[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else own[:0]
        found = [torch.empty_like(own) for _ in range(self.count)]
        work = torch.distributed.all_gather(found, own, group=patient_group(), async_op=True)
        work.wait() if patience is None else work.wait(patience)
        return [each.numpy().tobytes().rstrip(b"\0") for each in found]


def several() -> bool:
    """Whether this process is one of several that have joined."""
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    return joined and torch.distributed.get_world_size() > 1


def joined() -> Processes:
    """The processes of this run, as they have joined; alone where there are no others.

    While they are joined it is one object, so that a failure which passes through several blocks is told once.
    """
    if not several():
        return Processes()
    return _joined_in(patient_group())  # which is made while all of them are here


@cache
def _joined_in(_: torch.distributed.ProcessGroup) -> Processes:
    return Processes(torch.distributed.get_rank(), torch.distributed.get_world_size())


@contextlib.contextmanager
def joining(*, on_cpu: bool) -> Iterator[Processes]:
    """The processes that a launcher has started, joined for a while, each with a GPU of its own where there are any.

    Args:
        on_cpu: Whether they compute on the CPU.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or torch.distributed.is_initialized():
        yield joined()
        return
    if not on_cpu:
        own = int(os.environ.get("LOCAL_RANK", "0"))
        torch.accelerator.set_device_index(own % torch.accelerator.device_count())  # srun may show each its own alone
    torch.distributed.init_process_group("gloo" if on_cpu else None)
    processes = joined()
    yield processes
    processes.meet()  # nobody leaves while another one needs it; after an error all end anyway
    torch.distributed.destroy_process_group()
    patient_group.cache_clear()
    _joined_in.cache_clear()


@cache
def patient_group() -> torch.distributed.ProcessGroup:
    """A second group of all processes, on the CPU, that notices a lost process but no passing of time."""
    group: torch.distributed.ProcessGroup = torch.distributed.new_group(backend="gloo", timeout=_AS_LONG_AS_IT_TAKES)
    return group


def gather_files(folder: Path, processes: Processes) -> None:
    """Brings the files of a folder that the main process has not to it, from whichever process has them.

    Args:
        folder: On each process; it may be absent there.
        processes: All of them call this at once.

    Raises:
        PerlError: One of them cannot read or write a file, or has ended.
    """
    with processes.failing_together():
        own = _files(folder)
    files = list(enumerate(processes.collected(own)))
    # Of those that the main process has not, the first process that has each.
    missing = {name: rank for rank, names in reversed(files) for name in names if name not in own}
    for name, source in processes.by_main(lambda: missing).items():
        _carry(folder / name, source, processes, takes=processes.main)
    processes.meet()


def spread_files(folder: Path, processes: Processes) -> None:
    """Gives every process the files of a folder as the main process has them; others that it has stay.

    Args:
        folder: On each process.
        processes: All of them call this at once.

    Raises:
        PerlError: One of them cannot read or write a file, or has ended.
    """
    if processes.count == 1:
        return
    for name in processes.by_main(lambda: _files(folder)):
        _carry(folder / name, 0, processes, takes=not processes.main)
    processes.meet()


def _carry(path: Path, source: int, processes: Processes, *, takes: bool) -> None:
    """Copies a file from one process to others; all processes call this at once."""
    with processes.failing_together():
        content = [path.read_bytes() if processes.rank == source else b""]
    processes.meet()  # an error of the file before, or of this one, ends all of them here
    torch.distributed.broadcast_object_list(content, src=source, group=patient_group())
    if takes:
        with processes.failing_together():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, lambda staged: staged.write_bytes(content[0]))


def _files(folder: Path) -> list[str]:
    """The files below a folder, by their place in it, without those that a kill has left half written."""
    places = [Path(place, name) for place, _, names in os.walk(folder) for name in names if not _STAGED.fullmatch(name)]
    return sorted(str(path.relative_to(folder)) for path in places if path.is_file())
