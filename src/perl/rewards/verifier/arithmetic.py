r"""What an answer is worth if it is plain arithmetic: exact, and in bounded time whatever is written.

tidy answer -> Fraction, infinity for what is too large to write down, or None

Reads numbers (thousands separators, decimals, repeating ones, 4.5e33), fractions, mixed numbers, sums, products,
powers, factorials, roots of squares, brackets. Everything else is for a computer algebra system.
"""

import functools
import math
import re
from dataclasses import dataclass
from fractions import Fraction

Value = Fraction | float  # a float is an infinity

# Longer than any answer that is arithmetic.
_LONGEST = 300
# Numbers beyond this many bits are infinite here: larger than any answer that is written down, and slow.
_MOST_BITS = 1 << 16
# The bits of all intermediate results together; what needs more is left to a worker process.
_MOST_WORK = 1 << 17
_DEEPEST = 20
_LARGEST_FACTORIAL = 5_000

_NUMBER = re.compile(
    r"(?=\.?\d)(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d)\.(?!\d))?(?:[eE][-+]?\d{1,4}(?![\d.]))?"
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")
_DIGITS = re.compile(r"\s*(-?\d+)")
_TOKEN = re.compile(r"\s*(\\frac|\\sqrt|\\cdot|[-+/^!%(){}])")
_MIXED = re.compile(r"(\d+)\s+(\d+)\s*/\s*(\d+)")
_MIXED_FRACTION = re.compile(r"\s*\\frac\{(\d+)\}\{(\d+)\}")
_DECIMAL = re.compile(
    r"[-+]?\s*((?:\d{1,3}(?:,\d{3})+|\d*)\.?\d*)(?:(?:[eE]|\s*\\cdot\s*10\s*\^)\{?([-+]?\d{1,4})\}?)?"
)


class NotArithmeticError(Exception):
    """The text is something else."""


@functools.lru_cache(maxsize=2048)
def exact_value(text: str) -> Value | None:
    """The value of a tidy answer, or None if it is not plain arithmetic.

    Returns:
        An exact fraction; plus or minus infinity for a number of more than 2^16 bits.
    """
    if not text or len(text) > _LONGEST or not any(character.isdigit() for character in text):
        return None
    try:
        reader = _Reader(text)
        value = reader.sum(0)
        reader.expect_end()
    except (NotArithmeticError, ZeroDivisionError):
        return None
    return value


@dataclass(frozen=True)
class Decimal:
    """A number written with digits: its value, the unit of its last digit, how many digits count."""

    value: Fraction
    unit: Fraction
    digits: int


def decimal_of(text: str) -> Decimal | None:
    """A tidy answer as a decimal number with a point or an exponent, or None if it is not one."""
    found = _DECIMAL.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if found is None or not any(c.isdigit() for c in found[1]) or ("." not in found[1] and found[2] is None):
        return None
    digits = found[1].replace(",", "")
    whole, _, fraction = digits.partition(".")
    exponent = int(found[2] or 0)
    unit = Fraction(10) ** (exponent - len(fraction))
    value = int(whole + fraction) * unit
    return Decimal(-value if text.strip().startswith("-") else value, unit, len((whole + fraction).lstrip("0")))


class _Reader:
    """Recursive descent over a text; each method reads what it is named after and returns its value."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0
        self.work = 0

    def expect_end(self) -> None:
        if self.text[self.position :].strip():
            raise NotArithmeticError

    def sum(self, depth: int) -> Value:
        total = self.product(depth)
        while (sign := self._peek()) in ("+", "-"):
            self._takes(sign)
            term = self.product(depth)
            infinite = {value for value in (total, term if sign == "+" else -term) if isinstance(value, float)}
            if len(infinite) > 1:
                raise NotArithmeticError
            total = infinite.pop() if infinite else self._kept(total + term if sign == "+" else total - term)
        return total

    def product(self, depth: int) -> Value:
        value = self.signed(depth)
        while True:
            following = self._peek()
            if following in ("\\cdot", "/"):
                self._takes(following)
                factor = self.signed(depth)
                value = self._kept(_divided(value, factor) if following == "/" else _multiplied(value, factor))
            elif following in ("(", "\\frac", "\\sqrt"):  # 2(3); a number before another one would be no product
                value = self._kept(_multiplied(value, self.power(depth)))
            else:
                return value

    def signed(self, depth: int) -> Value:
        sign = self._peek()
        if sign not in ("+", "-"):
            return self.power(depth)
        self._takes(sign)
        if self._peek() in ("+", "-"):
            raise NotArithmeticError
        value = self.power(depth)
        return -value if sign == "-" else value

    def power(self, depth: int) -> Value:
        base = self.atom(depth)
        if self._takes("!"):
            if isinstance(base, float) or base.denominator != 1 or base < 0:
                raise NotArithmeticError
            factorial = math.inf if base > _LARGEST_FACTORIAL else Fraction(math.factorial(int(base)))
            base = self._kept(factorial)
            if self._peek() == "!":  # a double factorial, not the factorial of one
                raise NotArithmeticError
        if self._takes("^"):
            # An exponent without braces is one digit in LaTeX; in plain text the whole number.
            digits = _DIGITS.match(self.text, self.position)
            if self._peek() != "{" and digits is None:
                raise NotArithmeticError
            if digits is not None:
                self.position = digits.end()
            base = self._kept(_raised(base, self._group(depth) if digits is None else Fraction(digits[1])))
            if self._peek() in ("^", "!"):  # two exponents, which LaTeX refuses and Python reads from the right
                raise NotArithmeticError
        return base

    def atom(self, depth: int) -> Value:
        if depth > _DEEPEST:
            raise NotArithmeticError
        if self._peek() in ("(", "{"):
            return self._group(depth)
        if self._takes("\\frac"):
            return self._kept(_divided(self._group(depth), self._group(depth)))
        if self._takes("\\sqrt"):
            value = self._group(depth)
            if isinstance(value, float) or value < 0:
                raise NotArithmeticError
            root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
            if root * root != value:
                raise NotArithmeticError
            return self._kept(root)
        return self._number()

    def _group(self, depth: int) -> Value:
        opening = self._peek() or ""
        if opening not in ("(", "{"):
            raise NotArithmeticError
        self._takes(opening)
        value = self.sum(depth + 1)
        if not self._takes(")" if opening == "(" else "}"):
            raise NotArithmeticError
        return value

    def _number(self) -> Value:
        while self.text.startswith(" ", self.position):
            self.position += 1
        mixed = _MIXED.match(self.text, self.position)
        if mixed:
            self.position = mixed.end()
            return int(mixed[1]) + Fraction(int(mixed[2]), int(mixed[3]))
        repeating = _REPEATING.match(self.text, self.position)
        if repeating:
            self.position = repeating.end()
            whole, once, again = repeating.groups()  # 0.1(6): whose last digits repeat for ever
            first = int((whole + once) or "0")
            return (first + Fraction(int(again), 10 ** len(again) - 1)) / 10 ** len(once)
        found = _NUMBER.match(self.text, self.position)
        if found is None or not any(character.isdigit() for character in found[0]):
            raise NotArithmeticError
        self.position = found.end()
        value = self._kept(Fraction(found[0].replace(",", "").rstrip(".")))
        fraction = _MIXED_FRACTION.match(self.text, self.position)
        if fraction and isinstance(value, Fraction) and value.denominator == 1:
            self.position = fraction.end()
            return value + Fraction(int(fraction[1]), int(fraction[2]))
        return value

    def _peek(self) -> str | None:
        found = _TOKEN.match(self.text, self.position)
        return found[1] if found else None

    def _takes(self, expected: str) -> bool:
        found = _TOKEN.match(self.text, self.position)
        if found is None or found[1] != expected:
            return False
        self.position = found.end()
        return True

    def _kept(self, value: Value) -> Value:
        """An intermediate result, infinite if it is too large; all of them together are bounded."""
        if isinstance(value, float):
            return value
        self.work += _bits(value)
        if self.work > _MOST_WORK or value.denominator.bit_length() > _MOST_BITS:
            raise NotArithmeticError
        if value.numerator.bit_length() <= _MOST_BITS:
            return value
        if value.denominator != 1:
            raise NotArithmeticError
        return math.inf if value > 0 else -math.inf


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _multiplied(value: Value, factor: Value) -> Value:
    if not (isinstance(value, float) or isinstance(factor, float)):
        return value * factor
    if value == 0 or factor == 0:
        raise NotArithmeticError
    return math.inf if (value > 0) == (factor > 0) else -math.inf


def _divided(value: Value, divisor: Value) -> Value:
    if isinstance(divisor, float):
        raise NotArithmeticError  # not zero, which is all that a float could tell
    return _multiplied(value, 1 / divisor) if isinstance(value, float) else value / divisor


def _raised(base: Value, exponent: Value) -> Value:
    """Base to an exponent; infinite where the result could not be written down."""
    if isinstance(exponent, Fraction) and exponent.denominator != 1:
        raise NotArithmeticError
    if base in (0, 1):
        if exponent <= 0 and base == 0:
            raise NotArithmeticError
        return base
    if exponent < 0:
        return _divided(Fraction(1), _raised(base, -exponent))
    if isinstance(base, float) or isinstance(exponent, float) or _bits(base) * exponent > _MOST_BITS:
        if not base > 1 or exponent == 0 or not (isinstance(base, float) or base.denominator == 1):
            raise NotArithmeticError
        return math.inf
    return base ** int(exponent)
