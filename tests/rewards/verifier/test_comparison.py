"""What looks alike is spelt alike; without algebra answers are the same, different, or undecided."""

import itertools
import math
import random
from fractions import Fraction

import pytest

from perl.rewards.verifier import check
from perl.rewards.verifier.comparison import is_plain, is_rounding, same_answer, scalars_of
from perl.rewards.verifier.latex import compact, tidy
from tests.oracles.answer_cases import CASES, ways_to_write, with_point


def test_comparing_does_not_depend_on_the_order_and_numbers_are_the_same_if_their_values_are():
    words = ["50%", "1/2", "0.5", "yes", "Yes", "1,000", "1000", "-1/2", "", "x y", "100%", "1"]
    values = [Fraction(n, d) for n in (-3, 0, 1, 7) for d in (1, 2, 5)]
    written = {way.strip(): value for value in values for way in ways_to_write(value, random) if "$" not in way}
    for one, other in itertools.product([*words, *written], repeat=2):
        found = same_answer(one, other)
        assert found == same_answer(other, one), (one, other)
        if one in written and other in written:
            assert found is (written[one] == written[other]), (one, other)


EXPRESSIONS = {  # gold answer -> what algebra must read of it
    **{gold: [] for gold in ("5", "-5.25", "1,000", "1/2", "50%", "yes", "New York", "(A)", "3 cm", "12:30", "1 2 3")},
    "x^2": ["x^2"],
    "3:4": ["3:4"],
    r"y = \sqrt{2} \text{ cm}": [r"\sqrt{2}"],
    r"(1, \pi)": [r"\pi"],
    r"\{1, x, \text{no}\}": ["x"],
    "x+y=1": ["x+y=1"],
    r"\begin{pmatrix}1\\a+b\end{pmatrix}": ["a+b"],
}


@pytest.mark.parametrize("gold", EXPRESSIONS)
def test_a_gold_answer_is_plain_unless_it_holds_expressions_that_algebra_must_read(gold):
    assert is_plain(gold) is (EXPRESSIONS[gold] == [])
    assert [text for text in scalars_of(gold) if text != "1"] == EXPRESSIONS[gold]
    if is_plain(gold):
        assert list(scalars_of(gold)) == []
        assert check(gold, f"\\boxed{{{gold}}}").status == "right"


@pytest.mark.parametrize("kind", CASES)
def test_what_is_decided_without_algebra_is_decided_rightly(kind):
    same, other = CASES[kind]
    assert not [pair for pair in same if same_answer(*pair) is False and is_plain(pair[0])]
    assert not [pair for pair in other if same_answer(*pair)]


def test_algebra_is_asked_for_what_is_no_number_only():
    asked = []

    def algebra(gold, answer):
        asked.append((gold, answer))
        return True

    assert same_answer(r"(1, x \text{ cm})", r"(2/2, y \text{ cm})", algebra) is True
    assert asked == [("x", "y")]
    assert same_answer("(1,x)", "(2,x)", algebra) is False
    assert same_answer("12", "13", algebra) is False
    assert len(asked) == 1


def test_an_undecided_part_leaves_the_whole_undecided_unless_another_part_differs():
    assert same_answer("(1,x)", "(1,y)") is None
    assert same_answer("(1,x)", "(2,y)") is False
    assert same_answer(r"\{x,1\}", r"\{1,y\}") is None
    assert same_answer("x+1", "1+x") is None


