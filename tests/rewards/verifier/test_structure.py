r"""The structure of an answer: what its values are, whether their order counts, what is a label."""

import pytest

from perl.rewards.verifier.latex import tidy
from perl.rewards.verifier.structure import (
    Equation,
    Grid,
    Inequality,
    Ordered,
    Scalar,
    Unordered,
    leaves,
    readings,
    split_top,
)


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


def test_a_number_with_separators_may_be_a_list():
    number, several = readings("1,234")
    assert number == Scalar("1,234")
    assert texts(several) == ["1", "234"]
    assert [type(node) for node in readings("1,23")] == [Unordered]


@pytest.mark.parametrize("text", ["1,2,3", "1; 2; 3", r"1, 2 \text{ and } 3", "1 or 2 or 3", r"1, 2\text{, and } 3"])
def test_values_in_a_row_have_no_order(text):
    node = only_reading(text)
    assert isinstance(node, Unordered)
    assert not node.braces
    assert texts(node) == ["1", "2", "3"]


def test_brackets_are_kept():
    assert only_reading("(1,2]") == Ordered("(", "]", (Scalar("1"), Scalar("2")))
    assert only_reading(r"\{1,2\}") == Unordered((Scalar("1"), Scalar("2")), braces=True)
    assert only_reading(r"(1,2)\cup[3,4)").items == (
        Ordered("(", ")", (Scalar("1"), Scalar("2"))),
        Ordered("[", ")", (Scalar("3"), Scalar("4"))),
    )


@pytest.mark.parametrize(
    ("text", "label", "value"),
    [
        ("x=3", "x", "3"),
        ("3=x", "x", "3"),
        ("f(2) = 5", "f(2)", "5"),
        ("a_{37} = 1", "a_{37}", "1"),
        ("|AB| = 4", "|AB|", "4"),
        (r"\angle ABC = 30", r"\angle ABC", "30"),
        ("x = y = 3", "x", "3"),
        (r"x \approx 1.5", "x", "1.5"),
        ("2x = 6", None, "6"),
        ("x^2 = 9", None, "9"),
        ("2+3=5", None, "5"),
        (r"x = \infty", "x", r"\infty"),
        (r"x = \int_0^1 t", "x", r"\int_0^1 t"),
    ],
)
def test_the_label_of_an_equation_is_the_side_that_names_what_is_asked_for(text, label, value):
    node = only_reading(text)
    assert isinstance(node, Equation)
    assert (node.label, node.value) == (label, Scalar(value))


@pytest.mark.parametrize(
    ("text", "name", "brackets", "bounds"),
    [
        ("x>5", "x", "()", ["5", r"\infty"]),
        ("5<x", "x", "()", ["5", r"\infty"]),
        (r"x \leq 3", "x", "(]", [r"-\infty", "3"]),
        (r"3 \geq x", "x", "(]", [r"-\infty", "3"]),
        (r"1 < t \leq 2", "t", "(]", ["1", "2"]),
        (r"2 \geq t > 1", "t", "(]", ["1", "2"]),
        (r"f(x) \geq 0", "f(x)", "[)", ["0", r"\infty"]),
    ],
)
def test_an_inequality_of_one_name_is_an_interval(text, name, brackets, bounds):
    node = only_reading(text)
    assert isinstance(node, Inequality)
    assert (node.name, node.interval.opening + node.interval.closing, texts(node.interval)) == (name, brackets, bounds)


@pytest.mark.parametrize("text", ["x+y>2", r"x \neq 1", "1<x>2", "1<x<2<3", "2x<6", "x<", "<", "1<x=2", "a<b<c<d"])
def test_other_inequalities_are_none(text):
    node = only_reading(text)
    assert isinstance(node, Inequality)
    assert node.interval is None


def test_a_matrix_is_read_row_by_row():
    node = only_reading(r"\begin{pmatrix} 1 & 2 \\ 3 & x+1 \end{pmatrix}")
    assert node == Grid(((Scalar("1"), Scalar("2")), (Scalar("3"), Scalar("x+1"))))
    assert leaves(node) == 4


def test_two_signs_are_two_values():
    assert texts(only_reading(r"1 \pm \sqrt{5}")) == [r"1 + \sqrt{5}", r"1 - \sqrt{5}"]
    assert texts(only_reading(r"\pm 3")) == ["3", "- 3"]


@pytest.mark.parametrize(
    ("text", "separator", "parts"),
    [
        ("1,2", ",", ["1", "2"]),
        ("(1,2),3", ",", ["(1,2)", "3"]),
        ("f(1,2)", ",", ["f(1,2)"]),
        (r"\{1,2\},3", ",", [r"\{1,2\}", "3"]),
        ("1,,2,", ",", ["1", "2"]),
        ("", ",", [""]),
        (",", ",", [","]),
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
    assert isinstance(only_reading(",".join("12" for _ in range(101))), Scalar)
    assert leaves(only_reading(",".join("12" for _ in range(100)))) == 100
