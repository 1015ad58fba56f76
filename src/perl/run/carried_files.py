"""Files of a run whose processes have folders of their own: carried from one to the others where all must have them.

folder of each process -> the main process's, with all of them; or the other way round

Where the processes share one folder nothing of this is called. Weights may be large, so what is carried is one piece of
one file at a time, and a file is there whole or not at all.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch

from perl.run.joint_work import Processes, patient_group

_PIECE_BYTES = 2**24
# Of a file that is being carried, beside its place: its name and the process.
_STAGED = re.compile(r"\..+\.\d+")


def gather_files(folder: Path, processes: Processes) -> None:
    """Brings the files of a folder that the main process has not to it, from whichever process has them.

    Args:
        folder: On each process; it may be absent there.
        processes: All of them call this at once.

    Raises:
        PerlError: One of them cannot read or write a file, or has ended.
    """
    if processes.count == 1:
        return
    with processes.failing_together():
        own = _sizes(folder)
    all_of_them = processes.collected(own)
    for source, name, size in processes.by_main(lambda: _missing(all_of_them)):
        _carry(folder / name, size, (source, 0), processes)
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
    for name, size in processes.by_main(lambda: sorted(_sizes(folder).items())):
        _carry(folder / name, size, (0, None), processes)
    processes.meet()


def _missing(sizes: list[dict[str, int]]) -> list[tuple[int, str, int]]:
    """Of the files that the main process has not: the first process that has it, its name, its size in bytes."""
    found: dict[str, tuple[int, str, int]] = {}
    for rank, own in enumerate(sizes[1:], 1):
        for name, size in own.items():
            if name not in sizes[0]:
                found.setdefault(name, (rank, name, size))
    return sorted(found.values())


def _carry(path: Path, size: int, way: tuple[int, int | None], processes: Processes) -> None:
    """Copies a file from one process to another, or to all others; all processes call this at once."""
    source, target = way
    gives = processes.rank == source
    takes = not gives and target in (None, processes.rank)
    with _opened(path, gives, takes, processes) as file:
        for begin in range(0, size, _PIECE_BYTES):
            count = min(_PIECE_BYTES, size - begin)
            with processes.failing_together():
                piece = _read(file, count) if gives and file else torch.empty(count, dtype=torch.uint8)
            processes.meet()  # an error of the piece before, or of this one, ends all of them here
            if target is None:
                torch.distributed.broadcast(piece, source, group=patient_group())
            elif gives:
                torch.distributed.send(piece, target, group=patient_group())
            elif takes:
                torch.distributed.recv(piece, source, group=patient_group())
            if takes:
                with processes.failing_together():
                    _write(file, piece)


@contextlib.contextmanager
def _opened(path: Path, gives: bool, takes: bool, processes: Processes) -> Iterator[IO[bytes] | None]:
    """The file to read from, or the one to write to, which takes its place once it is whole."""
    if not gives and not takes:
        yield None
        return
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.ExitStack() as opened:
        with processes.failing_together():
            if takes:
                path.parent.mkdir(parents=True, exist_ok=True)
                opened.callback(staged.unlink, missing_ok=True)
            file = opened.enter_context((staged if takes else path).open("wb" if takes else "rb"))
        yield file
        if takes:
            with processes.failing_together():
                file.close()
                os.replace(staged, path)


def _read(file: IO[bytes], count: int) -> torch.Tensor:
    content = bytearray(file.read(count))
    if len(content) != count:
        raise OSError(f"{file.name} has become shorter")
    return torch.frombuffer(content, dtype=torch.uint8)


def _write(file: IO[bytes] | None, piece: torch.Tensor) -> None:
    assert file is not None  # noqa: S101 (of one that takes)
    file.write(piece.numpy().data)


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of the files below a folder, by their place in it; none where it is absent.

    What a killed process has left half carried is none of them, nor is a link to nothing.
    """
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            if path.is_file() and not _STAGED.fullmatch(name):
                found[str(path.relative_to(folder))] = path.stat().st_size
    return found
