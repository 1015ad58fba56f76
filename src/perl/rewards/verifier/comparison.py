r"""Whether two answers are the same, as far as that can be decided without a computer algebra system.

gold answer, answer -> True, False, or None where only algebra can tell

Values are compared exactly: 0.5, 1/2 and 50% agree, 0.33 and 1/3 do not. A decimal number of six digits or more also
agrees with an exact value that it is the rounding of. Units, degree signs, a label ("x =") and the order of values
without brackets do not count unless the gold answer insists. The rules are in docs/rewards.md.
"""

import dataclasses
import functools
import math
import re
import string
from collections.abc import Callable, Iterator, Sequence, Set
from fractions import Fraction

from perl.rewards.verifier.arithmetic import Value, decimal_of, exact_value
from perl.rewards.verifier.latex import TEXT_END, TEXT_START, compact, tidy
from perl.rewards.verifier.structure import (
    AND,
    OR,
    Equation,
    Grid,
    Inequality,
    Node,
    Ordered,
    Scalar,
    Unordered,
    Without,
    leaves,
    parts_of,
    readings,
)
from perl.rewards.verifier.words import (
    chosen,
    different_choices,
    is_choice,
    is_same_product,
    is_words,
    normal_words,
    without_unit,
)

Truth = bool | None
Algebra = Callable[[str, str], Truth]
"""Compares two scalars that are not numbers; None if it cannot."""

# A longer answer is right only letter for letter.
LONGEST_ANSWER = 2000
# Pairs of values in two collections; without a worker process, which may be killed, more are not compared.
_MOST_PAIRS = 2500
# A decimal number must have this many digits to stand for a value that it only approximates.
_DIGITS_OF_A_ROUNDING = 6
_COMMAND_OR_TEXT = re.compile(rf"\\(?:begin|end)\{{[a-zA-Z]*\}}|\\[a-zA-Z]+|{TEXT_START}[^{TEXT_END}]*{TEXT_END}")
_VARIABLE = re.compile(r"[a-df-hj-zA-Z]")  # all but e and i

_ELEMENT = re.compile(r"\\in(?![a-zA-Z])")
# Not arithmetic: numbers in a row, a date, a time; "3:4" is a ratio.
_AS_WRITTEN = re.compile(
    r"[(\[]? ?-?[\d.]+(?: [\d.]+)+ ?[)\]]?|(?:1[5-9]|20)\d\d(?:-[01]?\d-[0-3]?\d|/\d\d/\d\d)"
    r"|\d\d?/\d\d?/(?:1[5-9]|20)\d\d|\d\d?:0\d|\d\d?:\d\d:\d\d|(\d\d?):([1-5]\d)"
)
_IDLE_ZEROS = re.compile(r"(?<![\d.])0(?=\d)|(?<=:\d\d):00$")
_ORDER_OF_NAMES = f"{string.ascii_lowercase} {string.digits}"
_BASE = re.compile(r"[0-9A-Fa-f]+_\{?(?:\d{1,2})\}?")


def same_answer(gold: str, answer: str, algebra: Algebra | None = None) -> Truth:
    """Whether an answer is the gold answer.

    Args:
        gold: The gold answer, as written.
        answer: The answer, as written.
        algebra: Compares scalars that are not numbers; without it they are None unless their texts agree.

    Returns:
        True, False, or None if only algebra can tell.
    """
    if gold.strip() == answer.strip():
        return True
    if max(len(gold), len(answer)) > LONGEST_ANSWER:
        return False
    tidy_gold, tidy_answer = tidy(gold), tidy(answer)
    if not tidy_answer or not tidy_gold:
        return False
    if compact(tidy_gold) == compact(tidy_answer):
        return True
    answers = *readings(tidy_answer), *map(Scalar, chosen(tidy_gold, tidy_answer))
    golds = *readings(tidy_gold), *map(Scalar, chosen(tidy_answer, tidy_gold) if tidy_gold.startswith("(") else ())
    ask = algebra or (lambda _gold, _answer: None)
    return _combined(
        (
            None if algebra is None and leaves(g) * leaves(a) > _MOST_PAIRS else _same_node(g, a, ask)
            for g in golds
            for a in answers
        ),
        deciding=True,
    )


