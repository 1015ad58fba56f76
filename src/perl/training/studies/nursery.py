"""A process that has imported everything, and forks one process for each cell; it runs apart from the study itself.

jobs as JSON lines on stdin -> `perl train`, a process each -> ends as JSON lines on stdout

Importing takes longer than a short cell trains. A fork of a process that has imported, and done nothing else, starts
as a fresh one would: no thread of torch, no model, no GPU. When the study ends or is killed, stdin ends, and every
cell is asked to stop after its step, with a checkpoint.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, PerlError

if TYPE_CHECKING:
    from perl.policy.mapped_base import MappedBase

_LOOK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """What a forked process is to do.

    Attributes:
        name: Of the cell.
        arguments: As the command line has them, ``("train", ...)``, without the run folder; none: write the base that
            the others map.
        log: File for what it prints.
        output: The run folder.
        until: Step after which it is to stop, for the time being; None: it goes on to its end.
        base: Folder with the base to map; empty: it loads its own.
        model: The recipe's section ``model`` that the base is of.
    """

    name: str
    arguments: tuple[str, ...]
    log: str
    output: str
    until: int | None = None
    base: str = ""
    model: Any = None


Command = Callable[[list[str], str], int]
"""Runs a command line: its arguments, the program's name -> the exit code."""


def main(command: Command) -> None:
    """Serves jobs until stdin ends.

    Args:
        command: That of the program.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study says when it is over
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed
    import perl.trainer.trainer
    import perl.training.stages  # noqa: F401

    def report(line: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the study was killed; its cells still end in order
            reports.write(json.dumps(line) + "\n")

    _serve(command, report)


def _serve(command: Command, report: Callable[[dict[str, Any]], object]) -> None:
    running: dict[int, str] = {}
    woken, wake = os.pipe()
    alive = os.pipe()  # its end in this process and in all cells: who holds the base sees when the last has gone
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = selectors.DefaultSelector()
    waiting.register(0, selectors.EVENT_READ)
    waiting.register(woken, selectors.EVENT_READ)
    report({"ready": True})
    rest, open_, stopped = b"", True, False
    while open_ or running:
        for key, _ in waiting.select():
            if key.fd == woken:
                os.read(woken, 4096)
                _reap(running, report)
                continue
            read = os.read(0, 1 << 16)
            *lines, rest = (rest + read).split(b"\n")
            if not read:
                open_ = False
                waiting.unregister(0)
                _stop(running)
            for line in lines:
                given = json.loads(line)
                stopped = stopped or "stop" in given
                if "stop" in given:
                    _stop(running)
                elif stopped:  # it was on its way
                    report({"name": given["name"], "code": EXIT_INTERRUPTED, "cpu": 0.0, "peak": 0})
                else:
                    job = Job(**given)
                    running[_fork(job, command, alive)] = job.name


def _stop(running: dict[int, str]) -> None:
    """Asks every cell to stop after its step."""
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _reap(running: dict[int, str], report: Callable[[dict[str, Any]], object]) -> None:
    while running:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        name = running.pop(pid, None)
        if name is not None:
            cpu = usage.ru_utime + usage.ru_stime
            code = os.waitstatus_to_exitcode(status)
            report({"name": name, "code": code, "cpu": round(cpu, 3), "peak": usage.ru_maxrss * 1024})


def _fork(job: Job, command: Command, alive: tuple[int, int]) -> int:
    parent = os.getpid()
    return _forked(lambda: _work(job, command, parent, alive))


def _forked(work: Callable[[], int]) -> int:
    """Does it in a fork of this process, which ends with its exit code and without what this process does at its end.

    Returns:
        Process id of the fork.
    """
    pid = os.fork()
    if pid:
        return pid
    code = EXIT_FAILED
    try:
        code = work()
    except PerlError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 (a log)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _work(job: Job, command: Command, parent: int, alive: tuple[int, int]) -> int:
    """Trains a cell as the command line does, in a process that was just forked."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not end_with(parent):
        return EXIT_INTERRUPTED
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(log, number)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    _wait_for_folder(Path(job.output))
    from perl.policy.mapped_base import MappedBase, mapped
    from perl.recipe.sections import ModelSection

    base = MappedBase(Path(job.base), ModelSection(**job.model)) if job.base else None
    if base is not None and not job.arguments:
        os.close(alive[1])  # or its holder would wait for itself
        return share_base(base, alive[0])
    with mapped(base):
        return _trained(command, job.arguments, job.until, job.output)


def _trained(command: Command, arguments: Sequence[str], until: int | None, output: str) -> int:
    from perl.run.host import hosted_by
    from perl.training.studies.pause import PausedAfter

    with contextlib.nullcontext() if until is None else hosted_by(PausedAfter(until)):
        return command([*arguments, "-o", output], "perl")


def end_with(parent: int) -> bool:
    """Has this process asked to stop when the one that started it ends.

    Args:
        parent: Process id of that one.

    Returns:
        Whether it is still there.
    """
    with contextlib.suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid() == parent  # else it has gone before that


def share_base(base: "MappedBase", alive: int) -> int:
    """Puts a base once where all cells find it: on a CPU into a file, else into a process that holds it on the GPU.

    That process ends when the last one who may ask does. It alone looks for a GPU: torch refuses to use one in a fork
    of a process that has.

    Args:
        base: Where.
        alive: A pipe whose other end all processes have open that may ask for the base.

    Returns:
        An exit code, once it can be shared.
    """
    heard, tell = os.pipe()
    _forked(lambda: _write_or_hold(base, alive, lambda: _say(tell)))
    os.close(tell)
    return EXIT_DONE if os.read(heard, 1) else EXIT_FAILED  # nothing: it ended, and its log says why


def _write_or_hold(base: "MappedBase", alive: int, ready: Callable[[], None]) -> int:
    import torch

    from perl.policy.held_base import hold
    from perl.policy.mapped_base import write_mapped_base
    from perl.policy.model import load_base
    from perl.run.devices import accelerator

    device = accelerator()
    if device is None:
        write_mapped_base(load_base(base.section, torch.device("cpu")), base.folder)
        ready()
    else:
        hold(lambda there: load_base(base.section, there), device, base.folder, alive, ready)
    return EXIT_DONE


def _say(pipe: int) -> None:
    os.write(pipe, b"!")


def _wait_for_folder(folder: Path) -> None:
    """A study that was killed may have left a process here that still writes its checkpoint."""
    from filelock import FileLock, Timeout

    told = False
    while folder.is_dir():
        try:
            with FileLock(folder / ".lock", timeout=_LOOK_SECONDS):
                return
        except Timeout:
            if not told:
                print("waits until another process that trains here has ended", file=sys.stderr)  # noqa: T201 (a log)
            told = True
