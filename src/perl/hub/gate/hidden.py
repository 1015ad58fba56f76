"""What others are shown of settings and texts: all but secrets.

value, text -> the same without passwords in addresses, keys and tokens
"""

from collections.abc import Mapping
from typing import Any

from perl.hub.gate.tokens import find_secrets, own_secrets
from perl.recipe.server_address import without_credentials

HIDDEN = "***"


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
