"""Problems that stand in two sets: the same ones, however they are typed, and near copies.

texts, texts -> positions of those that are in both, or nearly; texts, answers -> those that stand twice
"""

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

# A problem is nearly another one if so large a share of its runs of so many words stand in that.
NEAR, _WORDS = 0.8, 8
# What closes a sentence; an exclamation mark may be a factorial.
_CLOSING = ".,;:?\u3002"
# Dashes, signs and quotation marks for one another; dollars, and characters that only look like nothing, for nothing.
_ALIKE = str.maketrans(
    "\u2010\u2011\u2012\u2013\u2014\u2212\u00d7\u00b7\u2018\u2019\u201c\u201d",
    "------**''\"\"",
    "$\x7f\u034f\u115f\u1160\u2800\u3164\uffa0" + "".join(map(chr, range(0xFE00, 0xFE10))),
)
_IDLE_SPACE = re.compile(r"(?<!\w) | (?!\w)")
_WORD = re.compile(r"\w+|[^\w\s]")


def normalised(text: str) -> str:
    """A text without what two copies differ in.

    That is case, forms of letters, dashes and quotation marks, spaces, invisible characters, dollars, a last point.
    """
    plain = unicodedata.normalize("NFKC", html.unescape(text)).casefold().replace("\\times", "*").translate(_ALIKE)
    if not plain.isascii():
        plain = "".join(mark for mark in plain if unicodedata.category(mark) != "Cf")
    return " ".join(plain.split()).rstrip(_CLOSING + " ")


def _key(text: str) -> str:
    """What equal problems have in common: spaces count between two words or numbers alone."""
    return _IDLE_SPACE.sub("", normalised(text))


def same(texts: Sequence[str], others: Sequence[str]) -> list[int]:
    """Positions of the texts that are among the others."""
    known = {_key(other) for other in others}
    return [i for i, text in enumerate(texts) if _key(text) in known]


def repeated(texts: Sequence[str], answers: Sequence[str | None]) -> tuple[list[int], list[int]]:
    """Positions of texts that stand earlier too, and of those among them that have another answer there."""
    first: dict[str, int] = {}
    twice = [(first.setdefault(_key(text), i), i) for i, text in enumerate(texts)]
    again = [(before, i) for before, i in twice if before != i]
    return [i for _, i in again], [i for before, i in again if answers[i] != answers[before]]


def near_copies(texts: Sequence[str], others: Sequence[str]) -> list[int]:
    """Positions of the texts of which most runs of words stand in one of the others, which may be the same.

    Runs that most texts share, as an instruction in front of each, do not count.
    """
    runs = [_runs(text) for text in texts]
    common = Counter(run for of_one in runs for run in of_one)
    own = [{run for run in of_one if common[run] <= max(2, len(texts) / 2)} for of_one in runs]
    places: dict[tuple[str, ...], list[int]] = {}
    for i, of_one in enumerate(own):
        for run in of_one:
            places.setdefault(run, []).append(i)
    near: set[int] = set()
    for other in others:
        shared = Counter(i for run in _runs(other) for i in places.get(run, ()))
        near |= {i for i, count in shared.items() if count >= NEAR * len(own[i])}
    return sorted(near)


def _runs(text: str) -> set[tuple[str, ...]]:
    words = _WORD.findall(normalised(text))
    return {tuple(words[i : i + _WORDS]) for i in range(max(1, len(words) - _WORDS + 1))}
