"""Problems that stand in two sets: the same ones, however they are typed, and near copies.

texts, texts -> positions of those that are in both, or nearly; texts, answers -> those that stand twice
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

# A problem is nearly another one if so large a share of its runs of so many words stand in that.
NEAR, _WORDS = 0.8, 8
# What closes a sentence; an exclamation mark may be a factorial.
_CLOSING = ".,;:?\u3002"
_WORD = re.compile(r"\w+|[^\w\s]")


def normalised(text: str) -> str:
    """A text without what two copies differ in: case, forms of letters, spaces, invisible characters, a last point."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    if not plain.isascii():
        plain = "".join(mark for mark in plain if unicodedata.category(mark) != "Cf")
    return " ".join(plain.split()).rstrip(_CLOSING + " ")


def same(texts: Sequence[str], others: Sequence[str]) -> list[int]:
    """Positions of the texts that are among the others."""
    known = {normalised(other) for other in others}
    return [i for i, text in enumerate(texts) if normalised(text) in known]


def repeated(texts: Sequence[str], answers: Sequence[str | None]) -> tuple[list[int], list[int]]:
    """Positions of texts that stand earlier too, and of those among them that have another answer there."""
    first: dict[str, int] = {}
    twice = [(first.setdefault(normalised(text), i), i) for i, text in enumerate(texts)]
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
