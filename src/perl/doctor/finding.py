"""What was found of one thing that was looked at: a line, how bad it is, and what to do.

a check -> Finding -> a line
"""

from dataclasses import dataclass
from typing import Literal

from perl.doctor.codes import CODES

Level = Literal["ok", "note", "problem"]
"""``note``: a run goes on without it, slower or with less; ``problem``: a run fails, or trains far too slowly."""


@dataclass(frozen=True)
class Finding:
    """One thing.

    Attributes:
        code: A key of :data:`perl.doctor.codes.CODES`.
        level: How bad it is.
        message: One line.
        fix: What to do about it, in one line; empty where nothing is wrong.
    """

    code: str
    level: Level
    message: str
    fix: str = ""

    def __str__(self) -> str:
        """The line."""
        fix = f" ({self.fix})" if self.fix else ""
        return f"{self.level:<8}{self.code}  {CODES[self.code].title}: {self.message}{fix}"
