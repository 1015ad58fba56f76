"""Secrets in a text: by the form of their kind, by the name they are given, or because they are this machine's own.

text -> who each secret belongs to, and where it stands; environment -> its own secrets

The forms are those of detect-secrets, and of services that it does not know or knew otherwise. Of its rules those are
left out that guess by entropy or by a key's name alone: hashes are what we publish. Nothing is sent anywhere to ask
whether a token is valid.
"""

import base64
import functools
import math
import netrc
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

_FORMS = {
    "the Hub": r"\bhf_(?:[A-Za-z0-9]{20,}|(?:oauth|jwt|oidc)_[\w.~+/-]{16,})|\bapi_org_[A-Za-z0-9]{10,}",
    "OpenAI, Anthropic or their like": r"\b(?:sk|csk|pplx)-(?=[\w-]*\d)[\w-]{16,}",
    "GitHub": r"\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}",
    "GitLab": r"\bgl(?:pat|dt|ft|soat|rt|cbt|ptt|agent|oas|imt|ffct|wt)-[\w-]{20,}",
    "AWS": r"\bA[KS]IA[0-9A-Z]{16}\b|\bABSK[A-Za-z0-9+/]{60,}",
    "Google": r"\bAIza[\w-]{35}|\bGOCSPX-[\w-]{20,}|\bya29\.[\w-]{20,}",
    "Weights & Biases": r"\bwandb_v1_\w{20,}",
    "Slack": r"\bxox[abceoprs]-[A-Za-z0-9-]{10,}|\bxapp-\d-[A-Za-z0-9-]{10,}",
    "Discord": r"\b[MNO][\w-]{23,27}\.[\w-]{6}\.[\w-]{27,}|discord(?:app)?\.com/api/webhooks/\d+/[\w-]{20,}",
    "Stripe": r"\b[rs]k_(?:live|test)_[0-9a-zA-Z]{16,}|\bwhsec_[A-Za-z0-9]{24,}",
    "Groq, xAI or NVIDIA": r"\bgsk_[A-Za-z0-9]{20,}|\bxai-[A-Za-z0-9]{20,}|\bnvapi-[\w-]{20,}",
    "Replicate, Fireworks, Together or RunPod": (
        r"\br8_[A-Za-z0-9]{30,}|\bfw_[A-Za-z0-9]{20,}|\btgp_v1_[\w-]{20,}|\brpa_[A-Z0-9]{30,}\w*"
    ),
    "LangSmith, Databricks or Kaggle": r"\blsv2_[ps][tk]_[0-9a-f]{32}\w*|\bdapi[0-9a-f]{32}\b|\bKGAT_[0-9a-f]{32}",
    "a package index": r"\bnpm_[A-Za-z0-9]{30,}|\bpypi-[\w-]{40,}",
    "a container registry": r"\bdckr_(?:pat|oat)_[\w-]{20,}",
    "DigitalOcean, Vault or Grafana": r"\bdo[opr]_v1_[0-9a-f]{64}|\bhv[sbr]\.[\w-]{24,}|\bgl(?:sa|c)_[\w+/=]{32,}",
    "Linear, Notion, Shopify or Supabase": (
        r"\blin_api_\w{30,}|\bntn_\w{40,}|\bshp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}|\bsbp_[0-9a-f]{40}"
    ),
    "Mailgun or Atlassian": r"\bkey-[0-9a-f]{32}\b|\bATATT3[\w=-]{50,}",
    "somebody (an age key)": r"\bAGE-SECRET-KEY-1[0-9A-Z]{50,}",
    "somebody (a private key)": r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----",
    "somebody (an address with a password)": (r"\b[a-z][a-z0-9+.-]*://[^\s/:@\"'<>`]*:[^\s/@\"'<>`]+@[\w.\[-]"),
    "somebody (netrc)": r"\bmachine\s+\S+\s+login\s+\S+\s+password\s+\S+",
    "somebody (an Authorization header)": (
        r"(?i)\bbearer\s+(?=[\w.~+/-]*\d)[\w.~+/-]{20,}|"
        r"\bauthorization[\"']?\s*[:=]\s*[\"']?basic\s+[\w+/]{8,}"
    ),
}
# A name that says so, and a value behind it. A value that `_looks_random` denies is not one: `pad_token: "<|end|>"`.
_NAMED = re.compile(
    r"(?i)(?:passw(?:or)?d|passphrase|pwd|secret|credential|(?:api|access|private|auth|account|secret|client|wandb|app)"
    r"[_-]?key|(?P<plain>token|\bkey))[\"']?[ \t]*(?:[:=]|=>)[ \t]*[\"']?(?P<value>[^\s\"'`,;<>{}()|]{8,})"
)
# As those of Weights & Biases, which have the form of a commit.
_HEX_40 = re.compile(r"(?<![\w/+.-])[0-9a-f]{40}(?![\w/+-])")
_A_COMMIT = re.compile(r"(?i)(?:revision|commit|oid|sha\d*|hash|tree|blob|resolve|@)[\"'`]?\s*[:=/@]?\s*[\"'`\[(]*$")
_BASE64_40 = re.compile(r"(?<![\w/+=.-])[A-Za-z0-9/+]{40}(?![\w/+=-])")  # as the secret keys of AWS
_WORDS = re.compile(r"(?:[A-Za-z]+|\d{1,4})(?:[_.:/-](?:[A-Za-z]+|\d{1,4}))*")
_PLACEHOLDER = re.compile(r"(?i)^(?:your|my|the|some|example|xxx|\$|%|\*|os\.|env|null|none|true|false)|\.\.\.|\*\*\*")
_RANDOM_BITS_40, _RANDOM_BITS = 4.2, 2.5  # bits a character: 40 of base64 have 4.4 at least, words about 3.5
_VARIABLE = re.compile(r"(?i)(?:^|_)(?:[A-Z]*KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(?:_|$)|TOKEN$")
_LIKE = "holds what looks like a token of "
SHORTEST = 12
"""Characters of a secret of the environment; with letters and digits also from 8. What is shorter may be a word."""
_SHORTEST_MIXED = 8


