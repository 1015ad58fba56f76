"""Files and folders that are there whole or not at all, and our own JSON files, which may be cut short or edited.

text -> file; files -> folder in its place; file -> bytes, SHA-256; JSON -> plain values or a ``ValueError``
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from perl.errors import EXIT_FAILED, FileAccessError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE}
_OUT_OF_REACH = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
    *(errno.ELOOP, errno.EEXIST),
}
# What safetensors, tokenizers and PyTorch make of an error of the system: texts without its number as a value.
_NUMBER = re.compile(r"\(os error (\d+)\)")
_TORCH = re.compile(r"inline_container\.cc.*unexpected pos")
_WRITING = "cannot be written: "
_LARGEST = 2**63
_DEEPEST = 64


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    write_file(path, lambda staged: staged.write_text(text, encoding="utf-8"))


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file whole or not at all, whatever other processes write the same one.

    Raises:
        OSError: It cannot be written; the error names this file, not the one that would have taken its place.
    """
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with named(path):
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
    with named(path):
        try:
            staged.mkdir(parents=True)
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


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """What the system refuses names the file that was meant: safetensors names none, and others a staged one."""
    try:
        yield
    except Exception as error:
        number = _error_number(error)
        if number is None:
            raise
        raise OSError(number, _WRITING + os.strerror(number), str(path)) from error


def file_access_error(error: BaseException) -> FileAccessError | None:
    """What an error says of a disk or a file, as one line for the user; None: it is of something else."""
    number = _error_number(error)
    if number is None:
        return None if error.__cause__ is None else file_access_error(error.__cause__)
    file = getattr(error, "filename", None)
    where = os.fsdecode(file) if isinstance(file, str | bytes) else "a file"
    reason = (isinstance(error, OSError) and error.strerror) or os.strerror(number)
    if not reason.startswith(_WRITING):
        reason = (_WRITING if number in {*_FULL, errno.EROFS} else "cannot be read or written: ") + reason
    if number not in _FULL:
        return FileAccessError(reason, where, str(error) if where == "a file" else "")
    told = FileAccessError(reason, where, "make room; the same command goes on")
    told.exit_code = EXIT_FAILED
    return told


def _error_number(error: BaseException) -> int | None:
    """The system's number of what went wrong with a disk or a file; None: it is of something else."""
    text = str(error)
    found = _NUMBER.search(text)
    number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
    if isinstance(error, RuntimeError) and _TORCH.search(text):
        number = errno.ENOSPC
    return number if number in _FULL | _OUT_OF_REACH else None


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


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:  # noqa: ANN401 (JSON)
    """The value that a text holds: numbers below 2**63, texts of Unicode, nothing nested without end.

    Args:
        text: Of a file.
        finite: Refuse infinities and NaN, as Python writes them.

    Raises:
        ValueError: It is no such JSON.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(decoded, parse_constant=_no_number if finite else None)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check(value, 0, finite=finite)
    return value


def parse_mapping(text: str | bytes, *, finite: bool = True) -> dict[str, Any]:
    """As :func:`parse_json`, of a text that must hold a mapping.

    Raises:
        ValueError: It holds none.
    """
    value = parse_json(text, finite=finite)
    if not isinstance(value, dict):
        raise ValueError("it is not a mapping")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _check(value: Any, depth: int, *, finite: bool) -> None:  # noqa: ANN401 (JSON)
    if depth > _DEEPEST:
        raise ValueError("it is nested too deeply")
    if isinstance(value, dict | list):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            _check(inner, depth + 1, finite=finite)
    elif isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("a text in it is not Unicode") from None
    elif isinstance(value, int if not finite else int | float) and not abs(value) < _LARGEST:
        raise ValueError("a number in it is too large")
