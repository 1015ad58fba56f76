"""The folder through which servers read updates: how one is written, and what runs have left there that have ended.

Update -> folder, whole or not there; folder -> runs whose owner is dead

A run that is killed leaves its updates in the folder that it shares with the servers, and their names on the servers.
Each run holds a file there: locked, which ends with its process, for those on the same machine; touched again and again
for those on others. An owner that cannot be judged is taken to live.
"""

import contextlib
import errno
import fcntl
import json
import os
import platform
import re
import shutil
import tempfile
import threading
from pathlib import Path

import torch
from safetensors.torch import save, save_file

from perl.errors import PerlError
from perl.rollouts.engine import Update
from perl.rollouts.vllm.http import PROBE
from perl.run.files import replace_folder

TOUCH_SECONDS = 20.0
STALE_SECONDS = 600.0
"""An owner on another machine whose file was not touched for so long is dead."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_SUFFIX = ".owner"
_ADAPTER, _ADAPTER_CONFIG, _WEIGHTS = "adapter_model.safetensors", "adapter_config.json", "model.safetensors"
_METADATA = {"format": "pt"}
_NAME = re.compile(r"(perl-[0-9a-f]{8})-[a-z]+[0-9]*")


def update_files(update: Update) -> dict[str, bytes]:
    """The files of an update, by their place in its folder."""
    return {
        name: content.encode() if isinstance(content, str) else save(content, _METADATA)
        for name, content in _contents(update).items()
    }


def write_update(update: Update, folder: Path) -> Path:
    """The update's folder, moved into place whole: a server may look at any time, through any file system.

    Raises:
        PerlError: The folder cannot be written.
    """
    staged, target = folder / f".{update.name}.tmp", folder / update.name
    contents = _contents(update)
    try:
        shutil.rmtree(staged, ignore_errors=True)
        for name, content in contents.items():
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                (staged / name).write_text(content)
            else:
                save_file(content, staged / name, _METADATA)
        for path in [*staged.rglob("*"), staged]:
            _flush(path)
        replace_folder(staged, target)
        _flush(folder)
    except OSError as error:
        raise PerlError(f"cannot write updates: {error}", str(folder)) from error
    return target


def _contents(update: Update) -> dict[str, str | dict[str, torch.Tensor]]:
    """Text or tensors of each file; these on the CPU, in memory of their own, as safetensors wants them."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in update.tensors.items()}
    alone = {name: t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for name, t in tensors.items()}
    if update.form == "adapter":
        return {_ADAPTER: alone, _ADAPTER_CONFIG: json.dumps(dict(update.config), indent=2) + "\n"}
    return {_WEIGHTS: alone, f"{PROBE}/{_WEIGHTS}": {}}


def _flush(path: Path) -> None:
    """Returns when a file or the names in a folder are on the disk, where the file system reports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def run_of(name: str) -> str | None:
    """The run that an update is of, by its name; None: the name is not that of a run."""
    found = _NAME.fullmatch(name)
    return found[1] if found else None


class Owner:
    """The mark of a run that lives, until it is released or the process ends."""

    def __init__(self, folder: Path, run: str) -> None:
        """Marks the folder as in use.

        Raises:
            OSError: The folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / (run + _SUFFIX)
        self._file = self._path.open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)  # another run may hold it for a moment, to see whether it can
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # a file system without locks: the rule for other machines holds
                raise
        json.dump({"machine": _machine(), "process": os.getpid()}, self._file)
        self._file.flush()
        self._released = threading.Event()
        threading.Thread(target=self._touch, name="perl-sync-owner", daemon=True).start()

    def release(self, forgotten: bool) -> None:
        """Ends it.

        Args:
            forgotten: Nothing is left of the run; else the next one has to look for it.
        """
        self._released.set()
        if forgotten:
            self._path.unlink(missing_ok=True)
        self._file.close()

    def _touch(self) -> None:
        while not self._released.wait(TOUCH_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self._path)


def dead_runs(folder: Path) -> list[str]:
    """Runs whose updates are in a folder, or were, and that have ended without taking them away."""
    try:
        found = sorted(folder.glob("perl-*" + _SUFFIX))
    except OSError:
        return []
    return [path.stem for path in found if _is_dead(path)]


def is_dead(folder: Path, run: str) -> bool:
    """Whether a run has left updates in a folder and ended; False where that is unknown."""
    return _is_dead(folder / (run + _SUFFIX))


def clear(folder: Path, run: str) -> None:
    """Deletes what a dead run left in a folder."""
    for path in [*folder.glob(f"{run}-*"), *folder.glob(f".{run}-*.tmp")]:
        shutil.rmtree(path, ignore_errors=True)
    (folder / (run + _SUFFIX)).unlink(missing_ok=True)


def _is_dead(path: Path) -> bool:
    try:
        with path.open("r+") as file:
            owner = file.read()
            if owner and json.loads(owner).get("machine") != _machine():
                with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".now-") as now:  # by the file system's clock
                    return os.stat(now.name).st_mtime - path.stat().st_mtime > STALE_SECONDS
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return bool(owner)  # one that is only being written has not begun
    except (OSError, ValueError, AttributeError):  # locked, not there, not ours to open, or not read as what it is
        return False


def _machine() -> str:
    """Tells machines apart, and not the containers of one."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()
