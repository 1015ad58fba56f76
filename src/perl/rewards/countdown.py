r"""The countdown game: an arithmetic expression that makes the target out of the given numbers.

completion -> answer -> expression -> its exact value and the numbers in it -> reward

Nothing that a model writes is evaluated: an expression is parsed and walked, and only whole
numbers, + - * / and parentheses are walked through. Every search is linear in the length of the text.
"""

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from perl.rewards.answers import Completions, completion_text, conclusion, last_boxed

_TAG = re.compile(r"<answer>|</answer>")
_OPERATORS = {"\\times": "*", "\\cdot": "*", "\\div": "/", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-"}
# Digits by name: \d is any digit of Unicode.
_EXPRESSION = re.compile(r"[0-9+\-*/() ]+")
_WHOLE_NUMBER = re.compile(r"-?[0-9]+")
# Longer than any answer of the game. Python's parser recurses: what it is given must be short and not deep.
_LONGEST_ANSWER = 500
_DEEPEST = 100

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


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
        answer = _answer_of(text)
        if goal is None or given is None:
            rewards.append(None)
        elif answer is None:
            rewards.append(0.0)
        else:
            rewards.append(1.0 if _makes(answer, goal, given) else float(format_score))
    return rewards


def _answer_of(text: str) -> str | None:
    text = conclusion(text)
    found, start = None, None
    for tag in _TAG.finditer(text):
        if tag.group() == "<answer>":
            start = tag.end()
        elif start is not None:
            found, start = text[start : tag.start()], None
    return last_boxed(text) if found is None else found


def _makes(answer: str, target: int, numbers: Sequence[int]) -> bool:
    """Whether the answer is an expression of exactly these numbers with the target as its value."""
    if len(answer) > _LONGEST_ANSWER:
        return False
    for written, meant in _OPERATORS.items():
        answer = answer.replace(written, meant)
    expression, equals, claimed = (" ".join(part.split()) for part in answer.partition("="))
    if equals and not (_WHOLE_NUMBER.fullmatch(claimed) and int(claimed) == target):
        return False
    read = _read(expression)
    if read is None:
        return False
    value, used = read
    return value == target and sorted(used) == sorted(numbers)


def _read(expression: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression and the numbers in it; None if it is not an expression or divides by zero."""
    if not _EXPRESSION.fullmatch(expression):
        return None
    used: list[int] = []
    try:
        return _value(ast.parse(expression, mode="eval").body, used, 0), used
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
        # The last two: the parser has limits too, and how much of the stack is left depends on the caller.
        return None


def _value(node: ast.expr, used: list[int], depth: int) -> Fraction:
    """The value of a part of an expression; notes the numbers in it."""
    if depth > _DEEPEST:
        raise ValueError("too deep")
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            used.append(number)
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left, used, depth + 1), _value(right, used, depth + 1))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand, used, depth + 1))
    raise ValueError("not arithmetic")
