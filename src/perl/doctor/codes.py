"""Codes that a line of ours may have, and a finding, which is such a line.

code -> Code; a check -> Finding -> a line

The table is ``codes.toml``; alarms have their rows from the table of rules. `perl explain` prints a row, and
``docs/codes.md`` is made of them. It imports no torch.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from perl.errors import RecipeError, did_you_mean
from perl.trainer.alarms.table import RULES, change_of

Level = Literal["ok", "note", "problem"]
"""``note``: a run goes on without it, slower or with less; ``problem``: a run fails, or trains far too slowly."""


@dataclass(frozen=True)
class Code:
    """A kind of line.

    Attributes:
        name: As it stands in the line: ``PRL101``.
        title: What was looked at.
        what: What the line says.
        why: What happens to a run otherwise.
        example: A line with it.
        fix: What to do.
    """

    name: str
    title: str
    what: str
    why: str
    example: str
    fix: str


@dataclass(frozen=True)
class Finding:
    """What was found of one thing that was looked at.

    Attributes:
        code: A key of :func:`codes`.
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
        return f"{self.level:<8}{self.code}  {codes()[self.code].title}: {self.message}{fix}"


@cache
def codes() -> dict[str, Code]:
    """Every code, in the order of their numbers."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    found = {name: Code(name, **texts) for name, texts in table.items()}
    for rule in RULES.values():
        change = change_of(rule)
        found[rule.code] = Code(
            rule.code,
            rule.title,
            f"The alarm `{rule.name}`: {rule.fires}.",
            f"{rule.harm} The limit: {rule.why}.",
            rule.example,
            f"{change[:1].upper()}{change[1:]}. `alarms: {{stop: [{rule.name}]}}` ends a run with it.",
        )
    return found


def find_code(name: str) -> Code:
    """The row of a code.

    Args:
        name: As a person writes it, small letters too; of an alarm its name too.

    Raises:
        RecipeError: There is none; says the nearest.
    """
    alarm = RULES.get(name.lower())
    code = alarm.code if alarm is not None else name.upper()
    if code not in codes():
        known, meant = (codes(), code) if code.startswith("PRL") else ((*codes(), *RULES), name)
        raise RecipeError(f"no code {name!r}", hint=did_you_mean(meant, known))
    return codes()[code]


def explained(row: Code) -> str:
    """What a code means, as `perl explain` prints it and the page has it."""
    return f"{row.what}\n\n{row.why}\n\n```\n{row.example}\n```\n\n{row.fix}\n"
