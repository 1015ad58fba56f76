"""Programs as processes that need not import anything: forks of a process that has imported everything.

``python -m perl ...`` or a vLLM server -> fork of a warm process -> exit code, output, signals, as of any child

Importing takes most of a short command's time, and of a server's start. A test of the start itself (what is imported, a
library's environment variables) starts a process the ordinary way, with :mod:`subprocess`; so does a command whose
environment is not the one in which the warm process imported its libraries.
"""

import array
import atexit
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.ports import free_port

COMMAND = [sys.executable, "-m", "perl"]
_SET_CHILD_SUBREAPER = 36  # of prctl
# No library reads these when it is imported; torch sets the last one itself.
_MAY_DIFFER = {"PYTEST_CURRENT_TEST", "COLUMNS", "TORCHINDUCTOR_CACHE_DIR"}
_ENVIRONMENT = dict(os.environ)
_parents: dict[tuple[int, str, tuple[str, ...]], "_WarmParent"] = {}


@dataclass(frozen=True)
class Warmed:
    """An interpreter, and what a warm process of it has imported.

    Attributes:
        python: Interpreter of its environment.
        libraries: What takes long to import.
        environment: Variables with which they are imported.
    """

    python: str
    libraries: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=lambda: _ENVIRONMENT)


OURS = Warmed(
    sys.executable,
    ("perl.cli.commands", "perl.training.stages", "perl.evaluation", "trl", "peft", "datasets", "transformers"),
)


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run(command, ...)`` of ``[sys.executable, "-m", "perl", ...]``."""
    check, given = options.pop("check", False), options.pop("input", None)
    timeout = options.pop("timeout", None)
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if given is not None:
        options["stdin"] = subprocess.PIPE
    with popen(command, **options) as process:
        try:
            stdout, stderr = process.communicate(given, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
    if check:
        done.check_returncode()
    return done


def popen(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """As ``subprocess.Popen(command, ...)`` of ``[sys.executable, "-m", "perl", ...]``; warm where that is the same."""
    ours = list(command[:3]) == COMMAND
    simple = set(options) <= {"stdin", "stdout", "stderr", "cwd", "env", "text", "bufsize", "start_new_session"}
    if not (ours and simple and sys.platform == "linux" and _same_environment(options.get("env"))):
        return subprocess.Popen(command, **options)
    return fork(OURS, command[1:], **options)


def fork(warmed: Warmed, arguments: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """As ``subprocess.Popen([python, *arguments], ...)`` of ``-m MODULE ...`` or a script, warm in any case."""
    return _Fork(warmed, arguments, **options)


def run_distributed(
    arguments: Sequence[str],
    cwd: str | os.PathLike[str],
    processes: int = 2,
    env: Mapping[str, str] | None = None,
    timeout: float = 1500.0,
    *,
    of_node: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Processes of one run on this machine, with what ``torchrun --standalone`` tells them.

    Args:
        arguments: Of Python, in each of them.
        cwd: Their folder.
        processes: How many.
        env: None: this process's.
        timeout: Seconds, after which they are ended.
        of_node: Of them as if on each of several machines; None: all on this one.

    Returns:
        The first exit code that is not 0, and what all of them have printed.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    of_node = of_node or processes
    size = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(of_node)}
    shared = {"OMP_NUM_THREADS": "1", **(os.environ if env is None else env), **place, **size}
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        ranks = [
            fork(OURS, arguments, cwd=cwd, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env={
                **shared, "RANK": str(rank), "LOCAL_RANK": str(rank % of_node)
            })
            for rank in range(processes)
        ]  # fmt: skip
        end = time.monotonic() + timeout
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        codes = [code for rank in ranks if (code := rank.poll())]  # those that failed by themselves
        for rank in ranks:
            _ended(rank)
        codes += [rank.returncode for rank in ranks]
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess([*arguments], next(filter(None, codes), 0), stdout.read(), stderr.read())


def _ended(process: "subprocess.Popen[Any]") -> None:
    """As torchrun ends the others: SIGTERM, and what is left after half a minute is killed."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _same_environment(given: dict[str, str] | None) -> bool:
    """Whether libraries would read what they have read in the warm process."""
    now = dict(os.environ) if given is None else dict(given)
    return all(now.get(name) == _ENVIRONMENT.get(name) for name in (now.keys() | _ENVIRONMENT.keys()) - _MAY_DIFFER)


