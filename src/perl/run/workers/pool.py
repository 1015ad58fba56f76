"""Worker processes that call one function, each call under a time limit that holds whatever the function does.

items -> Outcome of each, in order

A function that hangs, crashes or fills the memory costs its own item and nothing else. Workers are fresh Python
processes: no fork of a process that holds a GPU, no second run of the user's script. Items and answers are JSON:
nothing that is read can run code. What workers print goes to stderr: stdout is for results.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from perl.errors import RewardError
from perl.run.workers.worker import LIMITS, START_SECONDS, one_line

# For one item. More than any call needs, and far from what the timers of the kernel cannot hold.
LONGEST_LIMIT_SECONDS = 86_400.0
_LONGEST_ANSWER_BYTES = 1 << 28
# A worker is started by -c: `-m perl.run.workers.worker` would need this package's folder in PYTHONPATH, ahead of
# the standard library and seen by every process that the user's function starts.
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from perl.run.workers.worker import main; main()"
_STDERR = 2  # not sys.stderr, which may be no file
# With which the kernel ends a worker that is past its limit; see worker.py.
_TIMER_SIGNALS = (signal.SIGALRM, signal.SIGPROF) if os.name == "posix" else ()


class WorkerStartError(RewardError):
    """A worker could not be started: a fault of the installation or of a module, never a result."""

    code = "PRL209"


@dataclass(frozen=True)
class ItemOutcome:
    """What became of one item.

    Attributes:
        value: The JSON value that the function returned.
        status: ``stalled``: the wall time ran out before the processor time, so nothing is known of the item.
        error: ``ValueError: ...``, or how the worker died.
        seconds: Wall time in the worker.
    """

    status: Literal["done", "timeout", "stalled", "error"]
    value: Any = None
    error: str = ""
    seconds: float = 0.0


@dataclass(eq=False)
class _Worker:
    """A process, what it has in hand and until when; without an item and ready it is idle."""

    process: subprocess.Popen[bytes]
    connection: Connection
    deadline: float
    begun: float
    ready: bool = False
    item: int | None = None

    @property
    def idle(self) -> bool:
        return self.ready and self.item is None


class WorkerPool:
    """Calls ``package.module:function`` for items, in worker processes that are killed when they overrun.

    The function takes one item and returns a JSON value; it runs in the main thread of its process. Workers start when
    they are first needed and serve until :meth:`close`; after that they start again when needed. They have the parent's
    environment, folder and import path, one thread for numerics, and no GPU. Any thread may call; calls take turns.
    A process forked from this one leaves these workers alone and starts new ones. POSIX only.
    """

    def __init__(
        self,
        target: str,
        workers: int = 2,
        *,
        timeout_seconds: float = 5.0,
        patience: float = 1.0,
        warm_up: Sequence[Any] = (),
        memory_mib: int | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        """Starts nothing yet.

        Args:
            target: ``package.module:function``.
            workers: Processes at most.
            timeout_seconds: Processor time that an item may take, at most a day. An item that uses 0.8 of it ends then,
                and its worker goes on; what the interrupted function left in its module stays there.
            patience: How many times as much wall time it may take; 1 for a function that also waits.
            warm_up: Items that a worker is tried on before it is ready.
            memory_mib: What a worker may allocate beyond what its imports took; enforced on Linux only.
            imports: Modules that a worker imports before it is ready, beside the target's.

        Raises:
            ValueError: A number is not positive, or the limit is not a number or longer than a day.
        """
        if workers < 1 or (memory_mib is not None and memory_mib < 1):
            raise ValueError(f"not positive: {workers=} or {memory_mib=}")
        check_limit(timeout_seconds)
        self._target, self._most, self._timeout_seconds, self._patience = target, workers, timeout_seconds, patience
        task = {"target": target, "imports": list(imports), "warm_up": list(warm_up), "memory_mib": memory_mib}
        self._arguments = json.dumps(task)
        self._workers: list[_Worker] = []
        self._killed = self._idle_deaths = 0
        self._lock = threading.Lock()
        weakref.finalize(self, _end_all, self._workers)
        if hasattr(os, "register_at_fork"):
            forget = weakref.WeakMethod(self._forget)
            os.register_at_fork(after_in_child=lambda: (forget() or (lambda: None))())

    @property
    def killed(self) -> int:
        """Workers that were killed because their item overran."""
        return self._killed

    def start(self, *, wait: bool = True) -> None:
        """Starts all workers.

        Args:
            wait: Until they have imported the function; otherwise they do so beside what comes next.

        Raises:
            WorkerStartError: One cannot be started.
        """
        with self._lock:
            self._launch(self._most)
        if not wait:
            return
        with self._lock, self._orderly():
            while not all(worker.ready for worker in self._workers):
                for worker in self._heard(time.monotonic()):
                    self._welcome(worker)

    def map(self, items: Sequence[Any], timeout_seconds: float | None = None) -> list[ItemOutcome]:
        """Calls the function for each item.

        Args:
            items: JSON values.
            timeout_seconds: Another limit for these items.

        Returns:
            The outcomes, in the order of the items. An item whose worker died is not tried again.

        Raises:
            WorkerStartError: A worker cannot be started.
            TypeError: An item is not a JSON value.
            ValueError: The limit is not a positive number, or longer than a day.
        """
        limit = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        check_limit(limit)
        outcomes: dict[int, ItemOutcome] = {}
        with self._lock, self._orderly():
            self._launch(min(len(items), self._most))
            following = 0
            while len(outcomes) < len(items):
                for worker in list(self._workers):
                    if worker.idle and following < len(items) and self._give(worker, following, items, limit):
                        following += 1
                for worker in self._heard(time.monotonic()):
                    if not worker.ready:
                        self._welcome(worker)
                    elif worker.item is not None:
                        index = worker.item
                        outcomes[index] = self._outcome(worker)
        return [outcomes[index] for index in range(len(items))]

    def close(self) -> None:
        """Ends all workers; also done when the pool is collected and when Python exits."""
        with self._lock:
            _end_all(self._workers)

    @contextlib.contextmanager
    def _orderly(self) -> Iterator[None]:
        """Whatever interrupts a call, no worker is left with half a message or an answer that nobody waits for."""
        try:
            yield
        except BaseException:
            for worker in [worker for worker in self._workers if not worker.idle]:
                self._drop(worker)
            raise

    def _launch(self, number: int) -> None:
        while len(self._workers) < number:
            if os.name != "posix":
                raise WorkerStartError("worker processes need Linux or macOS")
            ours, theirs = socket.socketpair()
            with theirs:
                connection = Connection(ours.detach())
                path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
                try:
                    process = subprocess.Popen(  # noqa: S603 (this interpreter, this package)
                        [sys.executable, "-P", "-u", "-c", _START, path, self._arguments, str(theirs.fileno())],
                        stdin=subprocess.DEVNULL,
                        stdout=_STDERR,
                        pass_fds=[theirs.fileno()],
                        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                        process_group=0,  # Ctrl-C is for the parent; what the function started dies with its worker
                    )
                except OSError as error:
                    connection.close()
                    raise WorkerStartError(f"no worker can be started: {error}") from error
            now = time.monotonic()
            self._workers.append(_Worker(process, connection, deadline=now + START_SECONDS, begun=now))

    def _heard(self, now: float) -> list[_Worker]:
        """Workers that sent a message, died or overran; waits for one."""
        waited_for = {worker.connection: worker for worker in self._workers if not worker.idle}
        first = min((worker.deadline for worker in waited_for.values()), default=now)
        heard = [waited_for[connection] for connection in wait(list(waited_for), max(0.0, first - now))]  # type: ignore[index]
        if heard:
            return heard
        now = time.monotonic()
        return [worker for worker in waited_for.values() if worker.deadline <= now]

    def _give(self, worker: _Worker, index: int, items: Sequence[Any], limit: float) -> bool:
        """Sends an item; False if the worker died while it was idle, so that another one takes the item."""
        wall = limit * self._patience
        try:
            message = struct.pack(LIMITS, limit, wall) + as_json(items[index])
        except TypeError as error:
            raise TypeError(f"item {index} {error}") from error.__cause__
        if worker.connection.poll():  # an idle worker sends no message: this is its end
            how = self._replace(worker)
            self._idle_deaths += 1
            if self._idle_deaths > 2 * self._most:
                raise WorkerStartError(f"workers for {self._target} die before they get an item; the last one {how}")
            return False
        self._idle_deaths = 0
        worker.item, worker.begun = index, time.monotonic()
        worker.deadline = worker.begun + wall
        with contextlib.suppress(OSError):  # it dies while it reads: heard of as any other death
            worker.connection.send_bytes(message)
        return True

    def _welcome(self, worker: _Worker) -> None:
        """Reads the first message of a worker.

        Raises:
            WorkerStartError: It reports an error, died, or stays silent.
        """
        overran = not worker.connection.poll()
        answer = None if overran else _answer(worker.connection)
        if answer is not None and answer[0] == "done":
            worker.ready = True
            return
        how = self._drop(worker)
        if overran:
            how = f"was not ready after {START_SECONDS:.0f} seconds"
        elif answer is not None:
            how = f"could not start: {answer[2]}"
        raise WorkerStartError(f"the worker for {self._target} {how}")

    def _outcome(self, worker: _Worker) -> ItemOutcome:
        """What became of a worker's item; a worker that died or overran is replaced."""
        seconds = time.monotonic() - worker.begun
        if not worker.connection.poll():
            self._killed += 1
            self._replace(worker)
            status: Literal["timeout", "stalled"] = "timeout" if self._patience == 1 else "stalled"
            return ItemOutcome(status, error=f"killed after {seconds:.1f} seconds", seconds=seconds)
        answer = _answer(worker.connection)
        if answer is not None:
            worker.item = None
            return ItemOutcome(*answer)
        how = self._replace(worker)
        if -(worker.process.returncode or 0) in _TIMER_SIGNALS:
            self._killed += 1
            return ItemOutcome("timeout", error=f"the worker {how}", seconds=seconds)
        return ItemOutcome("error", error=f"the worker {how}", seconds=seconds)

    def _replace(self, worker: _Worker) -> str:
        """Another one in its place, which imports while the others go on."""
        how = self._drop(worker)
        self._launch(len(self._workers) + 1)
        return how

    def _drop(self, worker: _Worker) -> str:
        self._workers.remove(worker)
        _end(worker)
        code = worker.process.returncode or 0
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def _forget(self) -> None:
        """In a forked process: the workers are the parent's, and so may be the thread that holds the lock."""
        self._lock = threading.Lock()
        for worker in self._workers:
            worker.connection.close()
            worker.process.returncode = 0  # not our child: nothing to wait for, nothing to warn of
        self._workers.clear()


def as_json(value: Any) -> bytes:  # noqa: ANN401 (whatever an item is)
    """An item as it goes to a worker.

    Raises:
        TypeError: "is not a JSON value: ...".
    """
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"is not a JSON value: {one_line(error)}") from error


def check_limit(seconds: float) -> None:
    """Raises ValueError for what is no number of seconds up to a day."""
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not (number and 0 < seconds <= LONGEST_LIMIT_SECONDS):
        raise ValueError(f"timeout_seconds must be a positive number up to a day, 86400, not {seconds!r}")


def _answer(connection: Connection) -> tuple[Literal["done", "timeout", "error"], Any, str, float] | None:
    """A message of a worker; None if it died or the message is malformed."""
    try:
        status, value, error, seconds = json.loads(connection.recv_bytes(_LONGEST_ANSWER_BYTES))
    except (EOFError, OSError, ValueError, TypeError, RecursionError):
        return None
    return (status, value, str(error), float(seconds)) if status in ("done", "timeout", "error") else None


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        _end(workers.pop())


def _end(worker: _Worker) -> None:
    worker.connection.close()
    if worker.process.returncode is None:
        # Before it is waited for: until then nobody else can have its number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
