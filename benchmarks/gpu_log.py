"""What a stage of ``gpu.py`` and the processes that it starts have said: a file beside its results, of bounded size.

path, heading -> a file that is added to; its last lines
"""

import contextlib
import os
from pathlib import Path

LOG_BYTES = 2**20  # that a log keeps of its beginning, and again of its end
_NOTE_BYTES = 100  # that the line between them may have


class Log:
    """A file to which a stage's process adds what it says, after what earlier ones have said.

    Attributes:
        path: Of the file.
        begin: Where this stage's part begins.
    """

    def __init__(self, path: Path, heading: str) -> None:
        """Adds the heading.

        Args:
            path: Of the file; there need be none.
            heading: Ends with a new line.
        """
        self.path, self._heading = path, heading.encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        _shorten(path)
        self._before = path.stat().st_size if path.exists() else 0
        self.begin = self._before + len(self._heading)
        with path.open("ab") as file:
            file.write(self._heading)

    def tail(self, lines: int = 20) -> list[str]:
        """The last that the stage said."""
        with self.path.open("rb") as file:
            file.seek(max(self.begin, self.path.stat().st_size - 20_000))
            return file.read().decode(errors="replace").splitlines()[-lines:]

    def close(self) -> None:
        """Takes the heading away again if nothing was said, and with it the file, and a folder that is empty."""
        if self.path.stat().st_size > self.begin:
            _shorten(self.path)
            return
        os.truncate(self.path, self._before)
        if not self._before:
            self.path.unlink()
            with contextlib.suppress(OSError):  # there are results
                self.path.parent.rmdir()


def _shorten(log: Path) -> None:
    """Leaves out the middle of a long file."""
    size = log.stat().st_size if log.exists() else 0
    if size <= 2 * LOG_BYTES + _NOTE_BYTES:
        return
    with log.open("rb") as file:
        first = file.read(LOG_BYTES)
        file.seek(-LOG_BYTES, os.SEEK_END)
        last = file.read()
    log.write_bytes(first + f"\n== {size - 2 * LOG_BYTES} bytes are left out ==\n".encode() + last)
