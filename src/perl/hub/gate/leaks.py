"""What must not leave this machine: its paths, names of people and machines, secrets.

name, text -> mistakes, one a line; environment -> its own secrets; settings -> the same without secrets

Files are not looked at: a path of any machine counts, whether it exists here or not. A secret is known by the form of
its kind, by the name it is given, or because it is this machine's own. The forms are those of detect-secrets, and of
services that it does not know. Nothing is sent anywhere to ask whether a token is valid.
"""

import functools
import getpass
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import get_token

from perl.errors import Mistake
from perl.recipe.server_address import without_credentials

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
HIDDEN = "***"
_FORMS = {
    "the Hub": r"\bhf_(?:[A-Za-z0-9]{20,}|(?:oauth|jwt|oidc)_[\w.~+/-]{16,})|\bapi_org_[A-Za-z0-9]{10,}",
    "a model, tracking or code service": (
        r"\b(?:sk-|csk-|pplx-|gsk_|xai-|nvapi-|r8_|fw_|tgp_v1_|rpa_|lsv2_|wandb_v1_|dapi|KGAT_|github_pat_|glpat-|glcbt-|"
        r"npm_|dckr_pat_|dop_v1_|hvs\.|glsa_|ntn_|lin_api_|xapp-)"
        r"(?=[\w-]*\d)[\w-]{20,}|\bsk-(?=[\w-]*\d)[\w-]{16,}"
    ),
    "a cloud": r"\bASIA[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bGOCSPX-[\w-]{20,}|\bya29\.[\w-]{20,}",
    "somebody (an age key)": r"\bAGE-SECRET-KEY-1[0-9A-Z]{50,}",
    "somebody (an Authorization header)": (
        r"(?i)\bbearer\s+(?=[\w.~+/-]*\d)[\w.~+/-]{20,}|\bauthorization[\\\"']*\s*[:=]\s*[\\\"']*basic\s+[\w+/]{8,}"
    ),
    # A name that says so, and a value behind it with letters and digits: not `pad_token: "<|end|>"`.
    "somebody, by its name": (
        r"(?i)(?:passw(?:or)?d|passphrase|secret|credential|(?:api|access|private|auth|account|client|wandb)[_-]?key|"
        r"(?<![A-Za-z])token|(?:access|auth|refresh|api)token)"
        r"[\\\"']*[ \t]*(?:[:=]|=>)[ \t]*[\\\"']*(?!(?:your|sha\d+|https?)\b)"
        r"(?:(?=[\w+/=.~-]*\d)(?=[\w+/=.~-]*[a-z])[\w+/=.~-]{12,}|"
        r"(?<=[\"'])(?=[^\s\"'\\]*\d)(?=[^\s\"'\\]*[a-z])[^\s\"'\\<>{}()|]{12,})"  # in quotes of any signs
    ),
}
_VARIABLE = re.compile(
    r"(?i)(?:KEY|TOKENS?|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(?:^|_)(?:[A-Z]*PASS|PWD|PAT))(?:_|$)"
)
SHORTEST = 12
"""Characters of a secret of the environment; with letters and digits also from 8. What is shorter may be a word."""
_SHORTEST_MIXED = 8


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
    # Where something begins, what it is, and what is shown of it.
    found = [(start, what, "") for start, what in find_secrets(text, machine.secrets)]
    # An address on the web has a path too, and may have anybody's name.
    plain = _URL.sub(lambda match: " " * len(match[0]), text)
    for form in (*(re.compile(re.escape(folder)) for folder in machine.folders), *_PATHS):
        found += [(match.start(), "names a path of this machine", match[0]) for match in form.finditer(plain)]
    for user in map(re.escape, machine.users):
        of_user = re.finditer(rf"(?<=[/\\]){user}(?=[/\\])|(?<!\w){user}(?=@)|~{user}\b", plain)
        found += [(match.start(), "names a user of this machine", match[0]) for match in of_user]
    for host in map(re.escape, machine.hosts):
        of_host = re.finditer(rf"(?<![\w.-]){host}(?![\w-])", text)
        found += [(match.start(), "names this machine", match[0]) for match in of_host]
    mistakes: dict[tuple[str, str], Mistake] = {}
    for start, kind, shown in sorted(found):
        where = f"{name}:{text.count(chr(10), 0, start) + 1}"
        mistakes.setdefault((where, kind), Mistake(f"{kind}: {shown[:_LONGEST_SHOWN]}" if shown else kind, where))
    return list(mistakes.values())


def find_secrets(text: str, own: Mapping[str, str] | None = None) -> Iterator[tuple[int, str]]:
    """Where each secret of a text begins, and what it is, never the secret itself.

    Args:
        text: Of any length.
        own: Value -> whose it is, as :func:`own_secrets`; compared, never shown.
    """
    for value, owner in (own or {}).items():
        for form in {value, quote(os.fsencode(value), safe=""), json.dumps(value)[1:-1]}:
            yield from ((match.start(), f"holds {owner}") for match in re.finditer(re.escape(form), text))
    for owner, detector, pattern in _rules():
        for match in pattern.finditer(text):
            # Some rules look closer: whether the parts of a JSON web token are JSON.
            if detector is None or any(detector.analyze_string(match.group())):
                yield match.start(), f"holds what looks like a token of {owner}"


def own_secrets() -> dict[str, str]:
    """Secrets that this process could leak: of the environment, and the Hub's login.

    Returns:
        Value -> whose it is.
    """
    named = {value: f"the value of ${name}" for name, value in os.environ.items() if _VARIABLE.search(name)}
    if token := get_token():
        named.setdefault(token, "your login to the Hub")
    found = {}
    for value, owner in named.items():
        # Long enough not to be a word, in one piece, and not the name of something here.
        mixed = re.search(r"\d", value) and re.search(r"[A-Za-z]", value)
        if len(value) < (_SHORTEST_MIXED if mixed else SHORTEST) or re.search(r"\s", value):
            continue
        try:
            a_file = Path(value).exists()
        except (OSError, ValueError):  # too long for a name, or without end
            a_file = False
        if not a_file:
            found[value] = owner
    return found


def shown_text(text: str) -> str:
    """A text with ``***`` for each line that holds a secret."""
    own = own_secrets()
    return "".join(f"{_shown(line, own)}\n" for line in text.splitlines())


def without_secrets(value: Any, name: str = "", own: Mapping[str, str] | None = None) -> Any:  # noqa: ANN401 (any)
    """The same value with ``***`` for each text that is a secret, by its form, its name or as this machine's own."""
    own = own_secrets() if own is None else own
    if isinstance(value, Mapping):
        return {key: without_secrets(item, str(key), own) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, name, own) for item in value]
    return _shown(value, own, name) if isinstance(value, str) else value


def _shown(text: str, own: Mapping[str, str], name: str = "") -> str:
    bare = without_credentials(text)
    return HIDDEN if any(find_secrets(f"{name}: {bare}" if name else bare, own)) else bare


@functools.cache
def _rules() -> tuple[tuple[str, Any, re.Pattern[str]], ...]:
    """Whose tokens, what looks closer at them, and their form; detect-secrets is imported when it is needed."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    from detect_secrets.plugins.base import RegexBasedDetector
    from detect_secrets.plugins.ip_public import IPPublicDetector

    kinds: Any = get_mapping_from_secret_type_to_class().values()
    known = [kind() for kind in kinds if issubclass(kind, RegexBasedDetector) and kind is not IPPublicDetector]
    theirs = ((str(rule.secret_type), rule, pattern) for rule in known for pattern in rule.denylist)
    return (*((owner, None, re.compile(form)) for owner, form in _FORMS.items()), *theirs)
