r"""Without algebra two answers are the same, different, or undecided; what is undecided is never called either."""

import itertools
import math
import random
from fractions import Fraction

import pytest

from perl.rewards.verifier import check
from perl.rewards.verifier.comparison import is_plain, is_rounding, same_answer, scalars_of
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
