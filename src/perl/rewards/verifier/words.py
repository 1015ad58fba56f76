r"""Answers that are words: "no solution", names, the letter of a multiple choice.

tidy answer -> words in one spelling

Numbers are compared in ``arithmetic.py``.
"""

import functools
import re

from perl.rewards.verifier.latex import TEXT_END, TEXT_START

_WORD = re.compile(r"[^\W\d_]{2,}")
_NO_WORDS = re.compile(r"\\[a-zA-Z]+|[\d^_=+*/<>{}|\\-]")
_TEXT = re.compile(rf"{TEXT_START}[^{TEXT_END}]*{TEXT_END}")
_FEW_LETTERS = re.compile(r"[a-zA-Z]{2,3}")
_CHOICE = re.compile(r"\(?([A-J])(?:\)|[.:](?!\d)|$)", re.IGNORECASE)


@functools.lru_cache(maxsize=4096)
def is_words(text: str) -> bool:
    """Whether a tidy text is words: what stands in LaTeX's text, or letters that are no variables and no functions."""
    if TEXT_START in text:
        return not _TEXT.sub("", text).strip(" .,()")
    return not _NO_WORDS.search(text) and bool(_WORD.search(text))


def normal_words(text: str) -> str:
    """Words whatever their case, spaces and closing punctuation."""
    words = " ".join(_untexted(text).casefold().split()).strip(" .,;:!")
    return words[1:-1].strip() if re.fullmatch(r"\([^()]*\)", words) else words


def is_same_product(gold: str, answer: str) -> bool:
    """Whether two or three letters may as well be variables, multiplied in another order: ab and ba."""
    return _FEW_LETTERS.fullmatch(gold) is not None and sorted(gold) == sorted(answer)


def is_choice(text: str) -> bool:
    """Whether a tidy text is the letter of a multiple choice: A, (A), A., up to J."""
    return _CHOICE.fullmatch(_untexted(text)) is not None


def different_choices(gold: str, answer: str) -> bool:
    """Whether both are letters of a multiple choice, and not the same one; a and A may be the same."""
    letters = _CHOICE.fullmatch(_untexted(gold)), _CHOICE.fullmatch(_untexted(answer))
    return bool(letters[0] and letters[1] and letters[0][1].casefold() != letters[1][1].casefold())


def chosen(gold: str, answer: str) -> list[str]:
    """The letter of a multiple-choice answer that also states what it stands for, "(C) 42", or is in brackets."""
    letter = _CHOICE.match(_untexted(answer)) if is_choice(gold) and max(len(gold), len(answer)) > 1 else None
    return [letter[1].upper(), f"({letter[1].upper()})"] if letter else []


def _untexted(text: str) -> str:
    return text.replace(TEXT_START, "").replace(TEXT_END, "").strip()
