"""An author's own words on a card: below ``## Notes``, its last heading.

text -> what may not stand there; lines whose numbers nobody has checked

Plain prose and lists. What could be taken for a part of the card that is checked (a heading, a table, HTML, a picture,
code) has to stand elsewhere.
"""

import re

from perl.errors import Problem
from perl.hub.card_form import CARD, FRONT_MATTER, shown

NOTES = "## Notes"
_REFUSED = {
    "a heading": re.compile(r"^\s{0,3}#{1,6}(?:\s|$)|^\s{0,3}(?:=+|-+)\s*$"),
    "a table": re.compile(r"^\s*\||\|.*\|"),
    "HTML": re.compile(r"<[A-Za-z/!?]"),
    "a picture": re.compile(r"!\["),
    "code": re.compile(r"^\s*(?:```|~~~)"),
}
_NUMBER = re.compile(r"\d")


def split_notes(card: str) -> tuple[str, str, int]:
    """A card without its author's notes, the notes with their heading, and that heading's line from 1.

    Without notes the whole card, nothing, and 0.
    """
    lines = card.split("\n")
    match = FRONT_MATTER.match(card)
    fenced = False
    for index in range(match[0].count("\n") if match else 0, len(lines)):
        fenced ^= lines[index].startswith("```")
        if lines[index].rstrip() == NOTES and not fenced:
            return "\n".join(lines[:index]), "\n".join(lines[index:]).rstrip() + "\n", index + 1
    return card, "", 0


def notes_problems(notes: str, first: int) -> list[Problem]:
    """What may not stand below ``## Notes``.

    Args:
        notes: From :func:`split_notes`.
        first: Likewise.
    """
    return [
        Problem(f"holds {what} below ## Notes: {shown(line)}", f"{CARD}:{number}", "plain prose only")
        for number, line in _lines(notes, first)
        for what, pattern in _REFUSED.items()
        if pattern.search(line)
    ]


def numbers_of_notes(notes: str, first: int) -> list[str]:
    """Lines of the notes that hold numbers, which nothing here can confirm; arguments as above."""
    return [
        f"{CARD}:{number}, in the author's own words: {shown(line)}"
        for number, line in _lines(notes, first)
        if _NUMBER.search(line)
    ]


def _lines(notes: str, first: int) -> list[tuple[int, str]]:
    """The lines below the heading."""
    return list(enumerate(notes.removesuffix("\n").split("\n"), first))[1:]
