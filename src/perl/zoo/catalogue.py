"""The entries of a zoo, by name.

folder -> entries; name -> entry and the folder of its files

A zoo is a folder with ``entries/NAME.json`` and, of adapters that it ships, ``adapters/NAME/``. An installed package
has its entries in one file, ``entries.jsonl``, and each adapter in one, ``adapters/NAME.tar.xz``.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from perl.errors import PerlError, did_you_mean
from perl.recipe.assets import zoo_folder
from perl.zoo.entry import Entry, parse_entry, read_entry
from perl.zoo.packed import unpacked

PREFIX = "zoo:"
"""With which a name of the zoo begins where an adapter is named."""
VARIABLE = "PERL_ZOO"
"""Environment variable with the folder of the zoo to use instead of the packaged one."""


@dataclass(frozen=True)
class Zoo:
    """A zoo.

    Attributes:
        folder: Where it lies.
        entries: By name, in the order of names.
    """

    folder: Path
    entries: dict[str, Entry]

    def entry(self, name: str) -> Entry:
        """The entry of that name, with or without ``zoo:``.

        Raises:
            PerlError: There is none.
        """
        bare = name.removeprefix(PREFIX)
        if bare not in self.entries:
            raise PerlError(f"the zoo has no {bare!r}", "", did_you_mean(bare, self.entries) or "perl zoo list")
        return self.entries[bare]

    def shipped_folder(self, entry: Entry) -> Path:
        """Where the files of an adapter that the zoo ships lie."""
        folder = self.folder / "adapters" / entry.name
        packed = folder.with_name(f"{entry.name}.tar.xz")
        return unpacked(packed) if packed.is_file() else folder


def open_zoo(folder: str | Path | None = None) -> Zoo:
    """Reads a zoo.

    Args:
        folder: Its folder; None: the one that ``PERL_ZOO`` names, else the packaged one.

    Raises:
        PerlError: There is no zoo, or one of its entries is malformed.
    """
    path = Path(folder or os.environ.get(VARIABLE) or zoo_folder()).expanduser()
    packed = path / "entries.jsonl"
    if packed.is_file():
        lines = packed.read_text(encoding="utf-8").splitlines()
        found = [parse_entry(line, f"{packed}:{number}") for number, line in enumerate(lines, 1)]
    elif (path / "entries").is_dir():
        found = [read_entry(file) for file in sorted((path / "entries").glob("*.json"))]
    else:
        raise PerlError("is not a zoo: it has no folder entries/", str(path), "`perl zoo add --zoo DIR` begins one")
    return Zoo(path, {entry.name: entry for entry in found})
