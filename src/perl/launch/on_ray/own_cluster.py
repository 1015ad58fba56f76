"""A Ray cluster of this machine alone, that a run starts for itself: its folder, its processes, what it says.

dead runs' folders -> deleted; own folder -> while the run lasts; Ray's processes -> in a session of their own
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import ray

_PREFIX = "perl-ray-"
_OWNER = ".owner"
# Of Ray's logs, the largest part that is kept of each file: its end.
_KEPT_BYTES = 2**20


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for Ray that no other program takes for the cluster of this machine; it is deleted after the block.

    Those that killed runs have left are deleted too: a run holds a lock in its own, which ends with its process.
    """
    place = Path(tempfile.gettempdir())
    for left in place.glob(f"{_PREFIX}*"):
        if _is_dead(left):
            shutil.rmtree(left, ignore_errors=True)
    own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    with (own / _OWNER).open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        owner.write(str(os.getpid()))
        owner.flush()
        try:
            yield own
        finally:
            shutil.rmtree(own, ignore_errors=True)


def _is_dead(folder: Path) -> bool:
    """Whether a folder is ours and its run has ended; False where that is unknown, or it is only being made."""
    try:
        if folder.lstat().st_uid != os.getuid():
            return False
        with (folder / _OWNER).open("r+") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return bool(owner.read())
    except OSError:  # locked, or without an owner
        return False


@contextlib.contextmanager
def out_of_reach_of_signals() -> Iterator[None]:
    """Inside, Ray starts its processes in sessions of their own; they end with this process all the same.

    What is sent to the group of this process, as by a terminal or a batch system, would end them before this one has
    heard of it and taken a checkpoint. Ray has no setting for that.
    """
    from ray._private import services

    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


@contextlib.contextmanager
def silent_ray() -> Iterator[None]:
    """Inside, what Ray prints about lost workers does not come between the lines of the run, which says it itself."""
    worker = ray._private.worker
    known = worker._worker_logs_enabled
    worker._worker_logs_enabled = False
    try:
        yield
    finally:
        worker._worker_logs_enabled = known


def keep_logs(logs: Path, folder: Path) -> Path:
    """Copies the ends of what Ray and the processes have printed out of a folder that will be deleted.

    Args:
        logs: Ray's folder of logs.
        folder: Which takes them; it need not exist.

    Returns:
        The folder.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in sorted(path for path in logs.glob("*") if path.suffix in (".err", ".out", ".log")):
        with contextlib.suppress(OSError), file.open("rb") as written:
            size = os.fstat(written.fileno()).st_size
            written.seek(max(0, size - _KEPT_BYTES))
            if size:
                (folder / file.name).write_bytes(written.read())
    return folder
