"""Packs the zoo's entries into one file of the wheel: of a hundred small files each would be compressed alone.

model_cards/zoo/entries/*.json -> perl/assets/model_cards/zoo/entries.jsonl
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class EntriesInOneFile(BuildHookInterface):  # type: ignore[type-arg]
    """Runs before a wheel is packed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the file, unless the package is installed to be edited, which reads the entries where they are."""
        if version == "editable":
            return
        entries = sorted((Path(self.root) / "model_cards" / "zoo" / "entries").glob("*.json"))
        lines = [json.dumps(json.loads(file.read_text(encoding="utf-8")), ensure_ascii=False) for file in entries]
        packed = Path(tempfile.mkdtemp()) / "entries.jsonl"
        packed.write_text("\n".join(lines) + "\n", encoding="utf-8")
        build_data["force_include"][str(packed)] = "perl/assets/model_cards/zoo/entries.jsonl"