def find_secrets(text: str, own: Mapping[str, str] | None = None) -> Iterator[tuple[int, str]]:
    """Where each secret of a text begins, and what it is, never the secret itself.

    Args:
        text: Of any length.
        own: Value -> whose it is, as :func:`own_secrets`; compared, never shown.
    """
    for value, owner in (own or {}).items():
        for form in _written(value):
            yield from ((match.start(), f"holds {owner}") for match in re.finditer(re.escape(form), text))
    for owner, pattern in _patterns():
        yield from ((match.start(), _LIKE + owner) for match in pattern.finditer(text))
    for detector, pattern in _rules():
        for match in pattern.finditer(text):
            # Some rules look closer: whether the parts of a JSON web token are JSON.
            if any(detector.analyze_string(match.group())):
                yield match.start(), _LIKE + str(detector.secret_type)
    yield from _by_name(text)
    yield from _by_length(text)


def own_secrets() -> dict[str, str]:
    """Secrets that this process could leak: of the environment, of ``~/.netrc``, and the Hub's login.

    Returns:
        Value -> whose it is.
    """
    found = {
        value: f"the value of ${name}"
        for name, value in os.environ.items()
        if _VARIABLE.search(name) and _is_secret(value) and not _is_path(value)
    }
    try:
        file = os.environ.get("NETRC") or None
        for host, (_, _, password) in netrc.netrc(file).hosts.items():
            if password and _is_secret(password):
                found[password] = f"the password of {host} in netrc"
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        pass
    found |= dict.fromkeys(filter(_is_secret, _logins()), "your login to the Hub")
    return found


def _logins() -> Iterator[str]:
    """Tokens that ``hf auth login`` has kept, where the Hub's client documents that it looks for them."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = Path(os.environ.get("HF_HOME") or f"{cache}/huggingface")
    for variable, name in (("HF_TOKEN_PATH", "token"), ("HF_STORED_TOKENS_PATH", "stored_tokens")):
        file = Path(os.environ.get(variable) or home / name)
        try:
            lines = file.expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError, RuntimeError):  # RuntimeError: nobody's home
            continue
        yield from (line.rpartition("=")[2].strip() for line in lines)  # `hf_token = ...` in the second


def _is_secret(value: str) -> bool:
    """Long enough not to be a word."""
    return len(value) >= (_SHORTEST_MIXED if _is_mixed(value) else SHORTEST) and not re.search(r"\s", value)


def _is_path(value: str) -> bool:
    """Whether it names something here; a value that cannot be a path does not, and no error may show it."""
    try:
        return Path(value).exists()
    except (OSError, ValueError):  # too long for a name, or without end
        return False


def _is_mixed(value: str) -> bool:
    return re.search(r"\d", value) is not None and re.search(r"[A-Za-z]", value) is not None


def _written(value: str) -> set[str]:
    """A value as it may stand in a file."""
    content = os.fsencode(value)  # the environment holds bytes, which need not be text
    return {value, quote(content, safe=""), base64.b64encode(content).decode().rstrip("=")}


def _by_name(text: str) -> Iterator[tuple[int, str]]:
    for match in _NAMED.finditer(text):
        value = match["value"]
        if match["plain"] and _WORDS.fullmatch(value):  # `eos_token: im_end_2`
            continue
        if _looks_random(value) and not (_HEX_40.fullmatch(value) and _names_a_commit(text, match.start("value"))):
            yield match.start(), _LIKE + "somebody, by its name"


def _by_length(text: str) -> Iterator[tuple[int, str]]:
    for match in _HEX_40.finditer(text):
        if re.search(r"[a-f]", match.group()) and not _names_a_commit(text, match.start()):
            yield match.start(), _LIKE + "Weights & Biases, or a commit that is not called one"
    for match in _BASE64_40.finditer(text):
        value = match.group()
        kinds = (r"[A-Z]", r"[a-z]", r"\d")
        if all(re.search(kind, value) for kind in kinds) and _bits(value) > _RANDOM_BITS_40:
            yield match.start(), _LIKE + "AWS"


def _names_a_commit(text: str, start: int) -> bool:
    return _A_COMMIT.search(text[max(0, start - 40) : start]) is not None


def _looks_random(value: str) -> bool:
    """Letters and digits mixed, and neither a placeholder nor an address or a number."""
    if _PLACEHOLDER.search(value) or re.fullmatch(r"[\d.e+-]+|\w+://.*|sha256:.*|.*\.\w{1,5}", value):
        return False
    return _is_mixed(value) and _bits(value) > _RANDOM_BITS


def _bits(value: str) -> float:
    """Shannon entropy of its characters."""
    return -sum(n / len(value) * math.log2(n / len(value)) for n in Counter(value).values())


@functools.cache
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((owner, re.compile(form)) for owner, form in _FORMS.items())


@functools.cache
def _rules() -> tuple[tuple[Any, re.Pattern[str]], ...]:
    """The rules of detect-secrets that know a form, imported when they are needed."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    from detect_secrets.plugins.base import RegexBasedDetector
    from detect_secrets.plugins.ip_public import IPPublicDetector

    kinds: Iterable[Any] = get_mapping_from_secret_type_to_class().values()
    known = [kind() for kind in kinds if issubclass(kind, RegexBasedDetector) and kind is not IPPublicDetector]
    return tuple((detector, pattern) for detector in known for pattern in detector.denylist)
