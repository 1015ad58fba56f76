r"""What only a computer algebra system can tell: whether two expressions, equations or inequalities are the same.

gold answer, answer -> verdict, in the main thread of a worker process

math-verify's parser (latex2sympy2_extended) reads LaTeX. Two expressions are the same if their values agree at random
points to twelve digits: quicker than simplifying, and the same with every version of the parser. What cannot be
evaluated so is left to math-verify's comparison. May hang or use any amount of memory: never call it in the
trainer's process.
"""

import dataclasses
import functools
import random
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from math_verify.grader import should_treat_as_complex, sympy_expr_eq

from perl.rewards.verifier.arithmetic import decimal_of, exact_value
from perl.rewards.verifier.comparison import Truth, is_rounding, same_answer, scalars_of
from perl.rewards.verifier.latex import TEXT_END, TEXT_START

_POINTS, _FEWEST_POINTS = 8, 3
_DIGITS = 30
_TOLERANCE = sympy.Float("1e-12", _DIGITS)
# What an expression that cancels leaves over; far below any constant of physics.
_ZERO = sympy.Float("1e-80", _DIGITS)
# What the parser does not know: E with an index, which it takes for Euler's number, and signs as an index.
_FOR_THE_PARSER = (
    (re.compile(r"(?<![a-zA-Z\\])E(?=_)"), r"\\Xi"),
    (re.compile(r"_\{?\\(odot|oplus|star|ast|infty|parallel|perp|prime)(?![a-zA-Z])\}?"), r"_{\1}"),
)
_MIXED = re.compile(r"\\frac\{\d+\}\{\d+\}")
_ANOTHER_NUMBER = re.compile(r"[\\{\[]*[\d.]")
# Newer parsers take R and r for the same variable unless a setting forbids it; older ones lack that setting.
_FIELDS = {field.name for field in dataclasses.fields(ConversionConfig)}
_CONVERSION = ConversionConfig(**({"lowercase_symbols": False} if "lowercase_symbols" in _FIELDS else {}))
# Names that usually stand for whole numbers: (-1)^n is cos(n pi) only there.
_WHOLE = frozenset("nkmN")


def judge(pair: Sequence[str | None]) -> str:
    """The verdict on a pair of gold answer and answer; what the worker processes run.

    Args:
        pair: The gold answer, and the answer or None if it is absent.

    Returns:
        A status of :class:`perl.types.Verdict`: right, wrong, no_answer or unparsable_gold.
    """
    gold, answer = pair
    if gold is None:
        raise ValueError("no gold answer")
    if answer is not None and same_answer(gold, answer, same_by_algebra):
        return "right"
    if not is_readable(gold):
        return "unparsable_gold"
    return "no_answer" if answer is None else "wrong"


def is_readable(gold: str) -> bool:
    """Whether every expression in a gold answer can be read."""
    return all(read(text) is not None for text in scalars_of(gold))


def same_by_algebra(gold: str, answer: str) -> Truth:
    """Whether two tidy scalars or relations are the same; False where the answer cannot be read.

    Raises:
        Exception: Whatever SymPy raises about what was read but cannot be compared: no verdict, not a wrong answer.
    """
    infinite = [isinstance(exact_value(text), float) for text in (gold, answer)]
    if any(infinite) and not all(infinite):
        return False  # too large to write down: not the other one, and nothing to evaluate here
    gold_read, answer_read = read(gold), read(answer)
    if gold_read is None or answer_read is None:
        return False
    if _is_relation(gold_read) and _is_relation(answer_read):
        return _same_relation(gold_read, answer_read)
    if isinstance(gold_read, sympy.MatrixBase) and isinstance(answer_read, sympy.MatrixBase):
        if gold_read.shape != answer_read.shape:
            return False
        return all(_same_expression(g, a) is True for g, a in zip(gold_read, answer_read, strict=True))
    if isinstance(gold_read, sympy.Expr) and isinstance(answer_read, sympy.Expr):
        rounded = _same_as_rounding(gold, answer_read) or _same_as_rounding(answer, gold_read)
        same = rounded or _same_expression(gold_read, answer_read)
        if same is not None:
            return same
    return _same_by_math_verify(gold_read, answer_read)


@functools.lru_cache(maxsize=1024)
def read(text: str) -> Any:  # noqa: ANN401 (a SymPy object)
    """A tidy scalar as a SymPy object, or None if it cannot be read."""
    value = exact_value(text)
    if isinstance(value, Fraction):
        return sympy.Rational(value.numerator, value.denominator)
    latex = text.replace(TEXT_START, "").replace(TEXT_END, "").strip()
    for pattern, replacement in _FOR_THE_PARSER:
        latex = pattern.sub(replacement, latex)
    try:
        found = _Parser(is_real=not should_treat_as_complex(latex), config=_CONVERSION).parse(latex)
        found = found.as_explicit() if isinstance(found, sympy.MatrixExpr) else found
        # The parser takes i for a variable; where it is not the index of a sum it is the imaginary unit.
        units = [symbol for symbol in getattr(found, "free_symbols", ()) if symbol.name == "i"]
        found = found.subs(dict.fromkeys(units, sympy.I)) if units else found
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 (the parser raises whatever its grammar leads to)
        return None
    known = isinstance(found, sympy.Basic | sympy.MatrixBase)
    return found if known and found not in (sympy.nan, sympy.zoo) else None


