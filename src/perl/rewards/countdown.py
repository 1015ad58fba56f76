r"""The countdown game: an arithmetic expression that makes the target out of the given numbers.

completion -> answer -> expression -> its exact value and the numbers in it -> reward

Nothing that a model writes is run: the verifier's arithmetic reads whole numbers, + - * / and parentheses, exactly.
Every search is linear in the length of the text.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from perl.rewards.answers import Completions, completion_text, conclusion, last_boxed
from perl.rewards.verifier.arithmetic import exact_value

_TAG = re.compile(r"<answer>|</answer>")
_OPERATORS = {"\\times": "*", "\\cdot": "*", "\\div": "/", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-"}
# Digits by name: \d is any digit of Unicode.
_EXPRESSION = re.compile(r"[0-9+\-*/() ]+")
# What is a product or a mixed number elsewhere, and a number that begins with 0.
_NO_OPERATOR = re.compile(r"[0-9)] ?\(|\) ?[0-9]|[0-9] [0-9]|(?<![0-9])0[0-9]")
_WHOLE_NUMBER = re.compile(r"-?[0-9]+")
# Longer than any answer of the game.
_LONGEST_ANSWER = 500


def countdown_reward(
    completions: Completions,
    target: Sequence[int | None],
    numbers: Sequence[Sequence[int] | None],
    *,
    format_score: float = 0.1,
    **_: Any,  # noqa: ANN401
) -> list[float | None]:
    r"""1 for an expression that uses each number exactly once and makes the target, a little for any other answer.

    The answer is what the last ``<answer></answer>`` after the reasoning holds; if there are no such tags, the last
    ``\boxed{}``. Operators may be written in LaTeX (``\times``, ``\cdot``, ``\div``) or as signs; ``= 24`` may follow
    the expression if that is the target.

    Args:
        completions: Text, or lists of chat messages.
        target: The number to be made, one a completion.
        numbers: The whole numbers to make it of, one list a completion.
        format_score: For an answer, even an empty one, that is not right: it cannot be read, divides by zero, uses
            other numbers, or has another value.

    Returns:
        1.0, ``format_score``, 0.0 where there is no answer, or None for an example without target or numbers.

    Raises:
        ValueError: ``format_score`` is not a number of at least 0 and below 1.

    Source:
        TinyZero (github.com/Jiayi-Pan/TinyZero, verl/utils/reward_score/countdown.py), same scores. It looks at the
        last line only, knows no ``\boxed{}`` and none of the other ways to write an operator, evaluates the answer as
        Python (so ``//`` and ``**`` get through), in floating point with a tolerance of 1e-5; this one is exact.
    """
    if not (isinstance(format_score, int | float) and 0 <= format_score < 1):
        raise ValueError(f"format_score must be a number of at least 0 and below 1, not {format_score!r}")
    rewards: list[float | None] = []
    for text, goal, given in zip(map(completion_text, completions), target, numbers, strict=True):
        text = conclusion(text)
        answer, start = None, None
        for tag in _TAG.finditer(text):
            if tag.group() == "<answer>":
                start = tag.end()
            elif start is not None:
                answer, start = text[start : tag.start()], None
        answer = last_boxed(text) if answer is None else answer
        if goal is None or given is None:
            rewards.append(None)
        elif answer is None:
            rewards.append(0.0)
        else:
            rewards.append(1.0 if _makes(answer, goal, given) else float(format_score))
    return rewards


def _makes(answer: str, target: int, numbers: Sequence[int]) -> bool:
    """Whether the answer is an expression of exactly these numbers with the target as its value."""
    if len(answer) > _LONGEST_ANSWER:
        return False
    for written, meant in _OPERATORS.items():
        answer = answer.replace(written, meant)
    expression, equals, claimed = (" ".join(part.split()) for part in answer.partition("="))
    if equals and not (_WHOLE_NUMBER.fullmatch(claimed) and int(claimed) == Fraction(target)):
        return False
    if not _EXPRESSION.fullmatch(expression) or _NO_OPERATOR.search(expression):
        return False
    used = [int(number) for number in _WHOLE_NUMBER.findall(expression.replace("-", " "))]
    given = [int(number) for number in numbers]
    return sorted(used) == sorted(given) and exact_value(expression.replace("*", "\\cdot ")) == Fraction(target)
