"""What must not leave this machine: its paths, names of people and machines, secrets.

name, text -> mistakes, one a line

Files are not looked at: a path of any machine counts, whether it exists here or not.
"""

import getpass
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from perl.errors import Mistake
from perl.hub.gate.secrets import find_secrets, own_secrets

ROOTS = (
    r"(?:home|[Uu]sers?|root|tmp|var|private|mnt|media|data|dataset|scratch|work|workspace|workspaces|opt|srv|usr|etc|"
    r"content|kaggle|gpfs|lustre|fsx|nfs|efs|s3|beegfs|ceph|storage|projects?|raid|cluster|shared?|disks?|volumes?|"
    r"Volumes|afs|net|export|import|local|nas|hpc|mount|ssd|nvme|bucket|vol|run|dev|proc|sys|boot|teamspace|"
    r"dbfs|autodl-tmp|cfs|cpfs|inspire|mlx|apdcephfs|p?ssd|host|app|code|runpod-volume)s?[\d_-]*\d*"
)
"""Names of folders at the root with which a path of somebody's machine begins, as a pattern."""
_PART = r"[\w.~@+=-]+"
_PATHS = tuple(
    re.compile(form)
    for form in (
        rf"(?<![\w./~<)\]}}\\-])/(?:{ROOTS})/{_PART}[\w./~@+=-]*",
        # Whatever its root is called: three parts at least, since `/a/b/` is a regular expression or a ratio too.
        rf"(?<![\w./~<)\]}}\\$^-])/(?!(?:v\d|api|resolve|tree|blob|docs|wiki|think|no_think)/)"
        rf"[A-Za-z_]{_PART}(?:/[A-Za-z_.][\w.~@+=-]*){{2,}}",
        rf"(?<![\w~/.\\])~[a-z_]?[\w-]*/{_PART}[\w./~@+=-]*",
        r"file://[^\s\"')]+",
        rf"(?<!\w)[A-Z]:(?:/|\\{{1,2}})(?:{ROOTS})(?:/|\\{{1,2}}){_PART}",
    )
)
_URL = re.compile(r"https?://[^\s\"')\]>]+")
# Accounts that are nobody's name.
_NOBODY = {"root", "user", "ubuntu", "admin", "runner", "nobody", "jovyan", "home", "build", "docker", "localhost"}
_SHORTEST_NAME, _LONGEST_SHOWN = 3, 80


@dataclass(frozen=True)
class MachineFacts:
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


def this_machine(*folders: Path) -> MachineFacts:
    """This machine with the secrets of this process, and further folders on it."""
    try:
        account = getpass.getuser()
    except (OSError, KeyError):  # no such account, as in some containers
        account = ""
    absolute = {str(path.resolve()) for path in (Path.home(), Path.cwd(), *folders)}
    users = {name for name in (Path.home().name, account) if name.lower() not in _NOBODY}
    host = socket.gethostname()
    # A plain word may be said for other reasons.
    telling = host.lower() not in _NOBODY and re.search(r"[\d.-]", host) and len(host) > _SHORTEST_NAME
    return MachineFacts(
        folders=tuple(sorted(path for path in absolute if path.count("/") > 1 or "\\" in path)),
        users=tuple(sorted(name for name in users if len(name) >= _SHORTEST_NAME)),
        hosts=(host,) if telling else (),
        secrets=own_secrets(),
    )


def find_leaks(name: str, text: str, machine: MachineFacts) -> list[Mistake]:
    """What must not be published of a text, one mistake for each line and kind.

    Args:
        name: Of its file.
        text: What the file says.
        machine: Whose folders, people and secrets to look for.
    """
    found: dict[tuple[str, str], Mistake] = {}
    for start, kind, shown in sorted(_found(text, machine)):
        where = f"{name}:{text.count(chr(10), 0, start) + 1}"
        found.setdefault((where, kind), Mistake(f"{kind}: {shown[:_LONGEST_SHOWN]}" if shown else kind, where))
    return list(found.values())


def _found(text: str, machine: MachineFacts) -> Iterator[tuple[int, str, str]]:
    """Where something begins, what it is, and what is shown of it."""
    yield from ((start, what, "") for start, what in find_secrets(text, machine.secrets))
    # An address on the web has a path too, and may have anybody's name.
    plain = _URL.sub(lambda match: " " * len(match[0]), text)
    for form in (*(re.compile(re.escape(folder)) for folder in machine.folders), *_PATHS):
        yield from ((match.start(), "names a path of this machine", match[0]) for match in form.finditer(plain))
    for user in map(re.escape, machine.users):
        for match in re.finditer(rf"(?<=[/\\]){user}(?=[/\\])|(?<!\w){user}(?=@)|~{user}\b", plain):
            yield match.start(), "names a user of this machine", match[0]
    for host in map(re.escape, machine.hosts):
        for match in re.finditer(rf"(?<![\w.-]){host}(?![\w-])", text):
            yield match.start(), "names this machine", match[0]
