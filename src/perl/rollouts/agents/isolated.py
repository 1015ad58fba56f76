"""Environments in processes of their own, which are killed where a call overruns.

class -> a class of the same methods, each of which asks a process; the process that answers

A process holds one environment and outlives its conversations: ``reset`` begins the next one, or starts a process where
the last one was killed. What it was given and returns are JSON values; another result comes back as its text.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from perl.run.workers.worker import START_SECONDS, imported, placed_line, watch_parent

STARTS = "_perl_start"
"""Method that starts the process of an environment, before the time of a call counts."""
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); from perl.rollouts.agents.isolated import main; main()"
)


@functools.cache
def isolated(kind: type, methods: tuple[str, ...], void: str, seconds: float, overran: type[BaseException]) -> type:
    """A class whose methods run in a process.

    Args:
        kind: The user's.
        methods: That are asked of the process.
        void: Attribute that says why an environment's state is lost.
        seconds: That a call may take.
        overran: Raised where one takes longer.
    """

    def __init__(self: Any) -> None:  # noqa: ANN401
        self._process = _Process(f"{kind.__module__}:{kind.__qualname__}")

    def asked(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(kind, name))
        def method(self: Any, *args: Any, **named: Any) -> Any:  # noqa: ANN401
            return ask(self, name, args, named)

        return method

    def ask(self: Any, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:  # noqa: ANN401
        try:
            return self._process.call(name, args, named, seconds)
        except (TimeoutError, EOFError, OSError, overran) as error:
            late = isinstance(error, TimeoutError | overran)
            self._process.kill()
            how = f"was killed: {name} did not answer within {seconds:g} s" if late else "ended by itself"
            setattr(self, void, f"{kind.__name__}: its process {how}")
            raise (overran() if late else RuntimeError("the environment's process ended by itself")) from None

    members = {name: asked(name) for name in methods if inspect.isfunction(getattr(kind, name, None))}
    members[STARTS] = lambda self: self._process.start()
    about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (), {**about, "__init__": __init__, **members})


class _Process:
    """The process of an environment."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._running: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Starts it where it does not run, and waits until it has imported the user's module."""
        if self._running is not None and self._running.poll() is None:
            return
        self.kill()
        ours, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-P", "-c", _START, self._path, json.dumps(sys.path), str(theirs.fileno())]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            self._running = subprocess.Popen(  # noqa: S603 (this interpreter, this package)
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, process_group=0
            )
        self._connection = ours
        weakref.finalize(self, _kill, self._running)
        with contextlib.suppress(EOFError, OSError):  # it has ended, as the first call says
            if ours.poll(START_SECONDS):
                ours.recv_bytes()

    def call(self, name: str, args: tuple[Any, ...], named: dict[str, Any], seconds: float) -> Any:  # noqa: ANN401
        """What a method returns; raises what it raised, as a RuntimeError."""
        if self._connection is None:
            raise EOFError
        try:
            message = json.dumps([name, args, named])
        except (TypeError, ValueError) as error:
            raise RuntimeError(f"what {name} is given is no JSON value: {error}") from None
        self._connection.send_bytes(message.encode())
        if not self._connection.poll(seconds):
            raise TimeoutError
        done, value = json.loads(self._connection.recv_bytes())
        if not done:
            raise RuntimeError(value)
        return value

    def kill(self) -> None:
        """Ends it, and what it has started."""
        if self._connection is not None:
            self._connection.close()
        if self._running is not None:
            _kill(self._running)
        self._running = self._connection = None


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    """Serves until the parent closes the connection or is gone; the command line holds the class and the connection."""
    _, path, _, channel = sys.argv
    threading.Thread(target=watch_parent, args=(os.getppid(),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(int(channel), False)
    connection = Connection(int(channel))
    environment: Any = None
    with contextlib.suppress(Exception):  # which the first call raises again
        environment = imported(path)()
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError, OSError), asyncio.Runner() as runner:
        while True:
            name, args, named = json.loads(connection.recv_bytes())
            try:
                environment = imported(path)() if environment is None else environment
                value = getattr(environment, name)(*args, **named)
                answer = True, runner.run(asyncio.wait_for(value, None)) if inspect.isawaitable(value) else value
            except BaseException as error:  # noqa: BLE001 (the user's method may raise anything)
                answer = False, placed_line(error)
            try:
                text = json.dumps(answer)
            except (TypeError, ValueError):
                text = json.dumps([True, str(answer[1])])
            connection.send_bytes(text.encode())
    os._exit(0)
