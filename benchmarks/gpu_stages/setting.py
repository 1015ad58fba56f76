"""What a stage is given, and what it gives.

Setting -> Row, Row, ...

A stage is a module of this folder with ``measure(setting) -> Iterator[Row]``, which yields a row as soon as it is
measured and leaves out the cases of ``setting.done``, and ``table(rows) -> str``, what is printed of the rows that are
neither an error nor skipped.
"""

import gc
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# One thing measured. "case" is its name, once in a stage. "error" in one line: it failed; "skipped": why it was not
# taken; "ok": whether a check held, if it is one. What is left is the stage's own and goes into a JSON file.
# "log", of a row in error: the last lines of what was said of it.
Row = dict[str, Any]
_LINES, _WIDEST = 15, 300  # of a "log"
# The end of a file's path: where it lies on this machine is nobody's business, and results are published.
_FILE = re.compile(r'File "[^"\n]*?/((?:[^"/\n]+/){0,2}[^"/\n]+)"')


@dataclass(frozen=True)
class Setting:
    """How a stage is to be run.

    Attributes:
        device: Where.
        tiny: Whether only to see that it works, on a CPU within a minute.
        done: Cases that an earlier run has measured.
        folder: Of the stage alone, empty at first, deleted afterwards.
        seconds: Until the stage is stopped, from its beginning.
    """

    device: torch.device
    tiny: bool
    done: frozenset[str]
    folder: Path
    seconds: float
    _begun: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds until the stage is stopped, from now."""
        return self.seconds - (time.monotonic() - self._begun)

    def each(self, cases: dict[str, Callable[[], Row]]) -> Iterator[Row]:
        """Takes the cases that are not done, one after the other; what fails costs its own row only.

        Args:
            cases: By name, what measures each: returns the row, without its "case" if it likes.

        Yields:
            A row a case, with the seconds it took.
        """
        for case, take in cases.items():
            if case not in self.done:
                yield attempt(case, take)
                self.clear()

    def clear(self) -> None:
        """Gives back what a case has left behind, so that the next begins with free memory."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def attempt(case: str, take: Callable[[], Row]) -> Row:
    """The row of a case, or its error in one line with the traceback's end; all of that goes to the stage's log."""
    started = time.perf_counter()
    try:
        row = take()
    except Exception as error:  # noqa: BLE001 (whatever it is: a row of the table, and the next case is taken)
        traceback.print_exc()
        row = failure(error)
    return {"case": case, **row, "seconds": round(time.perf_counter() - started, 2)}


def failure(error: BaseException) -> Row:
    """What a row says of an error: one line, and the traceback's last ones."""
    said = _FILE.sub(r'File "\1"', "".join(traceback.format_exception(error)))
    lines = [line.rstrip() for line in said.splitlines()]
    return {"error": one_line(error), "log": [line[:_WIDEST] for line in lines[-_LINES:]]}


def one_line(error: BaseException) -> str:
    """What went wrong, for a table."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:300] if said else type(error).__name__
