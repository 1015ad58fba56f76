r"""What a completion says: its text, what follows the reasoning, and the final answer in it.

completion -> text -> conclusion -> answer; gold answer as a data set holds it -> the answer itself

What an answer means is the verifier's part. Every search is linear in the length of the text,
whatever a model writes.
"""

import re
from collections.abc import Sequence
from typing import Any

Completions = Sequence[str] | Sequence[Sequence[dict[str, Any]]]

REASONING_START, REASONING_END = "<think>", "</think>"
# Escaped braces and line breaks are matched so that they are not taken for what they end in.
_BRACES = re.compile(r"\\\\|\\[{}]|\\(?:boxed|fbox)[ \t]{0,8}\{|[{}]")
# What stands before a final answer; of several the last one counts.
_MARKER = re.compile(
    r"answer[ \t*_]{0,8}(?:is\b|[:=\uff1a])|solution is\b"  # The answer is 42; **Answer:** 42
    r"|answer(?=[ \t]{0,8}(?:\$|\\\(|\\\[))"  # Answer $42$
    r"|####"  # GSM8K
    r"|\u7b54\u6848[ \t]{0,8}(?:[\u662f\u4e3a:\uff1a]|(?=\$))"  # "answer is" in Chinese
    r"|<answer>",
    re.IGNORECASE,
)
_FILLING = " \t\r\n:*_\uff1a"
# A dollar sign in a formula about money is escaped: $\$18.90$.
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$((?:[^\\$]|\\.)+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
# Where an answer in running text ends; a point between digits does not end it.
_END = re.compile(r"[.!?](?=\s|$)|\u3002|\n|<\||</answer>")
_IS = re.compile(r"\s(?:is|are|equals|be)\s|\u662f")
# How much of the text behind a marker is looked at, and how many markers, the last ones, are.
_LONGEST_ANSWER = 2000
_MOST_MARKERS = 50


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """What the model wrote, whichever form it comes in."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def conclusion(text: str) -> str:
    """What follows the reasoning part: all after the last ``</think>``; nothing if reasoning began and never ended."""
    _, end, rest = text.rpartition(REASONING_END)
    if end:
        return rest
    return "" if REASONING_START in text else text


def extract_answer(completion: str) -> str | None:
    r"""The final answer of a completion, or None.

    In its conclusion the content of the last ``\boxed{}`` whose braces balance; else what follows the last "answer is",
    "Answer:", "####" or ``<answer>``: the formula there, or the words up to the end of the sentence.
    """
    text = conclusion(completion)
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    for marker in list(_MARKER.finditer(text))[: -_MOST_MARKERS - 1 : -1]:
        answer = _announced(text[marker.end() : marker.end() + _LONGEST_ANSWER])
        if answer:
            return answer
    return None


def gold_answer(gold: str) -> str:
    r"""The answer in what a data set calls the answer.

    A bare answer stays as it is; of a worked solution it is what follows ``####`` (GSM8K), stands in the last
    ``\boxed{}`` (MATH), or follows "answer is" or "Answer:".
    """
    if "####" in gold:
        return gold.rpartition("####")[2].strip()
    boxed = last_boxed(gold)
    if boxed is not None:
        return boxed.strip()
    if len(gold) > len("answer:") and _MARKER.search(gold):
        return extract_answer(gold) or gold.strip()
    return gold.strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` whose braces balance, or None."""
    open_braces: list[re.Match[str]] = []
    found: tuple[int, int] | None = None
    for brace in _BRACES.finditer(text):
        mark = brace.group()
        if mark[-1] == "{" and mark != "\\{":
            open_braces.append(brace)
        elif mark == "}" and open_braces:
            opening = open_braces.pop()
            if opening.group() != "{" and (found is None or opening.end() > found[0]):
                found = opening.end(), brace.start()
    return text[slice(*found)] if found else None


def _announced(rest: str) -> str | None:
    """The answer at the beginning of what follows a marker."""
    rest = rest.lstrip(_FILLING)
    formula = _FORMULA.match(rest)
    if formula:
        return _inside(formula)
    end = _END.search(rest)
    sentence = rest[: end.start()] if end else rest
    before, _, stated = _parted(sentence)
    formulas = [_inside(found) for found in _FORMULA.finditer(stated if before else sentence)]
    return formulas[-1] if formulas else stated.strip(" \t\r*_") or None


def _parted(sentence: str) -> tuple[str, str, str]:
    """A sentence cut at its last "is": "The smallest value of $N$ is 5"."""
    verbs = list(_IS.finditer(sentence))
    if not verbs:
        return "", "", sentence
    return sentence[: verbs[-1].start()], verbs[-1][0], sentence[verbs[-1].end() :]


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()
