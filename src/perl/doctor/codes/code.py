"""What a code says of a kind of line: what it is, why it matters, an example, what to do."""

from dataclasses import dataclass


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
