r"""Multiple choice: the letter that a completion announces, and the letter of the right choice.

completion, texts of the choices -> letter; answers as a data set holds them -> letters

Every search is linear in the length of the text, whatever a model writes.
"""

import re
import string
from collections.abc import Sequence

from perl.errors import Mistake
from perl.rewards.answers import conclusion, last_boxed

LETTERS = string.ascii_uppercase
"""Of as many choices as a question may have."""

# What stands before a choice that is announced; of several the last one counts.
_MARKER = re.compile(
    r"answer[ \t*_]{0,8}(?:is\b|was\b|(?:should|would|must) be\b|[:=\uff1a])"  # the answer is C; **Answer:** C
    r"|(?:correct|right|best|final)[ \t*_]{1,4}(?:choice|option)[ \t*_]{0,8}(?:is\b|[:=\uff1a])"
    r"|\u7b54\u6848[ \t]{0,8}[\u662f\u4e3a:\uff1a]"  # "answer is" in Chinese
    r"|####|<answer>",
    re.IGNORECASE,
)
_WRAPPING = re.compile(r"\\(?:boxed|fbox|text|textbf|textrm|textit|mathrm|mathbf|bf|rm)\b|\\[()\[\]]|[{}$*_`]")
_LEADING = re.compile(r"(?:(?:the|is|option|choice|letter|answer)\b[\s:]*|[\s:=\"'\u201c])+", re.IGNORECASE)
_IN_BRACKETS = re.compile(r"[(\[]\s*([A-Za-z])\s*[)\]]")
_CAPITAL = re.compile(r"([A-Z])(?![\w'\u2019])")
_SMALL = re.compile(r"([a-z])(?:[).:](?!\w)|\s*$)")
# "A" and "I" before another word are words themselves, unless a reason follows.
_GOES_ON = re.compile(r"\s+(?!because\b|since\b|as\b|and\b|which\b|with\b)[a-z]")
_LINE_ALONE = re.compile(r"\W*([A-Za-z])\W*")
_LINE_BEGINS = re.compile(r"[^\w\n]*([A-Z])[).:](?=\s|$)")
_INLINE = re.compile(r"\(([A-Z])\)")
# How much of the text behind a marker is looked at.
_LONGEST = 400


def announced_letter(completion: str, choices: Sequence[str]) -> str | None:
    r"""The letter of the choice that a completion ends in, or None.

    In its conclusion the last of what stands in ``\boxed{}`` or after "answer is", "Answer:", "####" or ``<answer>``: a
    letter or a choice's own text. Where nothing is announced: a last line that is a letter, a letter at the beginning
    of a line ("C. 42") or in brackets if it is the only one, or a choice's text alone.

    Args:
        completion: All that the model wrote.
        choices: Texts, in the order of their letters. A letter that is none of theirs counts where it is announced.
    """
    text = conclusion(completion)
    found = []
    boxed = last_boxed(text)
    if boxed is not None:
        found.append((max(text.rfind("\\boxed"), text.rfind("\\fbox")), _letter_at(boxed, choices)))
    found += [(m.end(), _letter_at(text[m.end() : m.end() + _LONGEST], choices)) for m in _MARKER.finditer(text)]
    announced = [(place, letter) for place, letter in found if letter is not None]
    return max(announced)[1] if announced else _alone(text, choices)


def right_letters(answers: Sequence[str], choices: Sequence[Sequence[str]]) -> list[str] | Mistake:
    """The letters of the right choices, from answers that are letters, numbers counted from 0, or choices' texts.

    All answers of a data set are read in the same way. Where two ways fit all and say different things, none is taken.

    Args:
        answers: One a question.
        choices: The texts of each question's choices.

    Returns:
        What is wrong, without a place, where an answer is none of these.
    """
    found: dict[str, list[int | None]] = {"letters": [], "numbers counted from 0": [], "choices' texts": []}
    for answer, texts in zip(answers, choices, strict=True):
        letter = re.fullmatch(r"\(?([A-Za-z])[).:]?", answer)
        number = re.fullmatch("[0-9]{1,2}", answer)
        ways = (letter and LETTERS.index(letter[1].upper()), number and int(answer), _by_text(answer, texts))
        for places, place in zip(found.values(), ways, strict=True):
            places.append(place if place is not None and place < len(texts) else None)
    fitting = {name: places for name, places in found.items() if None not in places}
    if not fitting:
        odd = max(places.index(None) for places in found.values())  # as far as the best way comes
        message = f"answer {answers[odd]!r:.60} of row {odd + 1} is none of its {len(choices[odd])} choices"
        return Mistake(message, hint="in all rows a letter, a number counted from 0, or the choice's text")
    if len({tuple(places) for places in fitting.values()}) > 1:
        message = f"answers may be {' or '.join(fitting)}"
        return Mistake(message, hint="write letters: A is the first choice")
    return [LETTERS[place] for place in next(iter(fitting.values())) if place is not None]


def listed(question: str, choices: Sequence[str]) -> str:
    """A question with its choices below, a line each."""
    lines = [f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return f"{question}\n\n" + "\n".join(lines)


def _by_text(answer: str, choices: Sequence[str]) -> int | None:
    same = [place for place, choice in enumerate(choices) if _plain(choice) == _plain(answer)]
    return same[0] if len(same) == 1 else None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .")


def _letter_at(rest: str, choices: Sequence[str]) -> str | None:
    """The letter at the beginning of what is announced; a choice's text stands for its letter."""
    plain = _WRAPPING.sub("", rest)
    leading = _LEADING.match(plain)
    plain = plain[leading.end() :] if leading else plain
    letter = None
    if match := _IN_BRACKETS.match(plain) or _CAPITAL.match(plain) or _SMALL.match(plain):
        word = match[0] in "AI" and _GOES_ON.match(plain, match.end())
        letter = None if word else match[1].upper()
    if letter is not None and LETTERS.index(letter) < len(choices):
        return letter
    line = plain.split("\n", 1)[0]
    for said in (line, line.split(". ", 1)[0]):
        place = _by_text(said, choices)
        if place is not None:
            return LETTERS[place]
    return letter


def _alone(text: str, choices: Sequence[str]) -> str | None:
    """The letter of a text that announces nothing."""
    lines = [_WRAPPING.sub("", line) for line in text.split("\n") if line.strip()]
    if not lines:
        return None
    known = LETTERS[: len(choices)]
    last = _LINE_ALONE.fullmatch(lines[-1])
    if last and last[1].upper() in known:
        return last[1].upper()
    for found in (
        {match[1] for line in lines if (match := _LINE_BEGINS.match(line))},
        {match[1] for line in lines for match in _INLINE.finditer(line)},
    ):
        some = found & set(known)
        if len(some) == 1:
            return some.pop()
        if some:
            return None
    place = _by_text(lines[-1], choices)
    return None if place is None else LETTERS[place]
