"""What must not leave this machine: paths, names of people and machines, tokens, pickles.

files by name -> problems, one a line

Of weights only the header is read; their numbers are no text. Knows nothing of runs or of the Hub.
"""

import getpass
import re
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from perl.errors import Problem

ROOTS = (
    "home|Users|root|tmp|var|private|mnt|media|data|scratch|work|workspace|opt|srv|usr|etc|content|kaggle|gpfs|lustre|"
    "fsx|nfs|storage|projects?"
)
"""Names of folders at the root with which a path of somebody's machine begins, as a pattern."""
_PATHS = (
    rb"(?<![\w./])/(?:" + ROOTS.encode() + rb")/[\w.~-]+[\w./~-]*",
    rb"(?<![\w.])[A-Za-z]:\\{1,2}(?:Users|Documents and Settings|home|work|data|tmp|Temp)\\{1,2}[^\\\s\"']+",
    rb"file:///?[^\s\"')]+",
)
_TOKENS = {
    "the Hub": rb"\bhf_[A-Za-z0-9]{20,}",
    "the Hub (organisation)": rb"\bapi_org_[A-Za-z0-9]{10,}",
    "an API": rb"\bsk-[A-Za-z0-9_-]{16,}",
    "GitHub": rb"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})",
    "AWS": rb"\bAKIA[0-9A-Z]{16}\b",
    "Slack": rb"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "Weights & Biases": rb"(?:\bwandb_v1_\w{20,}|(?i:api_?key)[\"']?\s*[:=]\s*[\"']?[0-9a-f]{40}\b)",
    "somebody": rb"-----BEGIN [A-Z ]*PRIVATE KEY-----",
}
_URL = re.compile(rb"https?://[^\s\"')\]>]+")
# Accounts that are nobody's name.
_NOBODY = {"root", "user", "ubuntu", "admin", "runner", "nobody", "jovyan", "home", "build", "docker", "localhost"}
_SHORTEST_NAME = 3
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
        tokens: That it holds; compared, never shown.
    """

    folders: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()


def this_machine(*folders: Path, tokens: Collection[str] = ()) -> Machine:
    """This machine, and further folders on it."""
    home = Path.home()
    try:
        account = getpass.getuser()
    except (OSError, KeyError):  # no such account, as in some containers
        account = ""
    absolute = {str(path.resolve()) for path in (home, Path.cwd(), *folders)}
    owners = {path.parts[2] for path in map(Path, absolute) if path.parts[1:2] in (("home",), ("Users",))}
    users = {name for name in (home.name, account, *owners) if name.lower() not in _NOBODY}
    host = socket.gethostname()
    # A plain word may be said for other reasons.
    hosts = (
        {host} if host.lower() not in _NOBODY and re.search(r"[\d.-]", host) and len(host) > _SHORTEST_NAME else set()
    )
    return Machine(
        folders=tuple(sorted(path for path in absolute if path.count("/") > 1 or "\\" in path)),
        users=tuple(sorted(name for name in users if len(name) >= _SHORTEST_NAME)),
        hosts=tuple(sorted(hosts)),
        tokens=tuple(sorted(tokens)),
    )


def find_leaks(files: Mapping[str, bytes], machine: Machine | None = None) -> list[Problem]:
    """What must not be published, one problem for each file and line and kind.

    Args:
        files: Name -> content.
        machine: Whose folders, people and tokens to look for; None: this one.
    """
    machine = machine if machine is not None else this_machine()
    found = []
    for name, content in files.items():
        found += list(_pickles(name, content))
        text = _header(content) if name.endswith(".safetensors") else content
        searches = list(_searches(machine))
        for number, line in enumerate([name.encode(), *text.split(b"\n")]):
            where = f"{name}:{number}" if number else name
            found += list(_in_line(line, where, searches))
    return found


@dataclass(frozen=True)
class _Search:
    pattern: re.Pattern[bytes]
    says: str
    shown: bool
    in_addresses: bool


def _searches(machine: Machine) -> Iterator[_Search]:
    for who, token in _TOKENS.items():
        yield _Search(re.compile(token), f"holds what looks like a token of {who}", shown=False, in_addresses=True)
    for secret in machine.tokens:
        yield _Search(re.compile(re.escape(secret.encode())), "holds your token", shown=False, in_addresses=True)
    folders = [re.escape(folder.encode()) for folder in machine.folders]
    for path in (*folders, *_PATHS):
        yield _Search(re.compile(path), "names a path of this machine", shown=True, in_addresses=False)
    for user in machine.users:
        name = re.escape(user.encode())
        between = rb"(?<=[/\\])" + name + rb"(?=[/\\])|(?<!\w)" + name + rb"(?=@)|~" + name + rb"\b"
        yield _Search(re.compile(between), "names a user of this machine", shown=True, in_addresses=False)
    for host in machine.hosts:
        whole = rb"(?<![\w.-])" + re.escape(host.encode()) + rb"(?![\w-])"
        yield _Search(re.compile(whole), "names this machine", shown=True, in_addresses=True)


def _in_line(line: bytes, where: str, searches: list[_Search]) -> Iterator[Problem]:
    plain = _URL.sub(b"", line)
    said = set()
    for search in searches:
        match = search.pattern.search(line if search.in_addresses else plain)
        if match is None or search.says in said:
            continue
        said.add(search.says)
        shown = f": {match.group().decode('utf-8', 'replace')[:80]}" if search.shown else ""
        yield Problem(f"{search.says}{shown}", where)


def _pickles(name: str, content: bytes) -> Iterator[Problem]:
    """By name and by content: a pickle runs code when it is loaded."""
    an_archive = content.startswith(_ARCHIVE) and (b"data.pkl" in content or b".pkl" in content)
    pickled = not name.endswith((".safetensors", ".png")) and _PICKLED.match(content) is not None
    if PurePosixPath(name).suffix.lower() in PICKLES or an_archive or pickled:
        yield Problem("is a pickle, which runs code when it is loaded", name, "safetensors only")


def _header(content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    return content[8 : 8 + min(length, len(content))]
