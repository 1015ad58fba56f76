"""Arithmetic expressions with the value that they are built to have, and what Python makes of one in exact fractions.

numbers -> (expression, value)
"""

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

Built = tuple[str, Fraction]


def leaves(numbers: Sequence[int]) -> list[Built]:
    """Each number as an expression."""
    return [(str(number), Fraction(number)) for number in numbers]


def combined(left: Built, right: Built) -> Iterator[Built]:
    """Both orders and all operations of two expressions."""
    for (a, x), (b, y) in ((left, right), (right, left)):
        yield f"({a}+{b})", x + y
        yield f"({a} - {b})", x - y
        yield f"({a}*{b})", x * y
        if y != 0:
            yield f"({a} / {b})", x / y


def every_expression(parts: Sequence[Built]) -> Iterator[Built]:
    """All expressions that use each part once."""
    if len(parts) == 1:
        yield parts[0]
        return
    for i, j in itertools.combinations(range(len(parts)), 2):
        rest = [part for k, part in enumerate(parts) if k not in (i, j)]
        for new in combined(parts[i], parts[j]):
            yield from every_expression([*rest, new])


def random_expression(numbers: Sequence[int], draw: random.Random) -> Built:
    """One expression that uses each number once, with all its parentheses."""
    parts = leaves(numbers)
    while len(parts) > 1:
        left, right = (parts.pop(draw.randrange(len(parts))) for _ in range(2))
        parts.append(draw.choice(list(combined(left, right))))
    return parts[0]


def random_chain(numbers: Sequence[int], draw: random.Random) -> str:
    """The numbers in order with random operators and few parentheses: what it is worth depends on precedence."""
    words = [str(number) for number in numbers]
    for _ in range(draw.randint(0, len(numbers) // 2)):
        first = draw.randrange(len(words))
        last = draw.randrange(first, len(words))
        words[first] = f"({words[first]}"
        words[last] = f"{words[last]})"
    operators = [*draw.choices("+-*/", k=len(words) - 1), ""]
    return "".join(word + operator for word, operator in zip(words, operators, strict=True))


def value_by_python(expression: str) -> Fraction | None:
    """What Python computes if each number is a fraction; None where it divides by zero."""
    try:
        return Fraction(eval(re.sub(r"(\d+)", r"Fraction(\1)", expression), {"Fraction": Fraction}))  # noqa: S307
    except ZeroDivisionError:
        return None
