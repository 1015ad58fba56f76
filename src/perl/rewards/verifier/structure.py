r"""What kind of thing an answer is: a value, an equation, a tuple or interval, a collection in any order, a matrix.

tidy answer -> Node, as many readings as it has

``1,234`` is a number or a list of two; ``1 \pm \sqrt{5}`` is two numbers; ``x = 3`` is 3 under a label. Scalars stay
text; what they are worth is not known here. Splitting is linear, nesting is bounded.
"""

import functools
import re
from dataclasses import dataclass, field

from perl.rewards.verifier.arithmetic import exact_value
from perl.rewards.verifier.latex import TEXT_END, TEXT_START

_DEEPEST = 8
# More values than any answer has; the text is then compared as it is.
_MOST_ITEMS = 100
# A longer text is a scalar.
_LONGEST = 5000

_OPEN = frozenset(("(", "[", "{", "\\{", TEXT_START))
_CLOSE = frozenset((")", "]", "}", "\\}", TEXT_END))
_BRACKET = re.compile(rf"\\[{{}}]|[()\[\]{{}}{TEXT_START}{TEXT_END}]")
# "and" and "or" between values; what may separate the parts of an answer, or bracket them.
AND, OR = "\u2a53", "\u2a54"
_SIGN = re.compile(rf"{_BRACKET.pattern}|[;,=<>{AND}{OR}]|\\(?:cup|setminus|approx|leq|geq|neq|in|pm|mp)(?![a-zA-Z])")
_SEPARATORS = ((";",), (",", AND, OR))
_CONNECTIVES = re.compile(
    rf"\s*(?:,\s*)?(?:{TEXT_START}\s*,?\s*(?:and|or)\s*,?\s*{TEXT_END}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])(?![^{TEXT_START}{TEXT_END}]*{TEXT_END})"
    r"|\\(?:lor|vee)(?![a-zA-Z])|\\(?:land|wedge)(?![a-zA-Z])(?=.*(?:[<>=]|\\[lgn]eq)))\s*",
    re.IGNORECASE,
)
_ENVIRONMENT = re.compile(r"\\begin\{([a-zA-Z]*matrix|array|cases|aligned)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_ROW_END = re.compile(r"\\\\\*?(?:\s*\[\s*[-\d.]+\s*[a-z]{2}\s*\])?|\\cr(?![a-zA-Z])")  # \\[4pt]
_RULE = re.compile(r"\\hline(?![a-zA-Z])")
_RELATION = re.compile(r"\\(?:approx|leq|geq|neq|in)(?![a-zA-Z])|[=<>]")
_ORDER = ("<", ">", "\\leq", "\\geq")
_MIRRORED = {"<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq"}
_NAME = re.compile(r"[a-zA-Z](?:_\{?\w\}?)?(?:\([a-zA-Z]\))?")
_ABSOLUTE = re.compile(r"\| ?([a-zA-Z]) ?\|")
# A set-builder: {x | x > 2} is x > 2.
_BUILDER = re.compile(r"\s*[a-zA-Z]\s*(?:\\in(?: ?\(-\\infty,\\infty\)|[^|:,]{0,40}))? ?(?:\\mid(?![a-zA-Z])|[|:])")
_SUBSCRIPT = re.compile(r"_\{[^{}]*\}|_\w|\^(?:\{-1\}(?=\()|\{?\s*\\(?:cdot|ast)(?![a-zA-Z])\s*\}?)|\\\|")
_ARGUMENTS = re.compile(r"(?<=[a-zA-Z'])\([^()]*\)")
_LETTER = re.compile(r"[a-zA-Z]")
_NO_LABEL = re.compile(r"[-+^\d<>\\]")
# Commands that stand in names; any other makes a side an expression.
_NAMES = re.compile(
    r"\\(?:frac|angle|triangle|measuredangle|overline|alpha|beta|gamma|delta|theta|lambda|mu|phi|Phi|rho|sigma|omega|Delta"
    r"|bar|hat|tilde)(?![a-zA-Z])"
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")


@dataclass(frozen=True)
class Scalar:
    """One value, or words."""

    text: str


@dataclass(frozen=True)
class Equation:
    r"""Sides joined by ``=``, ``\approx`` or ``\in``.

    Attributes:
        text: All of it.
        label: The side that names the unknown (``x``, ``f(2)``, ``|AB|``); None if no side does.
        value: What the label stands for; without a label, the last side.
    """

    text: str
    label: str | None
    value: "Node"


@dataclass(frozen=True)
class Inequality:
    """A relation of order, with the interval that it describes if it bounds a single name, and the name."""

    text: str
    interval: "Ordered | Without | None" = None
    name: str | None = None


@dataclass(frozen=True)
class Ordered:
    """A tuple, vector or interval with the brackets it is written in."""

    opening: str
    closing: str
    items: tuple["Node", ...]


@dataclass(frozen=True)
class Unordered:
    """A set in braces, a union, or values in a row without brackets, and whether AND or OR, or both, joins them."""

    items: tuple["Node", ...]
    braces: bool
    joined: str = field(default="", compare=False)


@dataclass(frozen=True)
class Without:
    """A set without another one."""

    whole: "Node"
    points: "Node"


@dataclass(frozen=True)
class Grid:
    """A matrix, row by row."""

    rows: tuple[tuple["Node", ...], ...]
    text: str = field(default="", compare=False)


Node = Scalar | Equation | Inequality | Ordered | Unordered | Without | Grid
_REALS = Ordered("(", ")", (Scalar("-\\infty"), Scalar("\\infty")))


@functools.lru_cache(maxsize=1024)
def readings(text: str) -> tuple[Node, ...]:
    """All that a tidy answer can be, likeliest first."""
    structured = _structure(text, 0)
    grouped = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    if grouped != text and isinstance(structured, Unordered) and not structured.braces:
        return _structure(grouped, 0), structured
    return (structured,)


def parts_of(node: Node) -> tuple[Node, ...]:
    """The nodes that a node is made of."""
    match node:
        case Ordered(items=items) | Unordered(items=items):
            return items
        case Without(whole=whole, points=points):
            return whole, points
        case Grid(rows=rows):
            return tuple(cell for row in rows for cell in row)
        case Equation(value=inside) | Inequality(interval=inside) if inside:
            return (inside,)
    return ()


def leaves(node: Node) -> int:
    """How many values a node holds."""
    return sum(map(leaves, parts_of(node))) or 1


def _structure(text: str, depth: int) -> Node:
    """The node of a text; beyond the deepest nesting everything is a scalar."""
    if depth >= _DEEPEST or len(text) > _LONGEST:
        return Scalar(text)
    pieces = [piece.strip() for piece in _CONNECTIVES.split(text)]
    # "and" and "or" join values; between words they are words.
    if len(pieces) > 1 and any(exact_value(one) is not None or not one.replace(" ", "").isalpha() for one in pieces):
        text = _CONNECTIVES.sub(_connective, text).strip().strip(f",{AND}{OR}")
    text = text.strip()
    bracketed = text[:1] in ("[", "(") and text[-1:] in (")", "]")
    environment = _ENVIRONMENT.fullmatch(text[1:-1].strip() if bracketed else text) if "\\begin" in text else None
    if environment and environment[1] != "vmatrix":
        rows = [row for row in _ROW_END.split(_RULE.sub("", environment[2])) if row.strip()]
        if environment[1] in ("cases", "aligned"):
            return _unordered([row.replace("&", " ") for row in rows], depth, braces=False)
        if len(rows) > _MOST_ITEMS or any(row.count("&") >= _MOST_ITEMS for row in rows):
            return Scalar(environment[0])
        cells = [tuple(_structure(cell.strip(), depth + 1) for cell in row.split("&")) for row in rows]
        return Grid(tuple(cells), environment[0])
    for separators in _SEPARATORS:
        parts = split_top(text, *separators)
        if len(parts) > _MOST_ITEMS:
            return Scalar(text)
        if len(parts) > 1:
            joined = "".join(sorted({sign for _, sign in _top_signs(text) if sign in (AND, OR)}))
            return _unordered(parts, depth, braces=False, joined=joined)
    return _single(text, depth)


def _single(text: str, depth: int) -> Node:
    """A text that is not a list."""
    if _RELATION.search(text):
        related = _related(text, depth)
        if related is not None:
            return related
    difference = split_top(text, "\\setminus")
    if len(difference) == 2:
        return Without(*(_structure(part, depth + 1) for part in difference))
    union = split_top(text, "\\cup")
    if len(union) > 1:
        return _unordered(union, depth, braces=True, joined=OR)
    if text.count("\\pm") + text.count("\\mp") == 1 and not _enclosed(text):
        plus = text.replace("\\pm", "+").replace("\\mp", "-").strip().removeprefix("+")
        minus = text.replace("\\pm", "-").replace("\\mp", "+")
        return _unordered([plus.strip(), minus.strip()], depth, braces=False)
    enclosed = _enclosed(text)
    if enclosed is None:
        return Scalar(text)
    opening, inside, closing = enclosed
    return _bracketed(opening, inside, closing, text, depth)


def _bracketed(opening: str, inside: str, closing: str, text: str, depth: int) -> Node:
    builder = _BUILDER.match(inside) if opening == "\\{" else None
    if builder:
        return _structure(inside[builder.end() :], depth + 1)
    parts = next((found for s in _SEPARATORS if len(found := split_top(inside, *s)) > 1), [inside])
    if len(parts) > _MOST_ITEMS:
        return Scalar(text)
    if opening == "\\{" or (opening == "{" and len(parts) > 1):
        return _unordered(parts, depth, braces=True)
    if len(parts) == 1:
        inner = _structure(inside, depth + 1)
        return Scalar(text) if isinstance(inner, Scalar) and opening != "{" else inner
    items = [_structure(part.strip(), depth + 1) for part in parts]
    return Ordered(opening, closing, tuple(items))


def split_top(text: str, *separators: str) -> list[str]:
    """The parts between separators that stand outside of all brackets; empty parts are dropped."""
    if not any(separator in text for separator in separators):
        return [text]
    parts, start = [], 0
    for begin, sign in _top_signs(text):
        if sign in separators:
            parts.append(text[start:begin])
            start = begin + len(sign)
    parts.append(text[start:])
    kept = [part.strip() for part in parts if part.strip()]
    return kept or [text]


@functools.lru_cache(maxsize=256)
def _top_signs(text: str) -> tuple[tuple[int, str], ...]:
    """The signs outside of all brackets, and where they stand."""
    found, depth = [], 0
    for match in _SIGN.finditer(text):
        sign = match[0]
        if sign in _OPEN:
            depth += 1
        elif sign in _CLOSE:
            depth = max(0, depth - 1)
        elif depth == 0:
            found.append((match.start(), sign))
    return tuple(found)


def _related(text: str, depth: int) -> Node | None:
    """The relation that a text is at its outermost level, if any."""
    if any(sign in (*_ORDER, "\\neq") for _, sign in _top_signs(text)):
        return _inequality(text, depth)
    approximated = split_top(text, "\\approx")
    elements = split_top(approximated[0], "\\in")
    sides = elements if len(elements) > 1 else split_top(approximated[0], "=")
    if len(approximated) > 1 and len(sides) == 1 and _is_label(sides[0]):
        sides = approximated[:2]
    if len(sides) == 1:  # "\\sqrt{2} \\approx 1.414" is \\sqrt{2}
        return _structure(sides[0], depth + 1) if len(approximated) > 1 else None
    if _is_label(sides[0]):
        return Equation(text, sides[0], _structure(sides[-1], depth + 1))
    if len(sides) == 2 and _is_label(sides[1]):
        return Equation(text, sides[1], _structure(sides[0], depth + 1))
    return Equation(text, None, _structure(sides[-1], depth + 1))


def _is_label(text: str) -> bool:
    """Whether the side of an equation names the unknown: x, f(x), a_{37}, |AB|, (x, y), but not 2x or x^2."""
    bare = _ARGUMENTS.sub("", _SUBSCRIPT.sub("", text))
    return bool(_LETTER.search(bare)) and not _NO_LABEL.search(_NAMES.sub("", bare))


def _inequality(text: str, depth: int) -> Inequality:
    """An inequality; of one name with the interval that it is: x > 5, 5 < x, 1 < x < 2, 2 > x > 1."""
    signs = [(begin, sign) for begin, sign in _top_signs(text) if sign in (*_ORDER, "=", "\\neq")]
    starts = [0, *(begin + len(sign) for begin, sign in signs)]
    sides = [text[start:end].strip() for start, end in zip(starts, [*(b for b, _ in signs), len(text)], strict=True)]
    order = [sign for _, sign in signs]
    if order == ["\\neq"] and _NAME.fullmatch(sides[0]) and sides[1]:
        return Inequality(text, Without(_REALS, _structure(sides[1], depth + 1)), sides[0])
    if order[0] in (">", "\\geq"):  # from the right to the left it is ascending
        sides, order = sides[::-1], [_MIRRORED.get(sign, sign) for sign in reversed(order)]
    if len(order) > 2 or not all(sides) or any(sign not in ("<", "\\leq") for sign in order):
        return Inequality(text)
    opening, closing = "(" if order[0] == "<" else "[", ")" if order[-1] == "<" else "]"
    absolute = _ABSOLUTE.fullmatch(sides[0])
    if len(sides) == 3:
        lower, name, upper = sides
    elif absolute and not sides[1].startswith("-"):
        lower, name, upper = f"-{sides[1]}", absolute[1], sides[1]
        opening = "(" if closing == ")" else "["
    elif _NAME.fullmatch(sides[0]):
        opening, lower, name, upper = "(", "-\\infty", *sides
    else:
        lower, name, upper, closing = *sides, "\\infty", ")"
    if not _NAME.fullmatch(name):
        return Inequality(text)
    return Inequality(text, Ordered(opening, closing, (Scalar(lower), Scalar(upper))), name)


def _unordered(parts: list[str], depth: int, *, braces: bool, joined: str = "") -> Node:
    items: list[Node] = []
    for part in parts:
        node = _structure(part.strip(), depth + 1)
        # "1 \pm 2, 3" are three values, "\{1,2\} \cup \{3\}" too
        flat = isinstance(node, Unordered) and (node.braces == braces or not node.braces)
        items += node.items if flat and isinstance(node, Unordered) else [node]
    if len(items) == 1:
        return items[0]
    return Unordered(tuple(items), braces, joined)


def _enclosed(text: str) -> tuple[str, str, str] | None:
    """Opening bracket, content and closing bracket of a text that one pair of brackets encloses."""
    opening = "\\{" if text.startswith("\\{") else text[:1]
    closing = "\\}" if text.endswith("\\}") else text[-1:]
    if opening not in ("(", "[", "{", "\\{") or closing not in (")", "]", "}", "\\}"):
        return None
    if len(text) < len(opening) + len(closing):
        return None
    depth = 0
    inside = text[len(opening) : len(text) - len(closing)]
    for bracket in _BRACKET.finditer(inside):
        depth += 1 if bracket[0] in _OPEN else -1
        if depth < 0:
            return None
    return opening, inside, closing


def _connective(found: re.Match[str]) -> str:
    return AND if re.search("and|wedge", found[0], re.IGNORECASE) else OR
