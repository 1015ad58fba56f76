"""The entries of a zoo, by name.

folder -> entries; name -> entry and the folder of its files

A zoo is a folder with ``entries/NAME.json`` and, of adapters that it ships, ``adapters/NAME/``. An installed package
has its entries in one file, ``entries.jsonl``, and each adapter in one, ``adapters/NAME.tar.xz``.
"""

import atexit
import functools
import lzma
import os
import shutil
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from perl.errors import PerlError, did_you_mean, warn
from perl.recipe.assets import zoo_folder
from perl.zoo.entry import Entry, parse_entry, read_entry

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
        malformed: Name -> why its file is no entry.
    """

    folder: Path
    entries: dict[str, Entry]
    malformed: dict[str, PerlError] = field(default_factory=dict)

    def entry(self, name: str) -> Entry:
        """The entry of that name, with or without ``zoo:``.

        Raises:
            PerlError: There is none, or it is malformed.
        """
        bare = name.removeprefix(PREFIX)
        if bare in self.malformed:
            raise self.malformed[bare]
        if bare not in self.entries:
            raise PerlError(f"the zoo has no {bare!r}", "", did_you_mean(bare, self.entries) or "perl zoo list")
        return self.entries[bare]

    def shipped_folder(self, entry: Entry) -> Path:
        """Where the files of an adapter that the zoo ships lie."""
        folder = self.folder / "adapters" / entry.name
        packed = folder.with_name(f"{entry.name}.tar.xz")
        return _unpacked(packed) if packed.is_file() else folder


def open_zoo(folder: str | Path | None = None) -> Zoo:
    """Reads a zoo; of a malformed entry a warning is left, and the others are there.

    Args:
        folder: Its folder; None: the one that ``PERL_ZOO`` names, else the packaged one.

    Raises:
        PerlError: There is no zoo.
    """
    path = Path(folder or os.environ.get(VARIABLE) or zoo_folder()).expanduser()
    packed = path / "entries.jsonl"
    if packed.is_file():
        lines = enumerate(packed.read_text(encoding="utf-8").splitlines(), 1)
        readers = {str(number): functools.partial(parse_entry, line, f"{packed}:{number}") for number, line in lines}
    elif (path / "entries").is_dir():
        files = sorted((path / "entries").glob("*.json"))
        readers = {file.stem: functools.partial(read_entry, file) for file in files}
    else:
        raise PerlError("is not a zoo: it has no folder entries/", str(path), "`perl zoo add --zoo DIR` begins one")
    zoo = Zoo(path, {})
    for name, read in readers.items():
        try:
            entry = read()
            zoo.entries[entry.name] = entry
        except PerlError as error:
            zoo.malformed[name] = error
            warn("PRL332", "%s", error)
    return zoo


@functools.cache
def _unpacked(packed: Path) -> Path:
    """The files of an adapter that ``hatch_build.py`` has packed, in a folder that goes with this process.

    Raises:
        PerlError: It cannot be read, or there is no room.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="perl-rl-zoo-"))
        atexit.register(_remove, folder, os.getpid())
        with tarfile.open(packed, "r:xz") as archive:
            archive.extractall(folder, filter="data")
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as error:
        raise PerlError(f"cannot be unpacked: {error}", str(packed), "install perl-rl again") from None
    return folder


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not a process that was forked, and ends before this one
        shutil.rmtree(folder, ignore_errors=True)