def _parent(warmed: Warmed) -> "_WarmParent":
    """This process's own; a fork of this process has none."""
    key = os.getpid(), warmed.python, warmed.libraries
    if key not in _parents:
        _parents[key] = _WarmParent(warmed)
        atexit.register(_parents[key].end)
    return _parents[key]


class _WarmParent:
    """The process that forks, started now, and the socket on which it is asked to."""

    def __init__(self, warmed: Warmed) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            command = [warmed.python, "-m", "tests.warm", str(theirs.fileno()), *warmed.libraries]
            root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
            self.process = subprocess.Popen(
                command,
                cwd=root,
                env=warmed.environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        """A process as asked for, which becomes a child of this one; its id."""
        text = json.dumps(request).encode()
        adopt = ctypes.CDLL(None).prctl
        adopt(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # only now: other orphans are not this process's
        try:
            passed = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
            self.socket.sendmsg([len(text).to_bytes(4)], [passed])
            self.socket.sendall(text)
            answer = _exactly(self.socket, 4)
        finally:
            adopt(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return int.from_bytes(answer)

    def end(self) -> None:
        """It ends when nobody can ask it any more."""
        self.socket.close()
        self.process.wait()


class _Fork(subprocess.Popen):  # type: ignore[type-arg]
    """A child that was forked by the warm process instead of by this one; waited for and killed like any other."""

    def __init__(self, warmed: Warmed, arguments: Sequence[str], **options: Any) -> None:
        self._warmed = warmed
        super().__init__([*map(str, arguments)], executable=warmed.python, **options)

    def _execute_child(self, args, *given):
        # As in Python 3.11 to 3.13: executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
        # shell, then the six ends of the pipes; -1 is a file of this process.
        cwd, env, ends = given[4], given[5], given[9:15]
        stdin, stdout, stderr = ends[0], ends[3], ends[5]
        files = [0 if stdin == -1 else stdin, 1 if stdout == -1 else stdout, 2 if stderr == -1 else stderr]
        request = {
            "arguments": args,
            "folder": os.path.abspath(os.fspath(cwd or os.curdir)),
            "environment": dict(os.environ if env is None else env),
            "session": bool(given[20]),
        }
        self.pid = _parent(self._warmed).fork(request, files)
        self._child_created = True
        self._close_pipe_fds(*ends)


def _exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes; none where the other end is closed."""
    read = b""
    while len(read) < size:
        more = connection.recv(size - len(read))
        if not more:
            return b""
        read += more
    return read


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Answers requests with process ids; returns None when nobody asks any more, in a new process its request."""
    while True:
        try:
            head, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(3 * array.array("i").itemsize))
        except ConnectionError:
            return None
        if not head:
            return None
        files = array.array("i", ancillary[0][2])
        request = json.loads(_exactly(connection, int.from_bytes(head)))
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            process = os.fork()
            if process:  # whose parent ends at once, so that whoever asked adopts it
                os.write(writing, process.to_bytes(4))
                os._exit(0)
            for file in (reading, writing, connection.detach()):
                os.close(file)
            return request | {"files": list(files)}
        os.waitpid(between, 0)
        connection.sendall(os.read(reading, 4))
        for file in (reading, writing, *files):
            os.close(file)


def _become(request: dict[str, Any]) -> None:
    """What a process of its own would find: files, folder, environment, arguments, signals, random numbers."""
    for place, file in enumerate(request["files"]):
        os.dup2(file, place)
    for file in request["files"]:
        if file > 2:
            os.close(file)
    if request["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    further = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:1] = [os.getcwd(), *further]
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _run(arguments: list[str]) -> None:
    """What Python does with its arguments: ``-m MODULE ...`` or a script with its own."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


def _share_the_processor() -> None:
    """Changes what vLLM's processes cost, not what they do.

    They are forks too, as vLLM has them on a GPU; on a CPU it would start each anew. For a second after a message they
    sleep between two looks for the next one, where they would keep a processor busy.
    """
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)
    sys.modules["vllm.distributed.device_communicators.shm_broadcast"].sched_yield = lambda: time.sleep(2e-4)


if __name__ == "__main__":
    _, _descriptor, *_libraries = sys.argv
    for _library in _libraries:
        importlib.import_module(_library)
    gc.freeze()
    wanted = _serve(socket.socket(fileno=int(_descriptor)))
    if wanted is not None:
        _become(wanted)
        if any(argument.startswith("vllm.") for argument in wanted["arguments"][:2]):
            _share_the_processor()
        _run(wanted["arguments"])