@functools.lru_cache(maxsize=4096)
def is_plain(gold: str) -> bool:
    """Whether a gold answer can be compared with anything without algebra: numbers and words, also several."""
    if len(gold) > LONGEST_ANSWER:
        return False
    return bool(tidy(gold)) and next(scalars_of(gold), None) is None


def scalars_of(gold: str) -> Iterator[str]:
    """What algebra must be able to read of a gold answer: its expressions, without labels and units."""
    for node in readings(tidy(gold)):
        yield from _expressions(node)


def _expressions(node: Node) -> Iterator[str]:
    if isinstance(node, Scalar):
        value = without_unit(node.text)[0]
        number = _as_written(value) or _values(value) or _BASE.fullmatch(compact(value))
        if not (number or is_words(node.text) or is_choice(node.text)):
            yield value
    elif (isinstance(node, Inequality) and node.interval is None) or (
        isinstance(node, Equation) and node.label is None
    ):
        yield node.text
    for part in parts_of(node):
        yield from _expressions(part)


def _same_node(gold: Node, answer: Node, ask: Algebra) -> Truth:
    """The same structure with the same values, or the same set of numbers."""
    if same_set(gold, answer):
        return True
    if isinstance(gold, Equation | Inequality) or isinstance(answer, Equation | Inequality):
        return _same_relation(gold, answer, ask)
    if isinstance(gold, Without) or isinstance(answer, Without):
        return type(gold) is type(answer) and _in_order(parts_of(gold), parts_of(answer), ask)
    if isinstance(gold, Scalar) and isinstance(answer, Scalar):
        return _same_scalar(gold.text, answer.text, ask)
    if isinstance(gold, Grid) and isinstance(answer, Grid):
        same_shape = [len(row) for row in gold.rows] == [len(row) for row in answer.rows]
        return same_shape and _in_order(parts_of(gold), parts_of(answer), ask)
    if isinstance(gold, Scalar | Grid) and isinstance(answer, Scalar | Grid):
        # A matrix may be written as a product or a sum; nothing else can equal one.
        return "\\begin" in gold.text and "\\begin" in answer.text and ask(gold.text, answer.text)
    if isinstance(gold, Scalar | Grid):  # "0.5, 1/2" is 1/2, written twice
        twice = isinstance(answer, Unordered) and not answer.braces
        return twice and _combined((_same_node(gold, item, ask) for item in parts_of(answer)), deciding=False)
    if isinstance(answer, Scalar | Grid):
        return False
    return _same_items(gold, answer, ask)


def _same_items(gold: Ordered | Unordered, answer: Ordered | Unordered, ask: Algebra) -> Truth:
    """Two collections; brackets and order count as far as the gold answer has them."""
    if len(gold.items) != len(answer.items):
        return False
    if isinstance(gold, Unordered) and isinstance(answer, Unordered) and is_range(gold) and is_range(answer):
        joined = {gold.joined, answer.joined}
        if joined == {AND, OR} or (len(joined) > 1 and same_set(gold, answer) is False):
            return False  # x > 1 or x < 3, x > 1 and x < 3
    gold, answer = _by_label(gold), _by_label(answer)
    if isinstance(gold, Ordered) and isinstance(answer, Ordered):
        if len(gold.items) == 2 and (gold.opening, gold.closing) != (answer.opening, answer.closing):
            return False  # (1,2] and [1,2] are not the same interval
        return _in_order(gold.items, answer.items, ask)
    if isinstance(gold, Ordered):
        bare_tuple = isinstance(answer, Unordered) and not answer.braces and gold.opening + gold.closing == "()"
        return bare_tuple and _in_order(gold.items, answer.items, ask)
    if isinstance(answer, Ordered):
        if gold.braces or answer.opening + answer.closing != "()":  # [1,3] is an interval, not the values 1 and 3
            return False
        if _labels(gold):  # x = 3, y = 4 is (3,4), not (4,3)
            return _in_order(gold.items, answer.items, ask)
    return _in_any_order(gold.items, answer.items, ask)


