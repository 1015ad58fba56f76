"""The gate that every file passes before it leaves this machine: names, sizes, forms; paths, people, secrets.

folder, name in it -> bytes; name in the repository -> bytes, to mistakes, one a line; settings -> without secrets

A file must have a name that we write, be no larger than such a file may be, be what its ending says, and hold nothing
that must not leave this machine. It is read once, and what was looked at is what is sent. Below its folder no link is
followed, and nothing but a regular file is read; the folder itself may be a link: the user named it.

A path of any machine counts, whether it exists here or not. A secret is known by the form of its kind, by the name it
is given, or because it is this machine's own. The forms are those of detect-secrets, and of services that it does not
know. Nothing is sent anywhere to ask whether a token is valid.
"""

import functools
import getpass
import json
import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import yaml
from huggingface_hub import get_token

from perl.errors import Mistake, PerlError, first_line
from perl.recipe.assets import evaluation_tasks
from perl.recipe.plain_yaml import plain_value, refuse_tags
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
