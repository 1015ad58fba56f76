r"""Sets of real numbers whose ends are plain numbers, whatever they are written as.

node -> where its pieces begin and end

``x \neq 0``, ``\mathbb{R} \setminus \{0\}`` and ``(-\infty,0) \cup (0,\infty)`` are one set.
"""

import math
from collections.abc import Iterator, Sequence

from perl.rewards.verifier.arithmetic import Value, exact_value
from perl.rewards.verifier.latex import compact
from perl.rewards.verifier.structure import (
    AND,
    Equation,
    Inequality,
    Node,
    Ordered,
    Scalar,
    Unordered,
    Without,
    parts_of,
)

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
