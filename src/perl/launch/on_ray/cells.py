"""A cell of a study on a node of a Ray cluster: its folder there, its process, and what comes back of both.

command, files of the run so far -> process on a node -> files in pieces, what it printed, how it ended

The cell is a process of its own, as everywhere: a task of Ray waits for it, asks it to stop when the study does, and
hands its run folder back. A node that is lost takes what it had in hand, and nothing else.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from perl.errors import EXIT_DONE
from perl.launch.on_ray.own_cluster import own_folder
from perl.run.folder import LOCK

_PIECE_BYTES = 2**24
_LOOK_SECONDS = 1.0
# Of an answer of the study's desk, and of a study that gives none before its cells come home.
_ANSWER_SECONDS, _PATIENCE_SECONDS = 30.0, 600.0

BEGUN, PIECE, PRINTED, ENDED = "begun", "piece", "printed", "ended"
"""Kinds of what comes back: (kind,), (kind, name, bytes), (kind, bytes), (kind, :class:`End`)."""


@dataclass(frozen=True)
class End:
    """How the process of a cell ended.

    Attributes:
        code: Its exit code.
        cpu: Core-seconds.
        peak: Bytes.
        lost: It was stopped since nothing was heard of the study any more.
    """

    code: int
    cpu: float
    peak: int
    lost: bool


@dataclass(frozen=True)
class RemoteCell:
    """What a node is to do.

    Attributes:
        name: Of the run folder.
        program: Arguments of Python; after them come the id of the process that starts it, and the run folder.
        files: Of the run as far as it is done: pieces of each in Ray's object store, by their place in the folder.
        threads: CPU threads.
        cwd: In which relative paths are meant; None: where Ray has put the task.
    """

    name: str
    program: Sequence[str]
    files: Mapping[str, Sequence[Any]]
    threads: int
    cwd: str | None


def pieces(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a folder in pieces of bounded size, with their place in it; an empty file is one piece."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != LOCK:
            name = str(path.relative_to(folder))
            with path.open("rb") as file:
                yield name, file.read(_PIECE_BYTES)
                while piece := file.read(_PIECE_BYTES):
                    yield name, piece


def add_piece(folder: Path, name: str, content: bytes) -> None:
    """Puts a piece behind those of the same file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(content)


def train_cell(cell: RemoteCell, desk: Any) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401 (a handle of Ray)
    """Trains a cell, or goes on with it; run on a node, as a task.

    Args:
        cell: What is to be done.
        desk: Says whether the study stops.

    Yields:
        What comes back; the first is that it has begun, the last is how the process ended.
    """
    yield (BEGUN,)
    with own_folder("perl-rl-cell-") as own:
        folder, printed = own / cell.name, own / "printed"
        for name, parts in cell.files.items():
            for part in parts:
                add_piece(folder, name, ray.get(part))
        with printed.open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 (a fixed program)
                [sys.executable, *cell.program, str(os.getpid()), str(folder)],
                cwd=cell.cwd,
                env={**os.environ, "OMP_NUM_THREADS": str(cell.threads)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            ended = _ended(process, desk)
        finally:
            if process.returncode is None:
                process.kill()
        yield from ((PIECE, name, content) for name, content in pieces(folder))
        yield PRINTED, printed.read_bytes()
        yield ENDED, ended


def _ended(process: subprocess.Popen[bytes], desk: Any) -> End:  # noqa: ANN401 (a handle of Ray)
    """Waits for a process, and asks it to stop when the study does, or when nothing is heard of the study for long."""
    told = lost = False
    heard = time.monotonic()
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = code = os.waitstatus_to_exitcode(status)
            cpu = round(usage.ru_utime + usage.ru_stime, 3)
            return End(code, cpu, usage.ru_maxrss * 1024, lost and code != EXIT_DONE)
        if not told:
            try:
                told = ray.get(desk.stop_asked.remote(), timeout=_ANSWER_SECONDS)
                heard = time.monotonic()
            except RayError:  # the network between the two may be back in a minute
                told = lost = time.monotonic() - heard > _PATIENCE_SECONDS
            if told:
                process.send_signal(signal.SIGTERM)
        time.sleep(_LOOK_SECONDS)