class _Parser(_Latex2Sympy):
    r"""The parser, which adds any whole numbers side by side; here 2 \frac{1}{3} is a sum, 2(3) a product, 2 3 neither.

    Overrides what the parser calls for each factor of a product; the sum is made of two numbers, not of a product.
    """

    def convert_postfix(self, postfix: Any) -> Any:  # noqa: ANN401 (a node of the parser, a SymPy object)
        value = super().convert_postfix(postfix)
        row = postfix.parentCtx.children
        following = row[row.index(postfix) + 1 :]
        if not following or not isinstance(value, sympy.Integer):
            return value
        text = following[0].getText()
        if _ANOTHER_NUMBER.match(text):
            raise ValueError(f"two numbers side by side: {text}")
        mixed = postfix.getText().isdecimal() and _MIXED.fullmatch(text)
        return value if mixed else sympy.Mul(value, 1, evaluate=False)


def _is_relation(read_text: Any) -> bool:  # noqa: ANN401 (a SymPy object)
    return isinstance(read_text, sympy.core.relational.Relational) or (
        isinstance(read_text, sympy.And) and all(_is_relation(part) for part in read_text.args)
    )


def _same_expression(gold: sympy.Expr, answer: sympy.Expr) -> Truth:
    """Whether two expressions have the same values; None if they have too few."""
    if gold == answer:
        return True
    compared = 0
    for point in _points(gold.free_symbols | answer.free_symbols):
        values = _at(gold, point), _at(answer, point)
        if values[0] is None or values[1] is None:
            continue
        if not _close(values[0], values[1]):
            return False
        compared += 1
        if not point:
            return True
    return True if compared >= _FEWEST_POINTS else None


def _same_relation(gold: Any, answer: Any) -> Truth:  # noqa: ANN401 (SymPy relations)
    """Whether two relations are equivalent: one is the other times a number, a positive one for an inequality."""
    gold_parts, answer_parts = list(_single_relations(gold)), list(_single_relations(answer))
    if len(gold_parts) != len(answer_parts):
        return False
    for part in gold_parts:
        fits = next((other for other in answer_parts if _same_single_relation(part, other)), None)
        if fits is None:
            return False
        answer_parts.remove(fits)
    return True


def _single_relations(relation: Any) -> Iterator[Any]:  # noqa: ANN401 (SymPy relations)
    if isinstance(relation, sympy.And):
        for part in relation.args:
            yield from _single_relations(part)
    else:
        yield relation


def _same_single_relation(gold: Any, answer: Any) -> bool:  # noqa: ANN401 (SymPy relations)
    kinds = [{"<": ">", "<=": ">="}.get(relation.rel_op, relation.rel_op) for relation in (gold, answer)]
    if kinds[0] != kinds[1]:
        return False
    differences = []
    for relation in (gold, answer):
        sides = (relation.rhs, relation.lhs) if relation.rel_op in ("<", "<=") else (relation.lhs, relation.rhs)
        if not all(isinstance(side, sympy.Expr) for side in sides):
            return _same_by_math_verify(gold, answer)
        differences.append(sides[0] - sides[1])
    factor = None
    compared = 0
    for point in _points(differences[0].free_symbols | differences[1].free_symbols):
        values = _at(differences[0], point), _at(differences[1], point)
        if values[0] is None or values[1] is None:
            continue
        if abs(values[0]) < _ZERO or abs(values[1]) < _ZERO:
            if not _close(*values):
                return False
            continue
        ratio = values[0] / values[1]
        if factor is not None and not _close(ratio, factor):
            return False
        factor = ratio
        compared += 1
    if compared < _FEWEST_POINTS or factor is None:
        return _same_by_math_verify(gold, answer)
    return kinds[0] in ("==", "!=") or bool(sympy.re(factor) > 0)


def _points(symbols: set[sympy.Symbol]) -> Iterator[dict[sympy.Symbol, sympy.Rational]]:
    """Where to evaluate: one empty point without variables, else random ones, the same each time, the last negative."""
    if not symbols:
        yield {}
        return
    names = sorted({symbol.name for symbol in symbols})  # one side may hold a name as real, the other as complex
    draw = random.Random(0)  # noqa: S311 (no secret)
    for number in range(2 * _POINTS):
        sign = 1 if number < _POINTS else -1
        values = {
            name: sympy.Integer(draw.randint(2, 12))
            if name in _WHOLE
            else sympy.Rational(sign * draw.randint(1, 4000), 1009)
            for name in names
        }
        yield {symbol: values[symbol.name] for symbol in symbols}


def _at(expression: sympy.Expr, point: dict[sympy.Symbol, sympy.Rational]) -> sympy.Expr | None:
    """The value at a point, or None where it has none; a complex one beside negative variables does not count."""
    try:
        value = sympy.N(expression.subs(point), _DIGITS)
    except (TypeError, ValueError, ZeroDivisionError, AttributeError, NotImplementedError):
        return None
    if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        return value if value in (sympy.oo, -sympy.oo) else None
    negative = any(number < 0 for number in point.values())
    return None if negative and not value.is_real else value


def _close(one: sympy.Expr, other: sympy.Expr) -> bool:
    if one in (sympy.oo, -sympy.oo) or other in (sympy.oo, -sympy.oo):
        return bool(one == other)
    larger = max(abs(one), abs(other))
    return bool(larger < _ZERO or abs(one - other) <= _TOLERANCE * larger)


def _same_as_rounding(text: str, exact: sympy.Expr) -> bool:
    """Whether a text is a decimal number that an expression without variables rounds to."""
    if decimal_of(text) is None or exact.free_symbols:
        return False
    value = _at(exact, {})
    if value is None or not value.is_real or not value.is_finite:
        return False
    return is_rounding(text, {Fraction(str(value))})


def _same_by_math_verify(gold: Any, answer: Any) -> bool:  # noqa: ANN401 (SymPy objects)
    """math-verify's comparison: six decimal places, and its third argument, fifteen digits or strictly."""
    return bool(sympy_expr_eq(gold, answer, 6, 15))
