r"""Pairs of a gold answer and an answer that anybody can judge, by kind, and random expressions whose value is known.

Written by hand and by a few lines of arithmetic on coefficients; no computer algebra, nothing of the package.
"""

import random
import re
from fractions import Fraction
from pathlib import Path

Pair = tuple[str, str]

UNITS = (
    r"\text{ %s}",
    r"\mathrm{~%s}",
    r"\,\mathrm{%s}",
    r"\text{ %s}^{-1}",
    r"\mathrm{~%s^{-1}}",
    r"\mathrm{kg} \cdot \mathrm{%s}",
)


def _cases() -> dict[str, tuple[list[Pair], list[Pair]]]:
    """Kind -> pairs that are the same answer, pairs that nearly are.

    In the file a line ``# kind``, and below it ``gold answer == the same | again the same != nearly | nearly too``.
    """
    found: dict[str, tuple[list[Pair], list[Pair]]] = {}
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").strip().split("\n"):
        if line.startswith("# "):
            same, other = found[line.removeprefix("# ")] = [], []
            continue
        gold, *answers = re.split(r" (==|!=|\|) ", line)
        pairs = same
        for sign, answer in zip(answers[::2], answers[1::2], strict=True):
            pairs = other if sign == "!=" else pairs
            pairs.append((gold, answer))
    return found


CASES = _cases()
CASES["units"][0].extend(("41.8", f"41.8 {form % unit}") for unit in "msJKgLNWVTACFhU" for form in UNITS)


def random_pairs(number: int, seed: int) -> list[tuple[str, str, bool]]:
    """Random pairs of expressions, and whether they are the same: polynomials, their factors, fractions, surds."""
    draw = random.Random(seed)
    makers = [_polynomial_pair, _fraction_pair, _surd_pair]
    return [makers[i % len(makers)](draw) for i in range(number)]


def _polynomial_pair(draw: random.Random) -> tuple[str, str, bool]:
    """A product of linear factors, and its coefficients, one of them changed in every second pair."""
    factors = [
        (draw.choice([1, 1, 2, 3]), draw.choice([-1, 1]) * draw.randint(1, 9)) for _ in range(draw.randint(2, 3))
    ]
    coefficients = [1]
    for slope, constant in factors:
        risen = [slope * c for c in coefficients] + [0]
        coefficients = [a + b for a, b in zip(risen, [0, *(constant * c for c in coefficients)], strict=True)]
    same = draw.random() < 0.5
    if not same:
        coefficients[draw.randrange(len(coefficients))] += draw.choice([-1, 1])
    product = "".join(f"({slope}x{constant:+d})" for slope, constant in factors)
    degree = len(coefficients) - 1
    terms = "".join(f"{c:+d}x^{{{degree - i}}}" for i, c in enumerate(coefficients) if c)
    return product, terms.removeprefix("+"), same


def _fraction_pair(draw: random.Random) -> tuple[str, str, bool]:
    """A sum of two fractions, and a reduced fraction."""
    one, two = (Fraction(draw.randint(-30, 30), draw.randint(1, 30)) for _ in range(2))
    total = one + two + draw.choice([0, 0, Fraction(1, 30)])
    text = f"\\frac{{{one.numerator}}}{{{one.denominator}}}+\\frac{{{two.numerator}}}{{{two.denominator}}}"
    return text, f"{total.numerator}/{total.denominator}", total == one + two


def _surd_pair(draw: random.Random) -> tuple[str, str, bool]:
    r"""Times a root, and the root of the product: a \sqrt{b} is \sqrt{a^2 b}."""
    times, under = draw.randint(2, 20), draw.choice([2, 3, 5, 6, 7, 10, 11])
    shift = draw.choice([0, 0, 1])
    return f"{times}\\sqrt{{{under}}}", f"\\sqrt{{{times * times * under + shift}}}", shift == 0


def last_box(text: str) -> str | None:
    r"""The content of the last ``\\boxed{}`` that closes and is not empty, by trying each pair of a box and a brace."""
    found = None
    for start in range(len(text)):
        if text.startswith("\\boxed{", start):
            inside = start + len("\\boxed{")
            for end in range(inside, len(text)):
                content = text[inside:end]
                depths = [content[:i].count("{") - content[:i].count("}") for i in range(len(content) + 1)]
                if text[end] == "}" and depths[-1] == 0 and min(depths) >= 0 and content.strip("{}"):
                    found = content
                    break
    return found


def random_number(draw: random.Random) -> Fraction:
    """A whole number of up to twelve digits, a decimal of up to five places, or a fraction; of either sign."""
    kind, sign = draw.randrange(3), draw.choice([1, -1])
    if kind == 0:
        return Fraction(sign * draw.randint(0, 10 ** draw.randint(1, 12)))
    if kind == 1:
        return Fraction(sign * draw.randint(0, 10**6), 10 ** draw.randint(1, 5))
    return Fraction(sign * draw.randint(1, 999), draw.randint(2, 99))


def ways_to_write(number: Fraction, draw: random.Random) -> list[str]:
    """Different texts that all mean this number."""
    times = draw.randint(1, 9)
    ways = {f"{number.numerator * times}/{number.denominator * times}", f"{number.numerator} / {number.denominator}"}
    ways.add(f"${number.numerator}/{number.denominator}$")
    for digits in range(6):
        if (number * 10**digits).denominator == 1:
            text = with_point(number, digits)
            ways |= {text, text + "0" if digits else text, f" {text} ", f"${text}$", f"{text}."}
            if number >= 0:
                ways.add(f"+{text}")
            if text.startswith("0."):
                ways.add(text[1:])
    if number.denominator == 1:
        ways.add(f"{number.numerator:,}")
    return sorted(ways)


def with_point(number: Fraction, digits: int) -> str:
    """An exact decimal of a fraction whose denominator divides a power of ten."""
    scaled = number * 10**digits
    sign, body = ("-" if scaled < 0 else ""), str(abs(scaled.numerator)).rjust(digits + 1, "0")
    return f"{sign}{body[:-digits]}.{body[-digits:]}" if digits else f"{sign}{body}"


def random_term(draw: random.Random, depth: int) -> tuple[str, Fraction]:
    r"""Sums, differences, products, ``\\frac`` and squares of whole numbers, and what they are worth."""
    if depth == 0 or draw.random() < 0.2:
        number = draw.randint(0, 40)
        return str(number), Fraction(number)
    (one, a), (two, b) = random_term(draw, depth - 1), random_term(draw, depth - 1)
    kind = draw.randrange(5)
    if kind == 0:
        return f"({one}+{two})", a + b
    if kind == 1:
        return f"({one}-{two})", a - b
    if kind == 2:
        return f"({one}\\cdot {two})", a * b
    if kind == 3 and b:
        return f"\\frac{{{one}}}{{{two}}}", a / b
    return f"({one})^{{2}}", a**2


def holds(relation: str, **values: Fraction) -> bool:
    r"""Whether Python finds an inequality of names and numbers true: ``1 < t \\leq 2``."""
    return bool(eval(relation.replace("\\leq", "<=").replace("\\geq", ">="), {}, values))  # noqa: S307


# Completions that neither box an answer nor announce one after their reasoning.
WITHOUT_ANSWER = [
    "",
    " ",
    "42",
    "I do not know",
    r"\boxed{5",
    r"\boxed{}",
    r"write it in \boxed or \boxed{...} or \boxed{\text{your answer}}",
    "boxed{5}",
    r"<think>\boxed{5}</think> well",
    "<think>#### 5</think>",
]