def test_a_decimal_of_six_digits_stands_for_what_it_rounds_or_cuts_off():
    """Against the multiples of its last digit on both sides of a fraction, compared exactly."""
    rows = {
        *[(Fraction(numerator, 3), digits) for numerator in (1, 2, -1, -2) for digits in (5, 6, 7)],
        *[(Fraction(123456789, 100000), 6), (Fraction(1, 8100), 5), (Fraction(1, 8100), 6), (Fraction(1, 2), 6)],
    }
    for _ in range(300):
        value = Fraction(random.choice([-1, 1]) * random.randint(1, 10**6), random.randint(1, 10**4))
        rows.add((value / max(1, int(abs(value)) // 100), random.randint(4, 12)))
    rounded = 0
    for value, digits in rows:
        places = digits - 1 - math.floor(math.log10(abs(value)))
        unit = Fraction(1, 10**places)
        below, part = divmod(abs(value), unit)
        for step in range(-2, 4):
            number = (below + step) * unit * (1 if value > 0 else -1)
            stands = digits >= 6 and (step == 0 or (step == 1 and 2 * part >= unit))
            rounded += stands and step == 1
            assert is_rounding(with_point(number, places), {value}) is stands, (value, digits, step)
    assert rounded > 50
    assert not is_rounding("0.666667", {Fraction(-2, 3)})


def test_the_letter_of_a_choice_is_not_a_variable_of_the_same_name():
    letters = "ABCDE"
    for gold, answer in itertools.product(letters, letters):
        assert same_answer(gold, f"({answer})") in ((True,) if gold == answer else (False, None))


@pytest.mark.parametrize(
    "spellings",
    [
        [
            r"\frac{1}{2}",
            r"\dfrac12",
            r"\tfrac 1 2",
            r"\cfrac{1} {2}",
            r"$\frac12$",
            "\u00bd",
            r"\displaystyle\frac{1}{2}.",
        ],
        [r"\sqrt{3}", r"\sqrt3", r"\sqrt 3", r"\sqrt(3)", "\u221a3", "\u221a(3)", "sqrt(3)"],
        [r"\frac{\sqrt{2}}{\sqrt{3}}", r"\frac\sqrt2\sqrt3", r"\dfrac{\sqrt2}{\sqrt 3}"],
        [r"\sqrt{\frac{1}{2}}", r"\sqrt\frac12", r"\sqrt{\tfrac12}"],
        [r"\sqrt[3]{8}", r"\sqrt[3]8", r"\sqrt[3] 8"],
        ["45", r"45^\circ", r"45^{\circ}", "45\u00b0", "45 degrees", r"45\degree"],
        [r"\sin(\frac{30\pi}{180})", r"\sin 30^\circ", r"\sin(30^{\circ})", "\\sin 30\u00b0"],
        ["50%", r"50\%", "50 percent", r"50\text{ percent}", "50\uff05"],
        [r"2\cdot 3", r"2\times3", "2*3", "2\u00d73", r"2 \cdot 3"],
        ["2^3", "2**3"],
        [r"x\leq 5", r"x \le 5", "x<=5", "x\u22645", r"x \leqslant 5"],
        ["10,080", r"10,\!080", r"10{,}080"],
        ["12345", r"12\,345", r"12\;345"],
        [r"5\cdot 10^{6}", "5 million", r"5\text{ million}", r"5\times10^{6}"],
        ["(1,2)", r"\left( 1, 2 \right)", r"\bigl(1,2\bigr)", "\uff081\uff0c2\uff09"],
        [r"\{1,2\}", r"\left\{1,2\right\}", r"\lbrace 1,2 \rbrace"],
        [r"\emptyset", r"\varnothing", r"\{\}", r"\{ \}"],
        [r"(-\infty,\infty)", r"\mathbb{R}", r"\mathbb R", r"\text{all real numbers}", "(-inf, inf)"],
        [r"\text{cm}", r"\mathrm{ cm }", r"\mbox{cm}"],
        ["5.5", r"\$5.5", "$5.5$", "\u20ac5.5", r"\(5.5\)", r"\[5.5\]", "= 5.5", "5.5,"],
    ],
    ids=lambda spellings: spellings[0],
)
def test_one_spelling(spellings):
    assert {compact(tidy(spelling)) for spelling in spellings} == {compact(tidy(spellings[0]))}


def test_every_argument_is_in_braces_however_deep():
    assert tidy("\\sqrt" * 300 + "2") == "\\sqrt{" * 300 + "2" + "}" * 300
    assert tidy("\u221a" * 300) == "\u221a" * 300  # signs that grow many times are no answer
    assert tidy(r"\frac" * 3 + "1234") == r"\frac{\frac{\frac{1}{2}}{3}}{4}"