def _labels(items: Ordered | Unordered) -> set[str]:
    """The names that the values stand for; none unless each has another one."""
    labels = {item.label for item in items.items if isinstance(item, Equation) and item.label is not None}
    return labels if len(labels) == len(items.items) else set()


def _by_label(items: Ordered | Unordered) -> Ordered | Unordered:
    """Values under names that follow each other, x, y, z or a_1, a_2, in the order of these; others as they are."""
    equations = [item for item in items.items if isinstance(item, Equation)] if _labels(items) else []
    named = {_without_braces(item.label or ""): item for item in equations}
    labels = sorted(named)
    same_beginning = len({label[:-1] for label in labels}) == 1 and len(labels) == len(equations)
    if not same_beginning or "".join(label[-1] for label in labels) not in _ORDER_OF_NAMES:
        return items
    return dataclasses.replace(items, items=tuple(named[label] for label in labels))


def _in_order(gold: Sequence[Node], answer: Sequence[Node], ask: Algebra) -> Truth:
    return _combined((_same_node(g, a, ask) for g, a in zip(gold, answer, strict=True)), deciding=False)


def _in_any_order(gold: Sequence[Node], answer: Sequence[Node], ask: Algebra) -> Truth:
    """Whether each gold item has an answer item to itself; equality is transitive, so the first that fits will do."""
    left, undecided = list(answer), False
    for item in gold:
        truths: list[Truth] = []
        while len(truths) < len(left) and not (truths and truths[-1]):
            truths.append(_same_node(item, left[len(truths)], ask))
        if truths and truths[-1]:
            left.pop(len(truths) - 1)
        elif None in truths:
            undecided = True
        else:
            return False
    return None if undecided else True


def _same_relation(gold: Node, answer: Node, ask: Algebra) -> Truth:
    """At least one side is an equation or an inequality."""
    if (is_range(gold) and isinstance(answer, Unordered)) or (is_range(answer) and isinstance(gold, Unordered)):
        return False  # 1 < x < 3 is not the values 1 and 3
    if isinstance(gold, Inequality) or isinstance(answer, Inequality):
        return _same_inequality(gold, answer, ask)
    if isinstance(gold, Equation) and isinstance(answer, Equation):
        if gold.label is not None and answer.label is not None and compact(gold.label) == compact(answer.label):
            return _same_node(gold.value, answer.value, ask)
        if _ELEMENT.search(gold.text) or _ELEMENT.search(answer.text):
            return (gold.label is None or answer.label is None) and _same_node(gold.value, answer.value, ask)
        return ask(gold.text, answer.text)
    if isinstance(gold, Equation):
        return gold.label is not None and _same_node(gold.value, answer, ask)
    if isinstance(answer, Equation):
        # Without a label it may only show where the value comes from: "10^3 = 1000", but not "2x = 5".
        calculation = not _VARIABLE.search(_COMMAND_OR_TEXT.sub("", answer.text.rpartition("=")[0]))
        return (answer.label is not None or calculation) and _same_node(gold, answer.value, ask)
    raise TypeError("neither side is a relation")


def _same_inequality(gold: Node, answer: Node, ask: Algebra) -> Truth:
    """Inequalities are compared as intervals where they are some, else by algebra."""
    if len(names(gold) | names(answer)) > 1:
        return False  # x > 5 and y > 5
    intervals = _interval(gold), _interval(answer)
    if isinstance(intervals[0], Ordered | Without) and isinstance(intervals[1], Ordered | Without):
        return _same_node(intervals[0], intervals[1], ask)
    if isinstance(gold, Inequality) and isinstance(answer, Inequality):
        return ask(gold.text, answer.text)
    return False


