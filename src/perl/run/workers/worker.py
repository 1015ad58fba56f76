"""The other side of a worker pool: a process that calls one function for one item after another.

item, limits -> status, value, error, seconds as JSON

Runs in a separate process, started by :mod:`perl.run.workers.pool`. When the parent is gone, the end of the
channel ends an idle worker and a thread that looks for the parent a busy one. In a long call into C, during which no
thread of Python runs, a timer of the kernel does at the limit of the item.
"""

import contextlib
import importlib
import json
import os
import signal
import struct
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

# For the imports of a worker, on a machine that has other things to do.
START_SECONDS = 600.0
LIMITS = "!dd"
"""Before an item: the seconds of processor time that it may take, and of wall time."""
# Of the first, as the function's own time: a loop in Python ends here, and its worker need not be replaced.
SOFT_LIMIT = 0.8
LONGEST_MESSAGE = 200
# Between two looks for the parent.
WATCH_SECONDS = 1.0
_LIMIT_BYTES = struct.calcsize(LIMITS)
_MIB = 1 << 20
# Of this package, Python and what is installed: who reads of an error in a reward wants the line of the reward.
_NOT_THE_USERS = tuple(
    os.path.join(folder, "")
    for folder in (
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)


class _OutOfTime(BaseException):
    """Raised in the function; no Exception, since functions catch those."""


class _SoftLimit:
    """The handler of the CPU timer: interrupts the function once, and nothing after it."""

    def __init__(self) -> None:
        self.armed = self.fired = False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        if self.armed:
            self.armed, self.fired = False, True
            raise _OutOfTime


def main() -> None:
    """Serves until the parent closes the channel; the command line holds import path, arguments and channel."""
    _, arguments, channel = sys.argv[1:]
    task: dict[str, Any] = json.loads(arguments)
    del sys.argv[1:]
    threading.Thread(target=watch_parent, args=(os.getppid(),), name="perl-parent-watch", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Neither for processes that the function starts, or they would keep the channel open, nor lost to it.
    os.set_inheritable(int(channel), False)
    connection = Connection(int(channel))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGALRM, signal.SIGPROF, signal.SIGVTALRM))
    signal.setitimer(signal.ITIMER_REAL, START_SECONDS + 1)
    try:
        function = imported(task["target"])
        for module in task["imports"]:
            importlib.import_module(module)
        for item in task["warm_up"]:
            function(item)
        if task["memory_mib"] and sys.platform == "linux":  # which alone reports how much the imports took
            import resource

            with open("/proc/self/statm", encoding="ascii") as statm:
                taken = int(statm.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + task["memory_mib"] * _MIB, resource.RLIM_INFINITY))
        answer = _as_json("done", None, "", 0.0)
    except BaseException as error:  # noqa: BLE001 (a module may raise anything while it is imported)
        with contextlib.suppress(OSError):
            connection.send_bytes(_as_json("error", None, placed_line(error), 0.0))
        os._exit(1)
    _clear_timers()
    soft = _SoftLimit()
    signal.signal(signal.SIGVTALRM, soft)
    try:
        while True:
            connection.send_bytes(answer)
            answer = _called(function, connection.recv_bytes(), soft)
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone; threads that the function left behind do not matter
    except BaseException:  # noqa: BLE001 (no memory for a message; this process must end now, threads or not)
        traceback.print_exc()
        os._exit(1)


def one_line(error: BaseException) -> str:
    """Type and message of an exception, at most so long that a log line can hold it."""
    try:
        message = str(error)[:LONGEST_MESSAGE]
    except Exception:  # noqa: BLE001 (the user's exceptions)
        message = ""
    name = type(error).__name__
    return " ".join(f"{name}: {message}".split()) if message else name


def placed_line(error: BaseException) -> str:
    """The same, after the line of the user's own code that raised it, as ``my_rewards.py:3: ValueError: ...``."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if is_users_file(file):
            place = f"{os.path.basename(file)}:{line}: "
    return f"{place}{one_line(error)}"


def is_users_file(file: str) -> bool:
    """Whether a file of code is neither of this package, nor Python's, nor installed."""
    return not file.startswith(("<", *_NOT_THE_USERS))


def _called(function: Callable[[Any], Any], message: bytes, soft: _SoftLimit) -> bytes:
    """The answer for one message."""
    begun = time.monotonic()
    soft.fired = False
    processor, wall = struct.unpack(LIMITS, message[:_LIMIT_BYTES])
    # The kernel ends it at the limit of processor time, also in the midst of one long call into C. The parent does at
    # that of wall time, and the kernel a second later, unless the function uses SIGALRM itself.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, wall + 1)
    signal.setitimer(signal.ITIMER_PROF, processor)
    signal.setitimer(signal.ITIMER_VIRTUAL, SOFT_LIMIT * processor)
    error = ""
    answer = b""
    try:
        soft.armed = True
        try:
            value = function(json.loads(message[_LIMIT_BYTES:]))
            answer = _as_json("done", value, "", time.monotonic() - begun)
        except _OutOfTime:
            raise
        except BaseException as raised:  # noqa: BLE001 (SystemExit too is the function's failure, not ours)
            error = placed_line(raised)
        soft.armed = False
    except _OutOfTime:
        pass
    _clear_timers()
    seconds = time.monotonic() - begun
    if soft.fired:  # also where the function caught it and returned something
        return _as_json("timeout", None, f"interrupted after {seconds:.1f} seconds", seconds)
    return answer or _as_json("error", None, error, seconds)


def watch_parent(parent: int) -> None:
    """Kills this process and those that it started once the parent is gone, however that ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the thread that calls the function
    never = threading.Event()
    while True:
        try:
            if os.getppid() != parent:
                os.killpg(0, signal.SIGKILL)
            never.wait(WATCH_SECONDS)
        except MemoryError:  # the function's; it must not end the watch
            continue


def _clear_timers() -> None:
    for timer in (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF, signal.ITIMER_REAL):
        signal.setitimer(timer, 0)


def _as_json(status: str, value: Any, error: str, seconds: float) -> bytes:  # noqa: ANN401 (a JSON value)
    return json.dumps([status, value, error, seconds]).encode()


def imported(target: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names.

    Raises:
        Exception: Whatever its import raises; AttributeError or TypeError if the function does not exist.
    """
    module_name, _, names = target.partition(":")
    found: Any = importlib.import_module(module_name)
    for name in names.split("."):
        found = getattr(found, name)
    if not callable(found):
        raise TypeError(f"{target} cannot be called")
    function: Callable[..., Any] = found
    return function
