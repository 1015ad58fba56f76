"""Packs the zoo for the wheel, where each of many small files would be compressed alone, and badly.

model_cards/zoo/entries/*.json -> perl/assets/model_cards/zoo/entries.jsonl
model_cards/zoo/adapters/NAME/ -> perl/assets/model_cards/zoo/adapters/NAME.tar.xz
"""

import json
import lzma
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# For numbers of two bytes: where in a number a byte stands says more of it than the byte before.
_FOR_WEIGHTS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 1, "pb": 1}]


class PackedZoo(BuildHookInterface):  # type: ignore[type-arg]
    """Runs before a wheel is packed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the files, unless the package is installed to be edited, which reads the zoo where it is."""
        if version == "editable":
            return
        zoo, place = Path(self.root) / "model_cards" / "zoo", "perl/assets/model_cards/zoo"
        made = Path(tempfile.mkdtemp())
        lines = [
            json.dumps(json.loads(file.read_text(encoding="utf-8")), ensure_ascii=False)
            for file in sorted((zoo / "entries").glob("*.json"))
        ]
        (made / "entries.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        build_data["force_include"][str(made / "entries.jsonl")] = f"{place}/entries.jsonl"
        for adapter in sorted(path for path in (zoo / "adapters").iterdir() if path.is_dir()):
            packed = made / f"{adapter.name}.tar.xz"
            with lzma.open(packed, "wb", filters=_FOR_WEIGHTS) as out, tarfile.open(fileobj=out, mode="w") as archive:
                for file in sorted(adapter.iterdir()):
                    archive.add(file, file.name, filter=_as_anybodys)
            build_data["force_include"][str(packed)] = f"{place}/adapters/{packed.name}"


def _as_anybodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without whose file it was and when it was written: the same files give the same wheel."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member