def _interval(node: Node) -> Node | None:
    if isinstance(node, Inequality):
        return node.interval
    return node.value if isinstance(node, Equation) else node


def _same_scalar(gold: str, answer: str, ask: Algebra) -> Truth:
    """Two values: letter for letter, as words, as numbers, else by algebra."""
    if compact(gold) == compact(answer):
        return True
    gold_is_words, answer_is_words = is_words(gold), is_words(answer)
    if gold_is_words and answer_is_words:
        return normal_words(gold) == normal_words(answer) or is_same_product(gold, answer)
    if different_choices(gold, answer):
        return False
    (gold_core, gold_unit), (answer_core, answer_unit) = without_unit(gold), without_unit(answer)
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return False
    written = _as_written(gold_core), _as_written(answer_core)
    # Beside a ratio a time is a ratio too.
    if all(written) or (any(written) and ":" not in (gold_core if written[0] is None else answer_core)):
        return written[0] == written[1]
    gold_values, answer_values = _values(gold_core), _values(answer_core)
    if gold_values and answer_values:
        same = _same_number(gold_core, answer_core)
        return ask(gold_core, answer_core) if same is None else same
    if (gold_values and answer_is_words) or (answer_values and gold_is_words):
        return False
    if _BASE.fullmatch(compact(gold_core)) and (_BASE.fullmatch(compact(answer_core)) or answer_values):
        digits = _without_braces(gold_core), _without_braces(answer_core)
        return digits[0] == digits[1] or digits[0].partition("_")[0] == digits[1]  # the question named the base
    return True if compact(gold_core) == compact(answer_core) else ask(gold_core, answer_core)


def _as_written(text: str) -> str | None:
    """A text of digits that is no arithmetic, without idle zeros; None for anything else."""
    found = _AS_WRITTEN.fullmatch(text)
    ratio = found and found[1] and math.gcd(int(found[1]), int(found[2])) == 1
    return _IDLE_ZEROS.sub("", text) if found and not ratio else None


def _same_number(gold: str, answer: str) -> Truth:
    """Two numbers: exactly, as percentages, or one as the rounding of the other."""
    both_percent = gold.endswith("%") and answer.endswith("%")
    if both_percent:
        gold, answer = gold.rstrip("% "), answer.rstrip("% ")
    values = _values(gold), _values(answer)
    infinite = [any(isinstance(value, float) for value in side) for side in values]
    if all(infinite):
        return None
    return bool(values[0] & values[1]) or is_rounding(gold, values[1]) or is_rounding(answer, values[0])


def is_rounding(text: str, values: Set[Value]) -> bool:
    """Whether a tidy decimal number of six digits or more is one of the values, rounded or cut off."""
    decimal = decimal_of(text)
    if decimal is None or decimal.digits < _DIGITS_OF_A_ROUNDING:
        return False
    for value in values:
        if isinstance(value, Fraction):
            missing = value - decimal.value
            cut_off = (missing >= 0) == (value >= 0) and abs(missing) < decimal.unit
            if cut_off or 2 * abs(missing) <= decimal.unit:
                return True
    return False


@functools.lru_cache(maxsize=2048)
def _values(text: str) -> frozenset[Value]:
    """What a number can mean, a percentage also its fraction; empty for anything else."""
    percentage = text.endswith("%")
    value = exact_value(text[:-1].rstrip() if percentage else text)
    if value is None:
        return frozenset()
    return frozenset((value, value / 100)) if percentage else frozenset((value,))


def _without_braces(text: str) -> str:
    return compact(text).replace("{", "").replace("}", "").casefold()


