"""The gate that every file passes before it leaves this machine.

folder, name in it -> bytes; name in the repository -> bytes, to mistakes, one a line

A file must have a name that we write, be no larger than such a file may be, be what its ending says, and hold nothing
that must not leave this machine. It is read once, and what was looked at is what is sent. Below its folder no link is
followed, and nothing but a regular file is read; the folder itself may be a link: the user named it.
"""

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import yaml

from perl.errors import Mistake, PerlError, first_line
from perl.hub.gate.leaks import MachineFacts, find_leaks, this_machine
from perl.recipe.assets import evaluation_tasks
from perl.recipe.plain_yaml import plain_value, refuse_tags

_SIMPLE = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


Expected = Mapping[str, int]
"""Pattern of a file's name in the repository -> bytes that it may have."""
EXPECTED: Expected = {
    r"adapter_model\.safetensors": 50_000_000_000,
    r"adapter_config\.json": 1_000_000,
    r"README\.md": 1_000_000,
    r"perl_recipe\.yaml": 200_000,
    r"perl_run\.json": 1_000_000,
    r"metrics\.jsonl": 20_000_000,
    r"eval/results\.json": 50_000_000,
    r"eval/samples\.jsonl": 50_000_000,
    rf"\.eval_results/{_SIMPLE}\.yaml": 100_000,
}
"""In a repository of an adapter; whoever reads one takes no larger files either."""
ZOO: Expected = {
    r"adapter_model\.safetensors": 50_000_000_000,
    r"adapter_config\.json": 1_000_000,
    r"[a-z0-9][a-z0-9._-]*\.json": 1_000_000,
    r"MODEL_ZOO\.md": 10_000_000,
    r"zoo\.(?:csv|html)": 50_000_000,
}
"""In a zoo."""
_NAME = re.compile(r"(?!\.{1,2}(?:/|$))[\w.-]+(?:/(?!\.{1,2}(?:/|$))[\w.-]+)*", re.ASCII)
_LARGEST_READ = 50_000_000_000  # bytes, where nothing else is said
_LARGEST_HEADER = 100_000_000  # of weights, as safetensors itself says
# What moves a terminal's cursor, or turns text around, so that it reads otherwise than it is.
_DECEITFUL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class MalformedFileError(ValueError):
    """A file is not what its ending says."""


def largest(name: str, among: Expected = EXPECTED) -> int | None:
    """Bytes that a file of this name may have; None: we publish none of this name."""
    fits = [most for pattern, most in among.items() if re.fullmatch(pattern, name)]
    return fits[0] if fits and is_simple_name(name) else None


def is_ours(name: str) -> bool:
    """Whether a file of a repository is one that we write, so that a push without it takes it away."""
    folder, _, file = name.rpartition("/")
    if folder == ".eval_results":  # others may have added scores of other benchmarks
        return file.removesuffix(".yaml") in evaluation_tasks()
    return largest(name) is not None


def gate_mistakes(
    files: Mapping[str, bytes], machine: MachineFacts | None = None, among: Expected = EXPECTED
) -> list[Mistake]:
    """Why files may not leave this machine.

    Args:
        files: Name in the repository -> content.
        machine: Whose folders, people and secrets to look for; None: this one.
        among: What may be published there.

    Returns:
        Nothing, if they may.
    """
    machine = machine if machine is not None else this_machine()
    mistakes: list[Mistake] = []
    for name, content in files.items():
        most = largest(name, among)
        if most is None:
            mistakes.append(Mistake("is not a file that perl publishes", repr(name)[1:-1][:200], "leave it out"))
        elif len(content) > most:
            mistakes.append(Mistake(f"has {len(content):,} bytes, at most {most:,} are published", name))
        else:
            try:
                mistakes += find_leaks(name, text_of(name, content), machine)
            except MalformedFileError as error:
                mistakes.append(Mistake(str(error), name))
    return mistakes


def text_of(name: str, content: bytes) -> str:
    """What a file says: of weights the header.

    Raises:
        MalformedFileError: It is not what its ending says.
    """
    kind = PurePosixPath(name).suffix
    if kind == ".safetensors":
        length = int.from_bytes(content[:8], "little")
        if len(content) < 8 or length > min(_LARGEST_HEADER, len(content) - 8):
            raise MalformedFileError("is not a valid safetensors file: it has no whole header")
        content = content[8 : 8 + length]
    try:
        text = content.decode("utf-8")
        if kind == ".jsonl":
            for line in filter(str.strip, text.split("\n")):
                json.loads(line)
        elif kind in (".json", ".safetensors"):
            json.loads(text)
        elif kind == ".yaml":
            refuse_tags(text, "")  # an alias may stand for any number of values
            plain_value(text)
    except UnicodeDecodeError:
        raise MalformedFileError("is not UTF-8") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise MalformedFileError(f"is not valid {kind[1:]}: {first_line(error)[:80]}") from None
    if kind == ".md" and (hidden := _DECEITFUL.search(text)):
        number = text.count("\n", 0, hidden.start()) + 1
        raise MalformedFileError(f"holds the control character U+{ord(hidden[0]):04X} in line {number}")
    return text


def is_simple_name(name: str) -> bool:
    """Whether a name in a folder stays in it: letters, digits, ``_``, ``.``, ``-``, and ``/`` between them."""
    return _NAME.fullmatch(name) is not None


def take(folder: Path, name: str, most: int = _LARGEST_READ) -> bytes:
    """Reads a file.

    Args:
        folder: Where it must lie.
        name: In the folder, with ``/``.
        most: Bytes that it may have.

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
            if facts.st_size > most:
                raise PerlError(f"has {facts.st_size:,} bytes, at most {most:,} are published", str(path))
            return file.read(facts.st_size)  # of a log that grows, what was there
    except OSError as error:
        raise PerlError(f"cannot be read: {error.strerror or error}", str(path)) from None


def names_in(folder: Path) -> Iterator[str]:
    """Names of what lies in a folder and the folders in it, as ``folder/name``, in order; no link is followed."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from (f"{path.name}/{name}" for name in names_in(path))
        else:
            yield path.name
