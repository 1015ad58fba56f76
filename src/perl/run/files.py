"""Files and folders that are there whole or not at all.

text -> file; files -> folder in its place; file -> bytes, SHA-256
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    staged = path.with_name(f".{path.name}.tmp")
    staged.write_text(text, encoding="utf-8")
    os.replace(staged, path)


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file whole or not at all, whatever other processes write the same one."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(staged)
        os.replace(staged, path)
    finally:
        with contextlib.suppress(OSError):
            staged.unlink()


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty folder to write to, which takes the place of an older one if nothing is raised, and else is deleted.

    Where the move itself fails or is interrupted, the finished folder stays as ``.NAME.tmp``; the older may be gone.
    """
    staged = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        yield staged
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    replace_folder(staged, path)


def replace_folder(staged: Path, path: Path) -> None:
    """Moves a finished folder to its place, over an older one."""
    if path.exists():
        shutil.rmtree(path)
    os.replace(staged, path)


def read_regular(path: Path) -> bytes:
    """A file's bytes; nothing is waited for, as from a pipe.

    Raises:
        OSError: It is absent, not a regular file, or cannot be read.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is no regular file")
    return path.read_bytes()


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
