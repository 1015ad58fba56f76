r"""The structure of an answer: what its values are, whether their order counts, what is a label."""

import random
from fractions import Fraction

import pytest

from perl.rewards.verifier.latex import tidy
from perl.rewards.verifier.structure import (
    Equation,
    Grid,
    Inequality,
    Ordered,
    Scalar,
    Unordered,
    Without,
    leaves,
    readings,
    split_top,
)
from tests.oracles.answer_cases import holds


def only_reading(text):
    (node,) = readings(tidy(text))
    return node


def texts(node):
    return [item.text for item in node.items]


@pytest.mark.parametrize(
    "text",
    ["5", "x^2", r"\frac{1}{2}", "f(x)", "(x+1)(x-1)", "(5)", r"\text{a word}", "a and b", r"\infty", r"\int x", "|x|"],
)
def test_a_single_value_is_a_scalar(text):
    assert isinstance(only_reading(text), Scalar)


def unordered(*texts):
    return Unordered(tuple(map(Scalar, texts)), braces=False)


THREE = [unordered("1", "2", "3")]
READINGS = {
    "1,234": [Scalar("1234"), unordered("1", "234")],
    "12,000x": [Scalar("12000x"), unordered("12", "000x")],
    "1,23": [unordered("1", "23")],
    **dict.fromkeys(["1,2,3", "1; 2; 3", r"1, 2 \text{ and } 3", "1 or 2 or 3", r"1, 2\text{, and } 3"], THREE),
    "(1,2]": [Ordered("(", "]", (Scalar("1"), Scalar("2")))],
    r"\{1,2\}": [Unordered((Scalar("1"), Scalar("2")), braces=True)],
    r"1 \pm \sqrt{5}": [unordered(r"1 + \sqrt{5}", r"1 - \sqrt{5}")],
    r"\pm 3": [unordered("3", "- 3")],
    r"\mathbb{R} \setminus 1": [Without(Ordered("(", ")", (Scalar(r"-\infty"), Scalar(r"\infty"))), Scalar("1"))],
    r"\begin{pmatrix} 1 & 2 \\ 3 & x+1 \end{pmatrix}": [
        Grid(((Scalar("1"), Scalar("2")), (Scalar("3"), Scalar("x+1"))))
    ],
}


def test_several_values_are_read_with_the_brackets_that_they_stand_in():
    assert {text: list(readings(tidy(text))) for text in READINGS} == READINGS
    assert only_reading(r"(1,2)\cup[3,4)").items == (
        Ordered("(", ")", (Scalar("1"), Scalar("2"))),
        Ordered("[", ")", (Scalar("3"), Scalar("4"))),
    )


@pytest.mark.parametrize(
    ("text", "label", "value"),
    [
        ("x=3", "x", "3"),
        ("f(2) = 5", "f(2)", "5"),
        ("a_{37} = 1", "a_{37}", "1"),
        ("x = y = 3", "x", "3"),
        (r"x \approx 1.5", "x", "1.5"),
        ("2x = 6", None, "6"),
        ("2+3=5", None, "5"),
    ],
)
def test_the_label_of_an_equation_is_the_side_that_names_what_is_asked_for(text, label, value):
    node = only_reading(text)
    assert isinstance(node, Equation)
    assert (node.label, node.value) == (label, Scalar(value))


INTERVALS = {  # inequality -> its name and interval, None where it has none
    "x>5": ("x", "()", ["5", r"\infty"]),
    r"x \leq 3": ("x", "(]", [r"-\infty", "3"]),
    r"1 < t \leq 2": ("t", "(]", ["1", "2"]),
    r"f(x) \geq 0": ("f(x)", "[)", ["0", r"\infty"]),
    r"|x| \leq 3": ("x", "[]", ["-3", "3"]),
    **dict.fromkeys(["x+y>2", "1<x>2", "1<x<2<3", "2x<6", "x<", "<", "1<x=2", "a<b<c<d"]),
}


def test_an_inequality_of_one_name_is_an_interval():
    found = {}
    for text in INTERVALS:
        node = only_reading(text)
        assert isinstance(node, Inequality)
        interval = node.interval
        found[text] = interval and (node.name, interval.opening + interval.closing, texts(interval))
    assert found == INTERVALS


BOUNDS = {r"-\infty": -99, r"\infty": 99}


def test_the_interval_of_an_inequality_holds_the_numbers_that_python_finds_it_true_for():
    points = [Fraction(number, 2) for number in range(-13, 14)]
    relations = ["<", ">", r"\leq", r"\geq"]
    for _ in range(300):
        low, high = sorted(random.sample(range(-5, 6), 2))
        one, other = random.choice([("<", r"\leq"), (">", r"\geq")]), random.choice(relations)
        left, right = (low, high) if "<" in one else (high, low)
        signs = random.choices(one, k=2)
        text = random.choice(
            [f"x {other} {low}", f"{high} {other} x", f"{left} {signs[0]} x {signs[1]} {right}"],
        )
        interval = only_reading(text).interval
        lower, upper = (Fraction(BOUNDS.get(bound, bound)) for bound in texts(interval))
        inside = [
            (lower <= point if interval.opening == "[" else lower < point)
            and (point <= upper if interval.closing == "]" else point < upper)
            for point in points
        ]
        assert inside == [holds(text, x=point) for point in points], text


@pytest.mark.parametrize(
    ("text", "separator", "parts"),
    [
        ("1,2", ",", ["1", "2"]),
        ("(1,2),3", ",", ["(1,2)", "3"]),
        (r"\{1,2\},3", ",", [r"\{1,2\}", "3"]),
        ("1,,2,", ",", ["1", "2"]),
        ("", ",", [""]),
        (r"x\in A", r"\in", ["x", "A"]),
        (r"\infty", r"\in", [r"\infty"]),
        ("1],2", ",", ["1]", "2"]),
    ],
)
def test_splitting_respects_brackets(text, separator, parts):
    assert split_top(text, separator) == parts


def test_nesting_and_number_are_bounded():
    deep = only_reading("(1," * 500 + "1" + ")" * 500)
    depth = 0
    while isinstance(deep, Ordered):
        deep, depth = deep.items[1], depth + 1
    assert isinstance(deep, Scalar)
    assert 4 < depth < 20
    assert leaves(only_reading(r"\begin{pmatrix} 1 & 2 \\ 3 & x+1 \end{pmatrix}")) == 2 * 2
    assert isinstance(only_reading(",".join("12" for _ in range(101))), Scalar)
    assert leaves(only_reading(",".join("12" for _ in range(100)))) == 100
