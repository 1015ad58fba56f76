"""An author's own words on a card: below ``## Notes``, its last heading.

text -> what may not stand there; lines whose numbers nobody has checked

Plain prose and flat lists, line by line, by what a line begins with: readers of Markdown differ in all the rest. What
could be taken for a part of the card that is checked (a heading, a table, HTML, a picture, code) stands elsewhere.
"""

import re
from collections.abc import Iterator

from perl.errors import Mistake
from perl.hub.card.form import CARD, FRONT_MATTER, shown

NOTES = "## Notes"
# What a line may not hold, wherever.
_REFUSED = {
    "HTML": re.compile(r"<[A-Za-z/!?]"),
    "a picture": re.compile(r"!\["),
    "a table": re.compile(r"\|"),
    "a control character": re.compile(r"[^\S \t]|[\x00-\x08\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"),
}
# A line is prose by its first characters: everything else, a table's second row too, begins with a sign.
_ITEM = re.compile(r"(?:[-*+]|\d{1,9}[.)])[ \t]+")
_MARGIN = re.compile(r" {0,3}(?=\S)")
_PROSE = re.compile(r"""(?:\*{1,2}|_{1,2}|`)?[\["'“”„«(±€§]*[^\W_]""")
_DEFINITION = re.compile(r"\[[^\]]*\]:")
_LINE_END = re.compile(r"\r\n|\r|\n")
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


def with_notes(card: str, older: str) -> str:
    """A card with the author's notes of an older one below it."""
    notes = split_notes(older)[1]
    return f"{card}\n{notes}" if notes else card


def notes_mistakes(notes: str, first: int) -> list[Mistake]:
    """What may not stand below ``## Notes``.

    Args:
        notes: From :func:`split_notes`.
        first: Likewise.
    """
    return [
        Mistake(f"holds {what} below ## Notes: {shown(line)}", f"{CARD}:{number}", "plain prose and lists only")
        for number, line in _lines(notes, first)
        for what in _refused(line)
    ]


def _refused(line: str) -> Iterator[str]:
    """What a line holds that is not prose; a lone carriage return ends a line too."""
    for part in filter(str.strip, _LINE_END.split(line)):
        yield from (what for what, pattern in _REFUSED.items() if pattern.search(part))
        margin, item = _MARGIN.match(part), _ITEM.match(part)
        text = part[item.end() if item else margin.end() if margin else 0 :]
        if margin is None:
            yield "code, or a list within a list"
        elif _ITEM.match(text):
            yield "a list within a list"
        elif _PROSE.match(text) is None or _DEFINITION.match(text):
            yield "what is neither prose nor a list"


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
