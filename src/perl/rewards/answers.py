r"""What a completion says: its text, what follows the reasoning, and the final answer in it.

completion -> text -> conclusion -> answer; gold answer as a data set holds it -> the answer itself

What an answer means is the verifier's part. Every search is linear in the length of the text,
whatever a model writes.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

Completions = Sequence[str] | Sequence[Sequence[dict[str, Any]]]

REASONING_START, REASONING_END = "<think>", "</think>"
# Escaped braces and line breaks are matched so that they are not taken for what they end in.
_BRACES = re.compile(
    r"\\\\|\\[{}]|\\(?:boxed|fbox|framebox)\s{0,8}\{|[{}]"
    # \boxed 5 and \boxed\frac{1}{2}: without spaces, and no word, as in "use \boxed for the answer".
    r"|\\(?:boxed|fbox|framebox)(?![a-zA-Z])[ \t]{0,8}"
    r"(?=[-+.]{0,2}(?:\d|\\(?:[dt]?frac|sqrt|pi|text)(?![a-zA-Z]))|[a-zA-Z][ \t]{0,8}\$)"
    r"(?P<bare>(?:[^\s{}\\$,;.!?]|[.,](?=\d)|\\[a-zA-Z]+|\{[^{}\n]{0,100}\})+)"
)
# What stands in a box that is only spoken of: "put your answer in \boxed{}".
_NO_CONTENT = re.compile(
    r"(?:[\s._{}]|\\[ ,;:!]|\\[lc]?dots|(?:\\text\s*\{)?\s*(?:the |your |final )*answer(?: here)?\s*\}?)*",
    re.IGNORECASE,
)
# Between boxes that hold the values of one answer, and a name that stands before a box.
_BETWEEN = re.compile(
    r"(?:[\s$,;&~*]|\\[\[\]()\\,;:! ]|\\q?quad|\\text\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|and|or"
    r"|\n[ \t]{0,8}(?:[-\u2022]|\d{1,2}[.)])[ \t]|[a-zA-Z]\w{0,2}(?:_\{?\w{1,3}\}?)?\s*=)*"
)
_NAME = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z](?:_\{?\w{1,3}\}?)?\s*=\s*$")
_FARTHEST, _MOST_BOXES = 40, 20
# What stands before a final answer; of several the last one counts.
_MARKER = re.compile(
    # The answer is 42; **Answer:** 42; a heading above a last line of a few words
    r"answer[ \t*_]{0,8}(?:is\b(?:,? (?:therefore|thus|hence|then|simply|just)\b,?)?|[:=\uff1a])|solution is\b"
    r"|(?:^|(?<=\n))[ \t]{0,8}(?:#{1,6}|\*\*|__)?[ \t]{0,8}(?:final answer|(?<=[#*_ ])answer)[ \t\r*_]{0,8}\n\s{0,8}"
    r"(?=\\\[|\$\$|\S{1,99}(?:[ \t]+\S{1,99}){0,7}\s*\Z)"
    r"|answer(?=[ \t]{0,8}(?:\$|\\\(|\\\[))"  # Answer $42$
    r"|####"  # GSM8K
    r"|\u7b54\u6848[ \t]{0,8}(?:[\u662f\u4e3a:\uff1a]|(?=\$))"  # "answer is" in Chinese
    r"|<answer>",
    re.IGNORECASE,
)
_FILLING = " \t\r\n:*_`\uff1a"
# The tokens that end a turn; what a model writes behind them is no part of the completion.
_TURN_END = re.compile(r"<\|(?:im_end|endoftext|eot_id|end_of_text|end)\|>")
# A dollar sign in a formula about money is escaped: $\$18.90$.
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$((?:[^\\$]|\\.)+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
# Where an answer in running text ends; a point between digits does not end it.
_END = re.compile(r"[.!?](?=\s|$)|\u3002|\n|<\||</answer>")
_IS = re.compile(r"\s(?:is|are|equals|be)\s|\u662f")
# The last sentence of a text: one that concludes, or what is bold at its end.
_THEREFORE = re.compile(r"(?<![^\s])(?:Therefore|Thus|Hence|So|In conclusion),? ((?:[^.!?\n]|[.!?](?=\S))+)[.!?]?$")
_BOLD_END = re.compile(r"\*\*([^*\n]+)\*\*[.!\u3002]?$")
# How much of the text behind a marker is looked at, and how many markers, the last ones, are.
_LONGEST_ANSWER = 2000
_MOST_MARKERS = 50


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """What the model wrote, whichever form it comes in; of a conversation what follows the last answer."""
    if isinstance(completion, str):
        return completion
    behind = (at for at, message in enumerate(completion, 1) if message.get("role") == "tool")
    return "".join(str(message.get("content") or "") for message in completion[max(behind, default=0) :])


def conclusion(text: str) -> str:
    """What follows the last ``</think>``, in the first turn; nothing if reasoning began and never ended."""
    text = _TURN_END.split(text, maxsplit=1)[0]
    _, end, rest = text.rpartition(REASONING_END)
    if end:
        return rest
    return "" if REASONING_START in text else text


def extract_answer(completion: str) -> str | None:
    r"""The final answer of a completion, or None.

    In its conclusion what is boxed or announced; else what its last sentence concludes ("Therefore, the sum is 5."),
    what is bold at its end, or the formula of the only sentence.
    """
    text = conclusion(completion)
    if announced := announced_answer(text):
        return announced
    text = text.partition("<|")[0].strip()
    if bold := _BOLD_END.search(text[-_LONGEST_ANSWER:]):
        return bold[1].strip() or None
    formulas = list(itertools.islice(_FORMULA.finditer(text), 2))
    if len(formulas) == 1 and not _END.search(text[: formulas[0].start()] + text[formulas[0].end() : -1]):
        return _inside(formulas[0])
    *_, last = [None, *_THEREFORE.finditer(text[-_LONGEST_ANSWER:])]
    sentence = last[1] if last else ""
    return _announced(sentence) if _parted(sentence)[0] else None


def announced_answer(text: str) -> str | None:
    r"""The content of the last ``\boxed{}`` whose braces balance, with boxes beside it, or what is announced.

    That is what follows the last "answer is", "Answer:", "####" or ``<answer>``: the formula there, or the words up to
    the end of the sentence.
    """
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed
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
    boxed = boxed_answer(gold)
    if boxed is not None:
        return boxed
    if len(gold) > len("answer:") and _MARKER.search(gold):
        return extract_answer(gold) or gold.strip()
    return gold.strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` whose braces balance and that holds something, or None."""
    boxes = _boxes(text)
    return boxes[-1].content if boxes else None


