r"""Plain arithmetic is exact, in bounded time, and everything else is refused."""

import math
import random
from decimal import Decimal
from fractions import Fraction

import pytest

from perl.rewards.verifier.arithmetic import decimal_of, exact_value
from tests.oracles.answer_cases import random_term


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234,567", 1234567),
        ("1,234.5", Fraction(2469, 2)),
        (".5", Fraction(1, 2)),
        ("4.5e3", 4500),
        ("1E-2", Fraction(1, 100)),
        (r"-\frac{1}{-3}", Fraction(1, 3)),
        (r"2\frac{3}{4}", Fraction(11, 4)),
        ("-2 3/4", Fraction(-11, 4)),
        ("(2+3)\\cdot 4", 20),
        ("2(3)", 6),
        ("12/4/3", 1),
        ("2^{10}", 1024),
        ("2^{-2}", Fraction(1, 4)),
        ("-2^2", -4),
        ("5!", 120),
        ("3!^2", 36),
        (r"\sqrt{16}", 4),
        (r"\sqrt{\frac{4}{9}}", Fraction(2, 3)),
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
        "1//2",
        "--5",
        "1/0",
        "0^0",
        r"\sqrt{2}",
        r"\sqrt{-4}",
        "2^{1/2}",
        "5!!",
        "e23",
        "(-5)!",
        "5%",
        "2x",
        "5)",
        r"\pi",
        "9^9^9",
        "\u00b2",
        r"\frac{1}",
        "1" * 301,
        "(" * 25 + "1" + ")" * 25,
        # finite only after cancelling
        "9^{99999}-9^{99999}",
        "1.0001^{99999}",
        r"\sqrt{9^{99999}}",
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


def test_random_terms_are_worth_what_they_are_built_to_be():
    draw = random.Random(0)
    terms = [random_term(draw, depth=3) for _ in range(500)]
    short = {text: value for text, value in terms if len(text) <= 300}
    assert {text: exact_value(text) for text in short} == short
    assert len(short) > 400


def test_a_decimal_has_the_value_the_last_digit_and_the_length_that_python_reads():
    meant = {"1,234.5": "1234.5", r"6.02\cdot 10^{23}": "6.02e23", "-0.0050": "-0.0050", "2e-3": "2e-3"}
    for _ in range(500):
        text = "".join(random.choices("0123456789", k=random.randint(1, 12))) + "1"
        point = random.randrange(len(text))
        text = random.choice(["", "-"]) + (text[:point] or "0") + "." + text[point:]
        text += random.choice(["", "", f"e{random.randint(-9, 9)}"])
        meant[text] = text
    for text, plain in meant.items():
        read, found = Decimal(plain), decimal_of(text)
        _, digits, exponent = read.as_tuple()
        assert found.value == Fraction(read), text
        assert found.unit == Fraction(10) ** exponent, text
        assert found.digits == len(digits), text
    for other in ("5", "1,234", "1/2", "x", "", ".", "1.2.3", "5%"):
        assert decimal_of(other) is None, other
