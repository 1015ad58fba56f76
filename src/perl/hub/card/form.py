"""The form of a card: front matter that is plain YAML, no HTML, no picture from elsewhere, no link to nothing.

text, names of files -> mistakes, a line each; card, older card -> card with its author's words

A card is text from anywhere: its YAML is read as plain values, and no more of it than a card may have. Whether what it
says is true is for :mod:`perl.hub.card.check`.
"""

import posixpath
import re
from collections.abc import Collection
from typing import Any

import yaml

from perl.errors import Mistake, PerlError
from perl.hub.card.published import CARD
from perl.hub.gate.gate import largest
from perl.recipe.plain_yaml import plain_value, refuse_tags

LARGEST_CARD = largest(CARD) or 0
AGAIN = "perl card RUN writes it anew"
AUTHOR = "## Said by the author, not checked"
"""The last heading of a card, below which its author's own words stand as a quotation."""
FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---\r?(?:\n|\Z)", re.DOTALL)
_FENCES = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_HTML = re.compile(r"<[A-Za-z/!?][^>\n]*>?")
_LINK = re.compile(r"(!?)\[[^\]\n]*\]\(\s*<?([^)>\s]+)")
# In an author's own words nothing is taken for code, which HTML could be hidden in; what a reference in brackets names
# would hold in the whole card.
_NOT_IN_WORDS = re.compile(r"<[A-Za-z/!?]|!\[|\]:")
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*:|//|#", re.IGNORECASE)


def card_mistakes(card: str, files: Collection[str]) -> list[Mistake]:
    """Why a card is not fit for the Hub.

    Args:
        card: ``README.md``.
        files: Paths of all files beside it.
    """
    metadata, mistakes = read_front_matter(card)
    return mistakes if metadata is None else _text_mistakes(card, files)


def read_front_matter(card: str) -> tuple[dict[str, Any] | None, list[Mistake]]:
    """A card's metadata; None, and why, if it has none that is plain YAML."""
    if len(card) > LARGEST_CARD:
        return None, [Mistake(f"has {len(card):,} characters, a card has at most {LARGEST_CARD:,}", CARD)]
    match = FRONT_MATTER.match(card)
    if match is None:
        return None, [Mistake("has no YAML between --- and --- at its beginning", CARD, AGAIN)]
    try:
        refuse_tags(match[1], CARD)
        metadata = plain_value(match[1])
    except PerlError as error:
        return None, [Mistake(mistake.message, mistake.where) for mistake in error.mistakes]
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a number too long for Python
        reason = getattr(error, "problem", None) or type(error).__name__
        return None, [Mistake(f"its front matter is not valid YAML: {reason}", CARD)]
    if not isinstance(metadata, dict):
        return None, [Mistake("its front matter is not a mapping", CARD, AGAIN)]
    return metadata, []


def split_author(card: str) -> tuple[str, list[str]]:
    """A card without its last section, and the lines of that: what its author says."""
    ours, _, words = f"{card}\n".partition(f"\n{AUTHOR}\n")
    return ours.rstrip("\n") + "\n", words.strip().splitlines()


def with_author(card: str, older: str) -> str:
    """A card with the author's words of an older one below it, quoted so that none can be taken for a part of it."""
    words = split_author(older)[1]
    quoted = [line if line.startswith(">") else f"> {line}".rstrip() for line in words]
    return "\n".join([card.rstrip("\n"), "", AUTHOR, "", *quoted]) + "\n" if quoted else card


def _text_mistakes(card: str, files: Collection[str]) -> list[Mistake]:
    """Links to files that are not there, pictures of somebody else's, HTML; every line keeps its number."""
    ours = split_author(card)[0].count("\n")
    bare = FRONT_MATTER.sub(lambda match: "\n" * match[0].count("\n"), card)
    bare = _FENCES.sub(lambda match: "\n" * match[0].count("\n"), bare)
    found = []
    for number, line in enumerate(bare.split("\n"), 1):
        where = f"{CARD}:{number}"
        for mark, target in _LINK.findall(line):
            remote, what = _REMOTE.match(target), "picture" if mark else "file"
            if not remote and posixpath.normpath(target.partition("#")[0]) not in files:
                found.append(Mistake(f"there is no {what} {shown(target)}", where))
            elif remote and mark:
                hint = "the next reader sees another"
                found.append(Mistake(f"shows a picture from elsewhere: {shown(target)}", where, hint))
        tags = _HTML.findall(_CODE.sub("", line)) if number <= ours else _NOT_IN_WORDS.findall(line)
        for tag in tags:
            what = "HTML" if number <= ours else "HTML, a picture or a reference in its author's words"
            found.append(Mistake(f"holds {what}: {shown(tag)}", where, "a card is Markdown"))
    return found


def shown(text: str, most: int = 80) -> str:
    """Somebody's text on a line of ours: cut, and without characters that a terminal obeys."""
    plain = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return plain if len(plain) <= most else f"{plain[: most - 3]}..."
