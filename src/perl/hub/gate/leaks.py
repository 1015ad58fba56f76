"""What must not leave this machine: paths, names of people and machines, secrets, pickles.

files by name -> mistakes, one a line

Of weights only the header is read; their numbers are no text.
"""

import getpass
import re
import socket
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path, PurePosixPath

from perl.errors import Mistake
from perl.hub.gate.file_kinds import MalformedFileError, Passage, lines_of, read_passages
from perl.hub.gate.paths import find_paths
from perl.hub.gate.tokens import find_secrets, own_secrets

_URL = re.compile(r"https?://[^\s\"')\]>]+")
# Accounts that are nobody's name.
_NOBODY = {"root", "user", "ubuntu", "admin", "runner", "nobody", "jovyan", "home", "build", "docker", "localhost"}
_SHORTEST_NAME = 3
_LONGEST_SHOWN = 80
_SECRET = ""
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz", ".h5", ".msgpack")
"""Endings of files that run code when they are loaded, or may."""
_PICKLED, _ARCHIVE = re.compile(rb"\x80[\x02-\x05]"), b"PK\x03\x04"


@dataclass(frozen=True)
class Machine:
    """What is this machine's and nobody else's business.

    Attributes:
        folders: Absolute paths: the run's, the current one, the home folder.
        users: Account names.
        hosts: Names of the machine.
        secrets: Value -> whose it is; compared, never shown.
    """

    folders: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    secrets: Mapping[str, str] = field(default_factory=dict)


def this_machine(*folders: Path) -> Machine:
    """This machine with the secrets of this process, and further folders on it."""
    home = Path.home()
    try:
        account = getpass.getuser()
    except (OSError, KeyError):  # no such account, as in some containers
        account = ""
    absolute = {str(path.resolve()) for path in (home, Path.cwd(), *folders)}
    owners = {path.parts[2] for path in map(Path, absolute) if path.parts[1:2] in (("home",), ("Users",), ("users",))}
    users = {name for name in (home.name, account, *owners) if name.lower() not in _NOBODY}
    host = socket.gethostname()
    # A plain word may be said for other reasons.
    telling = host.lower() not in _NOBODY and re.search(r"[\d.-]", host) and len(host) > _SHORTEST_NAME
    return Machine(
        folders=tuple(sorted(path for path in absolute if path.count("/") > 1 or "\\" in path)),
        users=tuple(sorted(name for name in users if len(name) >= _SHORTEST_NAME)),
        hosts=(host,) if telling else (),
        secrets=own_secrets(),
    )


def find_leaks(files: Mapping[str, bytes], machine: Machine | None = None) -> list[Mistake]:
    """What must not be published, one mistake for each file and line and kind.

    Args:
        files: Name -> content.
        machine: Whose folders, people and secrets to look for; None: this one.
    """
    machine = machine if machine is not None else this_machine()
    found: list[Mistake] = []
    for name, content in files.items():
        found += _pickles(name, content)
        try:
            passages = read_passages(name, content)
        except MalformedFileError:
            passages = lines_of(content)
        found += _in_passages(name, [Passage(name), *passages], machine)
    return found


def _in_passages(name: str, passages: Sequence[Passage], machine: Machine) -> Iterator[Mistake]:
    """All are searched at once, which is quick; then it is looked up where each find lies."""
    text = "\n".join(passage.text for passage in passages)
    starts = [0, *accumulate(len(passage.text) + 1 for passage in passages)]
    said = set()
    for start, kind, shown in sorted(_in_text(text, machine)):
        line = passages[bisect_right(starts, start) - 1].find_line()
        where = f"{name}:{line}" if line else name
        if (where, kind) not in said:
            said.add((where, kind))
            yield Mistake(shown if kind == _SECRET else f"{kind}: {shown[:_LONGEST_SHOWN]}", where)


def _in_text(text: str, machine: Machine) -> Iterator[tuple[int, str, str]]:
    """Where something begins, what kind it is of, and what is shown of it."""
    yield from ((start, _SECRET, what) for start, what in find_secrets(text, machine.secrets))
    # An address on the web has a path too, and may have anybody's name.
    plain = _URL.sub(lambda match: " " * len(match.group()), text)
    folders = [match for folder in machine.folders for match in re.finditer(re.escape(folder), plain)]
    paths = [(match.start(), match.group()) for match in folders]
    paths += [found for found in find_paths(plain) if not any(m.start() <= found[0] < m.end() for m in folders)]
    for start, path in paths:
        yield start, "names a path of this machine", path
    for user in map(re.escape, machine.users):
        for match in re.finditer(rf"(?<=[/\\]){user}(?=[/\\])|(?<!\w){user}(?=@)|~{user}\b", plain):
            yield match.start(), "names a user of this machine", match.group()
    for host in machine.hosts:
        for match in re.finditer(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", text):
            yield match.start(), "names this machine", match.group()


def _pickles(name: str, content: bytes) -> Iterator[Mistake]:
    """By name and by content: a pickle runs code when it is loaded."""
    an_archive = content.startswith(_ARCHIVE) and (b"data.pkl" in content or b".pkl" in content)
    pickled = not name.endswith((".safetensors", ".png")) and _PICKLED.match(content) is not None
    if PurePosixPath(name).suffix.lower() in PICKLES or an_archive or pickled:
        yield Mistake("is a pickle, which runs code when it is loaded", name, "safetensors only")
