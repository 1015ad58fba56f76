"""Secrets in a text: by the form of their kind, by the name they are given, or because they are this machine's own.

text -> what each secret is, and where it stands; environment -> its own secrets; settings -> the same without secrets

The forms are those of detect-secrets, and of services that it does not know. Nothing is sent anywhere to ask whether a
token is valid.
"""

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import get_token

from perl.recipe.server_address import without_credentials

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
    return {value: owner for value, owner in named.items() if _is_secret(value)}


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


def _is_secret(value: str) -> bool:
    """Long enough not to be a word, in one piece, and not the name of something here."""
    mixed = re.search(r"\d", value) and re.search(r"[A-Za-z]", value)
    if len(value) < (_SHORTEST_MIXED if mixed else SHORTEST) or re.search(r"\s", value):
        return False
    try:
        return not Path(value).exists()
    except (OSError, ValueError):  # too long for a name, or without end
        return True


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
