"""The one table of codes that a line of ours may have: a file for each kind of line.

code -> Code

`perl explain` prints rows, and ``docs/codes.md`` is made of them. It imports no torch.
"""

from perl.doctor.codes.alarms import ALARM_NAMES, ALARMS
from perl.doctor.codes.code import Code as Code
from perl.doctor.codes.errors import ERRORS
from perl.doctor.codes.findings import FINDINGS
from perl.doctor.codes.warnings import WARNINGS
from perl.errors import RecipeError, did_you_mean

CODES: dict[str, Code] = {row.name: row for row in (*FINDINGS, *ERRORS, *WARNINGS, *ALARMS)}


def find_code(name: str) -> Code:
    """The row of a code.

    Args:
        name: As a person writes it, small letters too; of an alarm its name too.

    Raises:
        RecipeError: There is none; says the nearest.
    """
    code = ALARM_NAMES.get(name.lower(), name.upper())
    if code not in CODES:
        known = CODES if code.startswith("PRL") else (*CODES, *ALARM_NAMES)
        raise RecipeError(f"no code {name!r}", hint=did_you_mean(code if code.startswith("PRL") else name, known))
    return CODES[code]


def codes_table() -> str:
    """The sections of ``docs/codes.md``, in Markdown."""
    return "\n".join(f"## {row.name}: {row.title}\n\n{explained(row)}" for row in CODES.values())


def explained(row: Code) -> str:
    """What a code means, as `perl explain` prints it and the page has it."""
    return f"{row.what}\n\n{row.why}\n\n```\n{row.example}\n```\n\n{row.fix}\n"
