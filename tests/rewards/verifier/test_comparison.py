r"""Without algebra two answers are the same, different, or undecided; what is undecided is never called either."""

import itertools
from fractions import Fraction

import pytest

from perl.rewards.verifier import check
from perl.rewards.verifier.comparison import is_plain, is_rounding, same_answer, scalars_of
from tests.oracles.answer_cases import CASES


def test_comparing_does_not_depend_on_the_order():
    answers = ["5", "5.0", "50%", "1/2", "0.5", "yes", "Yes", "1,000", "1000", "-1/2", "", "x y", "100%", "1"]
    for one in answers:
        assert same_answer(one, one)
        for other in answers:
            assert same_answer(one, other) == same_answer(other, one)


@pytest.mark.parametrize("gold", ["5", "-5.25", "1,000", "1/2", "50%", "yes", "New York", "(A)", "3 cm"])
def test_numbers_and_words_are_plain(gold):
    assert is_plain(gold)
    assert list(scalars_of(gold)) == []
    assert check(gold, f"\\boxed{{{gold}}}").status == "right"


@pytest.mark.parametrize(
    ("gold", "expressions"),
    [
        ("x^2", ["x^2"]),
        ("12:30", ["12:30"]),
        (r"y = \sqrt{2} \text{ cm}", [r"\sqrt{2}"]),
        (r"(1, \pi)", [r"\pi"]),
        (r"\{1, x, \text{no}\}", ["x"]),
        ("x+y=1", ["x+y=1", "1"]),
        (r"\begin{pmatrix}1\\a+b\end{pmatrix}", ["a+b"]),
    ],
)
def test_other_gold_answers_hold_expressions_that_algebra_must_read(gold, expressions):
    assert not is_plain(gold)
    assert [text for text in scalars_of(gold) if text != "1"] == [text for text in expressions if text != "1"]


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


def test_a_long_answer_is_the_same_only_letter_for_letter():
    long = "1" * 2001
    assert same_answer(long, long + " ") is True
    assert same_answer(long, long + ".0") is False


@pytest.mark.parametrize(
    ("text", "value", "rounded"),
    [
        ("0.333333", (1, 3), True),
        ("0.33333", (1, 3), False),
        ("0.333334", (1, 3), False),
        ("0.666666", (2, 3), True),
        ("0.666667", (2, 3), True),
        ("-0.666666", (-2, 3), True),
        ("-0.666667", (-2, 3), True),
        ("-0.666665", (-2, 3), False),
        ("0.666667", (-2, 3), False),
        ("1234.56", (123456789, 100000), True),
        ("1234.58", (123456789, 100000), False),
        ("1234.57", (123456789, 100000), True),
        ("0.00012345", (1, 8100), False),
        ("0.000123457", (1, 8100), True),
    ],
)
def test_a_decimal_of_six_digits_stands_for_what_it_rounds_or_cuts_off(text, value, rounded):
    assert is_rounding(text, {Fraction(*value)}) is rounded


def test_the_letter_of_a_choice_is_not_a_variable_of_the_same_name():
    letters = "ABCDE"
    for gold, answer in itertools.product(letters, letters):
        assert same_answer(gold, f"({answer})") in ((True,) if gold == answer else (False, None))