def _combined(truths: Iterator[Truth], *, deciding: bool) -> Truth:
    """Whether any is true (``deciding``) or all are (not ``deciding``); None where an unknown one could decide."""
    undecided = False
    for truth in truths:
        if truth is deciding:
            return deciding
        undecided = undecided or truth is None
    return None if undecided else not deciding


Cuts = tuple[tuple[Value, bool], ...]
"""Ascending: where a piece begins, where it ends, ...; each a number, and whether the cut is behind it."""
_INFINITE = {"\\infty": math.inf, "+\\infty": math.inf, "-\\infty": -math.inf}


def is_range(node: Node) -> bool:
    """Whether a node describes all numbers between some, not a few values."""
    if isinstance(node, Equation):
        return "\\in" in node.text and is_range(node.value)
    if isinstance(node, Unordered):
        return any(map(is_range, node.items)) and (
            node.braces or all(isinstance(item, Inequality | Equation) for item in node.items)
        )
    return isinstance(node, Inequality | Ordered | Without)


def same_set(one: Node, other: Node) -> bool | None:
    """Whether two nodes describe the same set of real numbers, of the same name; None where that is unknown."""
    if not (is_range(one) and is_range(other)):
        return None
    if len(names(one) | names(other)) > 1:
        return False
    cuts = _cuts(one), _cuts(other)
    return None if None in cuts else cuts[0] == cuts[1]


def names(node: Node) -> set[str]:
    """What is said to be in a range."""
    if isinstance(node, Unordered):
        return set().union(*map(names, node.items))
    name = node.name if isinstance(node, Inequality) else node.label if isinstance(node, Equation) else None
    return set() if name is None else {name}


def _cuts(node: Node) -> Cuts | None:
    """The cuts of a node, or None where an end is not a plain number."""
    if isinstance(node, Scalar):
        value = exact_value(node.text)
        return None if value is None else ((value, False), (value, True))
    if isinstance(node, Ordered):
        texts = [item.text if isinstance(item, Scalar) else "" for item in node.items]
        ends = [_INFINITE.get(compact(text), exact_value(text)) for text in texts]
        begin, end = ends if len(ends) == 2 else (None, None)
        if begin is None or end is None or begin > end:
            return None
        return (begin, node.opening == "(" or begin == -math.inf), (end, node.closing == "]" and end != math.inf)
    if isinstance(node, Without):
        whole, points = _cuts(node.whole), _cuts(node.points)
        return None if whole is None or points is None else _others(_united([_others(whole), points]))
    if isinstance(node, Unordered):
        parts = [cuts for cuts in map(_cuts, node.items) if cuts is not None]
        united = _united(parts)
        # "x < 1, x > 3" are two pieces; "x > 1, x < 3" overlap, so that both are meant at once.
        overlap = not node.braces and len(united) < sum(map(len, parts))
        if node.joined == AND or (overlap and not node.joined):
            united = _others(_united([_others(part) for part in parts]))
        return united if len(parts) == len(node.items) and len(node.joined) < 2 else None
    inside = parts_of(node)  # of an equation the value, of an inequality the interval
    return _cuts(inside[0]) if inside and isinstance(node, Equation | Inequality) else None


def _pieces(cuts: Cuts) -> Iterator[tuple[tuple[Value, bool], tuple[Value, bool]]]:
    return zip(cuts[::2], cuts[1::2], strict=True)


def _united(sets: Sequence[Cuts]) -> Cuts:
    """What is in any of the sets."""
    merged: list[tuple[Value, bool]] = []
    for begin, end in sorted(piece for cuts in sets for piece in _pieces(cuts)):
        if merged and begin <= merged[-1]:
            merged[-1] = max(merged[-1], end)
        else:
            merged += [begin, end]
    return tuple(merged)


def _others(cuts: Cuts) -> Cuts:
    """The real numbers that are not in a set."""
    pieces = _pieces(((-math.inf, True), *cuts, (math.inf, False)))
    return tuple(cut for begin, end in pieces if begin != end for cut in (begin, end))
