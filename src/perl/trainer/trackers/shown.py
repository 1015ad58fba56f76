"""What a tracker is shown of a training's settings: all but secrets.

arguments, recipe -> the same without passwords in addresses, keys and tokens
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl import GRPOConfig

from perl.hub.gate.tokens import find_secrets, own_secrets
from perl.recipe.server_address import without_credentials

HIDDEN = "***"


class ShownArguments:
    """Arguments as transformers' callbacks read them, with other names of project and run and without secrets."""

    def __init__(self, args: GRPOConfig, **others: Any) -> None:  # noqa: ANN401 (of any argument)
        """Shows arguments.

        Args:
            args: Of the trainer; they stay as they are.
            others: Values that are shown in the place of theirs.
        """
        self._args, self._others = args, others

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (of any argument)
        """The argument."""
        if name.startswith("__"):  # of Python's own protocols, which copy and pickle ask for before there is anything
            raise AttributeError(name)
        return self._others[name] if name in self._others else getattr(self._args, name)

    def to_dict(self) -> dict[str, Any]:
        """Arguments by name, as transformers gives them."""
        shown: dict[str, Any] = without_secrets({**self._args.to_dict(), **self._others})
        return shown

    def to_json_string(self) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)


def shown_recipe(file: Path | None) -> str | None:
    """The text of the resolved recipe; None: there is none."""
    if file is None or not file.is_file():
        return None
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    own = own_secrets()
    return "".join(f"{_shown(line, own)}\n" for line in lines)


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
