"""Files of a run whose processes have folders of their own: carried from one to the others where all must have them.

folder of each process -> the main process's, with all of them; or the other way round

Where the processes share one folder nothing of this is called.
"""

import os
from functools import partial
from pathlib import Path

from perl.run.joint_work import Processes


def gather_files(folder: Path, processes: Processes) -> None:
    """Brings the files of a folder that the main process has not to it, from whichever process has them.

    Args:
        folder: On each process; it may be absent there.
        processes: All of them call this at once.
    """
    known = processes.by_main(lambda: sorted(_files(folder)))
    own = {name: (folder / name).read_bytes() for name in sorted(_files(folder) - set(known))}
    for part in processes.collected(own if not processes.main else {}):
        _write(folder, part)
    processes.meet()


def spread_files(folder: Path, processes: Processes) -> None:
    """Gives every process the files of a folder as the main process has them; others that it has stay.

    Args:
        folder: On each process.
        processes: All of them call this at once.
    """
    if processes.count == 1:
        return
    names = processes.by_main(lambda: sorted(_files(folder)))
    for name in names:  # one at a time: weights may be large
        content = processes.by_main(partial(Path.read_bytes, folder / name))
        if not processes.main:
            _write(folder, {name: content})
    processes.meet()


def _files(folder: Path) -> set[str]:
    """Files below a folder, by their place in it; none where it is absent."""
    found = set()
    for place, _, names in os.walk(folder):
        found |= {str(Path(place, name).relative_to(folder)) for name in names}
    return found


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
