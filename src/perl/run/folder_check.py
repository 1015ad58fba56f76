"""What opening a run folder would refuse, found out without writing or making anything.

Recipe -> nothing, or a RunFolderError

A dry run says so what the real command would say.
"""

import errno
import fcntl
import os
from pathlib import Path

from perl.recipe import Recipe
from perl.run.folder import LOCK, in_use, run_of, unwritable


def check_folder(recipe: Recipe) -> None:
    """Refuses what :func:`perl.run.folder.open_run` would refuse, in the same words.

    Raises:
        RunFolderError: The folder cannot be written, is in use, or holds something else.
    """
    path = recipe.output_dir
    reason = _why_unwritable(path)
    if reason is not None:
        raise unwritable(path, os.strerror(reason))
    if not path.exists():
        return
    if is_held(path / LOCK):
        raise in_use(path)
    run_of(path, recipe)


def _why_unwritable(path: Path) -> int | None:
    """The number of the error that making the folder, or a file in it, would end with."""
    try:
        if path.exists() and not path.is_dir():
            return errno.EEXIST
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    except OSError as error:  # a folder on the way may not be looked into, or has too long a name
        return error.errno
    if not there.is_dir():
        return errno.ENOTDIR
    return None if os.access(there, os.W_OK | os.X_OK) else errno.EACCES


def is_held(lock: Path) -> bool:
    """Whether a process holds a lock: a shared one, asked for and given back at once, is the only way to know."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or a disk without locks
        return False
    return False
