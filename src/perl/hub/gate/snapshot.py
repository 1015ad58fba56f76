"""Reads a file of a folder once, so that what is looked at is what is sent.

folder, name in it -> bytes

Below the folder no link is followed, neither to a file nor to a folder, and nothing but a regular file is read. The
folder itself may be a link: the user named it.
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from perl.errors import PerlError

_NAME = re.compile(r"(?!\.{1,2}(?:/|$))[\w.-]+(?:/(?!\.{1,2}(?:/|$))[\w.-]+)*", re.ASCII)
LARGEST = 50_000_000_000
"""Bytes of a file, where nothing else is said."""
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


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
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts):
        raise PerlError(f"{name[:80]!r} is not the name of a file in it", str(folder))
    where = str(folder / name)
    with ExitStack() as opened:
        try:
            file = _open(folder, parts, opened)
            size = os.fstat(file).st_size
            if size > largest:
                raise PerlError(f"has {size:,} bytes, at most {largest:,} are published", where)
            with os.fdopen(os.dup(file), "rb") as reader:
                return reader.read(size)  # of a log that grows, what was there
        except OSError as error:
            raise PerlError(f"cannot be read: {error.strerror or error}", where) from None


def names_in(folder: Path, *, deep: bool = False) -> Iterator[tuple[str, bool]]:
    """Names of what lies in a folder, in order, and whether it is a regular file; no link is followed.

    Args:
        folder: If there is none, nothing lies in it.
        deep: With what lies in its folders, as ``folder/name``.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if deep and entry.is_dir(follow_symlinks=False):
            yield from ((f"{entry.name}/{name}", regular) for name, regular in names_in(Path(entry.path), deep=True))
        else:
            yield entry.name, entry.is_file(follow_symlinks=False)


def _open(folder: Path, parts: list[str], opened: ExitStack) -> int:
    """A descriptor of the file, reached from folder to folder without following a link."""
    above, path = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY), folder
    opened.callback(os.close, above)
    for part in parts[:-1]:
        path = path / part
        _refuse_strange(os.stat(part, dir_fd=above, follow_symlinks=False), path, file=False)
        above = os.open(part, _OPEN | os.O_DIRECTORY, dir_fd=above)
        opened.callback(os.close, above)
    path = path / parts[-1]
    found = os.stat(parts[-1], dir_fd=above, follow_symlinks=False)
    _refuse_strange(found, path, file=True)  # before it is opened: a pipe would wait for somebody to write
    file = os.open(parts[-1], _OPEN, dir_fd=above)
    opened.callback(os.close, file)
    if not os.path.samestat(found, os.fstat(file)):
        raise PerlError("was exchanged while it was read", str(path))
    return file


def _refuse_strange(found: os.stat_result, path: Path, *, file: bool) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise PerlError("is a link, and links are not published", str(path), "copy what it names there")
    if file and not stat.S_ISREG(found.st_mode):
        raise PerlError("is not a regular file", str(path))
    if not file and not stat.S_ISDIR(found.st_mode):
        raise PerlError("is not a folder", str(path))
