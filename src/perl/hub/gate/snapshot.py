"""Reads a file of a folder once, so that what is looked at is what is sent.

folder, name in it -> bytes

Below the folder no link is followed, and nothing but a regular file is read. The folder itself may be a link: the user
named it.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from perl.errors import PerlError

_NAME = re.compile(r"(?!\.{1,2}(?:/|$))[\w.-]+(?:/(?!\.{1,2}(?:/|$))[\w.-]+)*", re.ASCII)
LARGEST = 50_000_000_000
"""Bytes of a file, where nothing else is said."""


def is_simple_name(name: str) -> bool:
    """Whether a name in a folder stays in it: letters, digits, ``_``, ``.``, ``-``, and ``/`` between them."""
    return _NAME.fullmatch(name) is not None


def take(folder: Path, name: str, largest: int = LARGEST) -> bytes:
    """Reads a file.

    Args:
        folder: Where it must lie.
        name: In the folder, with ``/``.
        largest: Bytes that it may have.

    Raises:
        PerlError: There is none, it is a link or lies behind one, is not a regular file, or is too large.
    """
    path = folder
    for part in name.split("/"):
        if part in ("", ".", "..") or "\\" in part or "\0" in part:
            raise PerlError(f"{name[:80]!r} is not the name of a file in it", str(folder))
        path = path / part
        if path.is_symlink():
            raise PerlError("is a link, and links are not published", str(path), "copy what it names there")
    try:
        # Without waiting: a pipe would wait for somebody to write.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise PerlError("is not a regular file", str(path))
            if facts.st_size > largest:
                raise PerlError(f"has {facts.st_size:,} bytes, at most {largest:,} are published", str(path))
            return file.read(facts.st_size)  # of a log that grows, what was there
    except OSError as error:
        raise PerlError(f"cannot be read: {error.strerror or error}", str(path)) from None


def names_in(folder: Path, *, deep: bool = False) -> Iterator[str]:
    """Names of what lies in a folder, in order; no link is followed.

    Args:
        folder: If there is none, nothing lies in it.
        deep: With what lies in its folders, as ``folder/name``.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if deep and path.is_dir() and not path.is_symlink():
            yield from (f"{path.name}/{name}" for name in names_in(path, deep=True))
        else:
            yield path.name
