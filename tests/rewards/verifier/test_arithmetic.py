r"""Plain arithmetic is exact, in bounded time, and everything else is refused."""

import math
import random
from fractions import Fraction

import pytest

from perl.rewards.verifier.arithmetic import decimal_of, exact_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("007", 7),
        ("1,234,567", 1234567),
        ("1,234.5", Fraction(2469, 2)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("+5", 5),
        ("-5", -5),
        ("4.5e3", 4500),
        ("1E-2", Fraction(1, 100)),
        ("1/3", Fraction(1, 3)),
        (r"\frac{1}{3}", Fraction(1, 3)),
        (r"-\frac{1}{-3}", Fraction(1, 3)),
        (r"2\frac{3}{4}", Fraction(11, 4)),
        ("-2 3/4", Fraction(-11, 4)),
        ("2+3\\cdot 4", 14),
        ("(2+3)\\cdot 4", 20),
        ("2(3)", 6),
        ("2-3-4", -5),
        ("12/4/3", 1),
        ("2^{10}", 1024),
        ("2^10", 1024),
        ("2^{-2}", Fraction(1, 4)),
        ("-2^2", -4),
        ("(-2)^2", 4),
        ("5!", 120),
        ("0!", 1),
        ("3!^2", 36),
        (r"\sqrt{16}", 4),
        (r"\sqrt{\frac{4}{9}}", Fraction(2, 3)),
        (r"3\sqrt{4}", 6),
        (r"0.\overline{3}", Fraction(1, 3)),
        (r"1.1\overline{6}", Fraction(7, 6)),
        (r"0.\overline{142857}", Fraction(1, 7)),
        ("(-1)^{2025}", -1),
        ("1^{99999999999}", 1),
    ],
)
def test_the_value_is_exact(text, value):
    assert exact_value(text) == value
    assert isinstance(exact_value(text), Fraction)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1 2",
        "1,23",
        "12,34",
        "1//2",
        "/2",
        "3/",
        "--5",
        "1/0",
        "0/0",
        "0^0",
        "0^{-1}",
        r"\sqrt{2}",
        r"\sqrt{-4}",
        "2^{1/2}",
        "2^3^2",
        "5!!",
        "e23",
        "1.e",
        "(-5)!",
        "1.2.3",
        "5%",
        "2x",
        "(5",
        "5)",
        r"\pi",
        "9^9^9",
        "1e99999",
        "\u00b2",
        r"\frac{1}",
        "1" * 301,
        "(" * 25 + "1" + ")" * 25,
    ],
)
def test_what_is_no_plain_arithmetic_has_no_value(text):
    assert exact_value(text) is None


@pytest.mark.parametrize(
    "text",
    ["9^{9^{9}}", "1000000!", "10^{100000}", "2^{10^{10}}", "5+9^{99999}", "2\\cdot 9^{99999}", "9^{99999}+1e400"],
)
def test_what_is_too_large_to_write_down_is_infinite(text):
    assert exact_value(text) == math.inf
    assert exact_value("-" + text) in (-math.inf, math.inf, None)


@pytest.mark.parametrize(
    "text",
    [
        "9^{99999}-9^{99999}",
        "0\\cdot 9^{99999}",
        "1/9^{99999}",
        "1.0001^{99999}",
        "9^{99999}/9^{99998}",
        r"\sqrt{9^{99999}}",
    ],
)
def test_what_is_finite_only_after_cancelling_has_no_value_here(text):
    assert exact_value(text) is None


def test_random_terms_against_fractions():
    """Each term is built together with its value."""
    draw = random.Random(0)

    def term(depth):
        if depth == 0 or draw.random() < 0.2:
            number = draw.randint(0, 40)
            return str(number), Fraction(number)
        (one, a), (two, b) = term(depth - 1), term(depth - 1)
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

    compared = 0
    for _ in range(500):
        text, value = term(3)
        if len(text) <= 300:
            assert exact_value(text) == value, text
            compared += 1
    assert compared > 400


@pytest.mark.parametrize(
    ("text", "value", "unit", "digits"),
    [
        ("3.14", Fraction(157, 50), Fraction(1, 100), 3),
        ("-0.0050", Fraction(-1, 200), Fraction(1, 10000), 2),
        ("1,234.5", Fraction(2469, 2), Fraction(1, 10), 5),
        ("1.5e3", 1500, 100, 2),
        (r"6.02\cdot 10^{23}", 602 * 10**21, 10**21, 3),
        ("2e-3", Fraction(1, 500), Fraction(1, 1000), 1),
    ],
)
def test_a_decimal_knows_its_last_digit(text, value, unit, digits):
    decimal = decimal_of(text)
    assert (decimal.value, decimal.unit, decimal.digits) == (value, unit, digits)


@pytest.mark.parametrize("text", ["5", "1,234", "1/2", "x", "", ".", "1.2.3", "5%"])
def test_other_texts_are_no_decimals(text):
    assert decimal_of(text) is None
