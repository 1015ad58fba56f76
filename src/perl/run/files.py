"""Files and folders that are there whole or not at all.

text -> file; finished folder -> its place; file -> bytes, SHA-256
"""

import hashlib
import os
import shutil
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    staged = path.with_name(f".{path.name}.tmp")
    staged.write_text(text, encoding="utf-8")
    os.replace(staged, path)


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
