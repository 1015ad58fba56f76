"""What a tracker is shown of a training's settings: all but secrets.

arguments, recipe -> the same without passwords in addresses, keys and tokens
"""

import json
from pathlib import Path
from typing import Any

from trl import GRPOConfig

from perl.hub.gate.hidden import shown_text, without_secrets


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
    return shown_text(file.read_text(encoding="utf-8", errors="replace"))
