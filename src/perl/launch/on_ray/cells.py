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

from perl.launch.on_ray.own_cluster import own_folder
from perl.run.folder import LOCK

_PIECE_BYTES = 2**24
_LOOK_SECONDS = 1.0

PIECE, PRINTED, ENDED = "piece", "printed", "ended"
"""Kinds of what comes back: (kind, name, bytes), (kind, bytes), (kind, exit code, core-seconds, bytes)."""


@dataclass(frozen=True)
class RemoteCell:
    """What a node is to do.

    Attributes:
        name: Of the run folder.
        program: Arguments of Python; after them comes the run folder.
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
        What comes back; the last is how the process ended.
    """
    with own_folder("perl-rl-cell-") as own:
        folder, printed = own / cell.name, own / "printed"
        for name, parts in cell.files.items():
            for part in parts:
                add_piece(folder, name, ray.get(part))
        with printed.open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 (a fixed program)
                [sys.executable, *cell.program, str(folder)],
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
        yield ENDED, *ended


def _ended(process: subprocess.Popen[bytes], desk: Any) -> tuple[int, float, int]:  # noqa: ANN401 (a handle of Ray)
    """Waits for a process, and asks it to stop when the study does: its exit code, core-seconds, peak of bytes."""
    told = False
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, round(usage.ru_utime + usage.ru_stime, 3), usage.ru_maxrss * 1024
        if not told and ray.get(desk.stop_asked.remote()):
            process.send_signal(signal.SIGTERM)
            told = True
        time.sleep(_LOOK_SECONDS)