def boxed_answer(text: str) -> str | None:
    r"""The content of the last box, with those before it that hold other values of the same answer.

    ``x = \boxed{1}$ or $x = \boxed{2}`` is ``x = 1, x = 2``; two boxes with anything else between them are two answers.
    """
    last: list[_Box] = []
    for box in reversed(_boxes(text)[-_MOST_BOXES:]):
        gap = text[box.end : last[0].start] if last else ""
        if last and (box.end > last[0].start or len(gap) > _FARTHEST or not _BETWEEN.fullmatch(gap)):
            break
        last.insert(0, box)
    contents = [box.content.strip() for box in last]
    if len(set(contents)) < 2:
        return contents[0] if contents else None
    names = [_NAME.search(text[max(0, box.start - _FARTHEST) : box.start].rstrip(" $")) for box in last]
    rows = zip(names, contents, strict=True)
    return ", ".join(f"{name[0].strip()} {c}" if name and "=" not in c else c for name, c in rows)


class _Box(NamedTuple):
    """A box in a text: where its command begins, where it ends, and what is in it."""

    start: int
    end: int
    content: str


def _boxes(text: str) -> list[_Box]:
    """The boxes that hold something, in the order in which they begin."""
    open_braces: list[re.Match[str]] = []
    found: list[_Box] = []
    for brace in _BRACES.finditer(text):
        mark = brace.group()
        if bare := brace["bare"]:
            found.append(_Box(brace.start(), brace.end(), bare))
        elif mark[-1] == "{" and mark != "\\{":
            open_braces.append(brace)
        elif mark == "}" and open_braces:
            opening = open_braces.pop()
            if opening.group() != "{":
                found.append(_Box(opening.start(), brace.end(), text[opening.end() : brace.start()]))
    return sorted(box for box in found if not _NO_CONTENT.fullmatch(box.content))


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
    return formulas[-1] if formulas else stated.strip(" \t\r*_`") or None


def _parted(sentence: str) -> tuple[str, str, str]:
    """A sentence cut at its last "is": "The smallest value of $N$ is 5"."""
    verbs = list(_IS.finditer(sentence))
    if not verbs:
        return "", "", sentence
    return sentence[: verbs[-1].start()], verbs[-1][0], sentence[verbs[-1].end() :]


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()
