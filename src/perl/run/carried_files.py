"""Files of a run whose processes have folders of their own: carried from one to the others where all must have them.

folder of each process -> the main process's, with all of them; or the other way round

Where the processes share one folder nothing of this is called. One file is in memory at a time, and it is there whole
or not at all.
"""

import os
import re
from pathlib import Path

import torch

from perl.run.files import write_file
from perl.run.joint_work import Processes, patient_group

# Of a file that is being written, beside its place: its name and the process.
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
        own = _files(folder)
    all_of_them = processes.collected(own)
    for name, source in processes.by_main(lambda: _missing(all_of_them)).items():
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


def _missing(files: list[list[str]]) -> dict[str, int]:
    """Files that the main process has not -> the first process that has them."""
    return {name: rank for rank, own in reversed(list(enumerate(files))) for name in own if name not in files[0]}


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
