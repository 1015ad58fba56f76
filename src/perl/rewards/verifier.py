r"""Finds the answer in a completion and compares it with the gold answer.

gold, completion -> Verdict

Compares numbers exactly (integers, decimals, fractions, percentages, thousands separators) and anything else as words.
It does not read LaTeX: a gold answer that needs it is ``unparsable_gold``, never silently wrong.
"""

import re
import time
from fractions import Fraction

from perl.types import Verdict

# What stands before a final answer: "The answer is 42", "Answer: 42", GSM8K's "#### 42"; the last one.
_MARKER = re.compile(r"answer\s*(?:is|:)|####", re.IGNORECASE)
_BRACES = re.compile(r"\\boxed\{|[{}]")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
# Longer than any answer that is a number; keeps the comparison cheap whatever a model writes.
_LONGEST_NUMBER = 200
# Spaces that do not separate two numbers: around a slash, before a percent sign, after the sign, between thousands.
_LOOSE_SPACE = re.compile(r"\s*([/%])\s*|(?<=^[-+])\s+|(?<=\d)\s+(?=(?:\d{3}\s+)*\d{3}$)")
_MARKUP = re.compile(r"[\\{}$^_]")


def check(gold: str, completion: str) -> Verdict:
    r"""Whether a completion ends in the gold answer.

    Args:
        gold: The gold answer; with ``####`` (GSM8K) what stands after it.
        completion: All that the model wrote.

    Returns:
        The verdict, with the answer as it stands in the completion.

    Example:
        >>> check("1/2", r"so it is \boxed{0.5}").status
        'right'
        >>> check("12", "I do not know").status
        'no_answer'
    """
    started = time.perf_counter()
    extracted = extract_answer(completion)
    gold = gold.rsplit("####", 1)[-1].strip()
    if not is_plain(gold):
        status = "unparsable_gold"
    elif extracted is None:
        status = "no_answer"
    else:
        status = "right" if same_answer(gold, extracted) else "wrong"
    return Verdict(status, extracted, time.perf_counter() - started)  # type: ignore[arg-type]


def extract_answer(completion: str) -> str | None:
    r"""The final answer of a completion, or None.

    After the reasoning part (``</think>``) if there is one: the content of the last balanced ``\boxed{}``, else what
    follows the last "answer is", "answer:" or "####".
    """
    conclusion = completion.rsplit("</think>", 1)[-1]
    boxed = last_boxed(conclusion)
    if boxed is not None:
        return boxed.strip()
    for marker in reversed(list(_MARKER.finditer(conclusion))):
        rest = conclusion[marker.end() :].lstrip().removeprefix(":").strip()
        if rest:
            return rest.split("\n", 1)[0].strip().rstrip(".")
    return None


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` whose braces balance, or None."""
    open_braces: list[re.Match[str]] = []
    found: tuple[int, int] | None = None
    for brace in _BRACES.finditer(text):
        if brace.group() != "}":
            open_braces.append(brace)
        elif open_braces:
            opening = open_braces.pop()
            if opening.group() != "{" and (found is None or opening.end() > found[0]):
                found = opening.end(), brace.start()
    return text[slice(*found)] if found else None


def is_plain(gold: str) -> bool:
    """Whether a gold answer is a number or words, and so can be compared here."""
    return bool(gold.strip()) and not _MARKUP.search(gold)


def same_answer(gold: str, answer: str) -> bool:
    """Whether two answers are the same number, or the same words whatever their case.

    A percentage may be written as such, as its number or as the fraction it is: 50%, 50 and 0.5 agree with 50%.
    """
    both_percent = gold.strip().endswith("%") and answer.strip().endswith("%")
    if both_percent:
        gold, answer = (text.strip().rstrip("%").rstrip("\\") for text in (gold, answer))
    if _values(gold) & _values(answer):
        return True
    return " ".join(gold.casefold().split()) == " ".join(answer.casefold().split())


def _values(text: str) -> set[Fraction]:
    """What a number, a fraction or a percentage can mean; empty for anything else."""
    text = text.strip().strip("$").rstrip(".").strip()
    if not text or len(text) > _LONGEST_NUMBER:
        return set()
    text = _LOOSE_SPACE.sub(r"\1", text)
    if text.endswith("%"):
        values = _values(text.rstrip("%").rstrip("\\"))
        return values | {value / 100 for value in values}
    numerator, slash, denominator = text.partition("/")
    if not _is_number(numerator) or (slash and not _is_number(denominator)):
        return set()
    value = Fraction(numerator.replace(",", ""))
    if not slash:
        return {value}
    divisor = Fraction(denominator.replace(",", ""))
    return {value / divisor} if divisor else set()


def _is_number(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text)) and any(character.isdigit() for character in text)
