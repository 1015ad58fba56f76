"""Where a card says something else than the card that its files give.

card, card rendered again -> a line for each difference, with the file that says otherwise

The front matter is compared as values, key by key, everything below it line by line, a table's rows cell by cell. Empty
lines do not count. Knows nothing of what the values mean.
"""

import difflib
import re
from collections.abc import Iterator
from typing import Any

import yaml

from perl.errors import Mistake
from perl.hub.card.facts import METRICS, PUBLIC_RECIPE, SCORES
from perl.hub.card.form import AGAIN, CARD, FRONT_MATTER, shown
from perl.hub.card.run_facts import RUN_FACTS
from perl.policy.saved.adapter import CONFIG
from perl.recipe.plain_yaml import PlainLoader, plain_value

MOST_LINES = 30
"""Of differences; a card that has more was not made from these files."""
_WINDOW = 100
_ABSENT = object()
_TEMPLATE = "this version of perl"
# Which file a part of the card comes from: keys of the front matter, sections, rows of the table of the training.
_KEYS = {
    "base_model": CONFIG,
    "license": RUN_FACTS,
    "datasets": PUBLIC_RECIPE,
    "tags": RUN_FACTS,
    "model-index": SCORES,
}
_SECTIONS = {
    "": RUN_FACTS,
    "## Results": SCORES,
    "## Learning curves": SCORES,
    "## Use it": CONFIG,
    "## Training": RUN_FACTS,
    "## Limitations": SCORES,
    "## Citation": RUN_FACTS,
}
_ROWS = {"data": PUBLIC_RECIPE, "mean reward, first and last step": METRICS, "tokens, prompts included": METRICS}

Line = tuple[int, str]
"""Number from 1, and text."""


def differences(card: str, expected: str, named_first: str = "") -> list[Mistake]:
    """Every difference, as ``README.md:12: says ..., metrics.jsonl says ...``.

    Args:
        card: As it was found; its front matter is plain YAML.
        expected: As its files give it.
        named_first: The sentence about the scores, which stands outside of their section.
    """
    found = [*_metadata(card, expected), *_body(card, expected, named_first)]
    if len(found) > MOST_LINES:
        more = Mistake(f"and {len(found) - MOST_LINES:,} more lines differ", CARD, AGAIN)
        return [*found[:MOST_LINES], more]
    return found


def _metadata(card: str, expected: str) -> Iterator[Mistake]:
    (there, twice), (right, _) = _leaves(card), _leaves(expected)
    for number, path in twice:
        yield Mistake(f"{shown('.'.join(path))} is there twice", f"{CARD}:{number}", AGAIN)
    for path, (number, value) in there.items():
        name, (_, wanted) = ".".join(path), right.get(path, (0, _ABSENT))
        if wanted is _ABSENT:
            message = f"says {shown(name)} is {shown(str(value))}, which no file says"
            yield Mistake(message, f"{CARD}:{number}", AGAIN)
        elif wanted != value:
            message = f"says {name} is {shown(str(value))}, {_source_of(path)} says {shown(str(wanted))}"
            yield Mistake(message, f"{CARD}:{number}", AGAIN)
    for path, (_, value) in right.items():
        if path not in there:
            yield Mistake(f"lacks {'.'.join(path)}, which {_source_of(path)} says is {shown(str(value))}", CARD, AGAIN)


def _source_of(path: tuple[str, ...]) -> str:
    return next((file for key, file in _KEYS.items() if path[0].startswith(key)), _TEMPLATE)


def _leaves(card: str) -> tuple[dict[tuple[str, ...], tuple[int, Any]], list[tuple[int, tuple[str, ...]]]]:
    """Path of a value in the front matter -> its line and the value; and paths that are there more than once."""
    match = FRONT_MATTER.match(card)
    node = yaml.compose(match[1], Loader=PlainLoader) if match else None
    found: dict[tuple[str, ...], tuple[int, Any]] = {}
    twice = []
    for path, leaf in _walk(node, ()):
        number = leaf.start_mark.line + 2  # after the dashes, from 1
        if path in found:
            twice.append((number, path))
        found[path] = (number, _value(leaf))
    return found, twice


def _walk(node: yaml.Node | None, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], yaml.Node]]:
    if isinstance(node, yaml.MappingNode) and node.value:
        for key, inner in node.value:
            yield from _walk(inner, (*path, str(key.value)))
    elif isinstance(node, yaml.SequenceNode) and node.value:
        names = [_name(inner) for inner in node.value]
        for index, inner in enumerate(node.value):
            own = names[index] if names.count(names[index]) == 1 and names[index] else str(index)
            yield from _walk(inner, (*path, own))
    elif node is not None:
        yield path, node


def _name(node: yaml.Node) -> str:
    """What an element of a list is called, so that one that is left out does not make the others differ."""
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    if not isinstance(node, yaml.MappingNode):
        return ""
    known = {str(key.value): inner for key, inner in node.value}
    if isinstance(known.get("dataset"), yaml.MappingNode):
        return _name(known["dataset"])
    named = known.get("name")
    return str(named.value) if isinstance(named, yaml.ScalarNode) else ""


def _value(node: yaml.Node) -> Any:  # noqa: ANN401 (a YAML value)
    if not isinstance(node, yaml.ScalarNode):
        return "nothing"  # an empty list or mapping
    return plain_value(node.value) if node.style is None and node.value else node.value


def _body(card: str, expected: str, named_first: str) -> Iterator[Mistake]:
    there, right = _lines(card), _lines(expected)
    if len(there) > 4 * len(right) + 1000:
        yield Mistake(f"has {len(there):,} lines, its files give {len(right):,}", CARD, AGAIN)
        return
    sources = _sources(right, named_first)
    rows = difflib.SequenceMatcher(None, [t for _, t in there], [t for _, t in right], autojunk=False)
    for kind, first, last, begin, end in rows.get_opcodes():
        if kind == "equal":
            continue
        pairs = list(_paired(there[first:last], right[begin:end]))
        after = there[first][0] if first < len(there) else there[-1][0] if there else 1
        for found, wanted in pairs:
            source = sources[wanted[0]] if wanted else _TEMPLATE
            yield from _difference(found, wanted, source, after)


def _lines(card: str) -> list[Line]:
    """The lines below the front matter that are not empty."""
    body = FRONT_MATTER.sub("", card)
    first = card.count("\n") - body.count("\n")
    return [(number, text.rstrip()) for number, text in enumerate(body.split("\n"), first + 1) if text.strip()]


def _sources(lines: list[Line], named_first: str) -> dict[int, str]:
    """Number of a line of the expected card -> the file that says it."""
    found, section = {}, ""
    for number, text in lines:
        section = text if text.startswith("## ") else section
        source = _SECTIONS.get(section, _TEMPLATE)
        if text.startswith("| "):
            source = _ROWS.get(_cells(text)[0], source) if section == "## Training" else source
        if text == named_first:
            source = SCORES
        elif text.startswith("- It was trained for"):
            source = RUN_FACTS
        found[number] = source
    return found


def _paired(there: list[Line], right: list[Line]) -> Iterator[tuple[Line | None, Line | None]]:
    """Lines that stand for each other: rows of a table by their first cells, others in order."""
    rows = {_cells(text)[0]: (number, text) for number, text in there if text.startswith("|")}
    taken = set()
    for wanted in right:
        row = rows.get(_cells(wanted[1])[0]) if wanted[1].startswith("|") else None
        if row is None:
            row = next((line for line in there if line[0] not in taken and not line[1].startswith("|")), None)
            row = None if wanted[1].startswith("|") else row
        if row is not None:
            taken.add(row[0])
        yield row, wanted
    for line in there:
        if line[0] not in taken:
            yield line, None


def _difference(found: Line | None, wanted: Line | None, source: str, after: int) -> Iterator[Mistake]:
    if found is None and wanted is not None:
        yield Mistake(f"lacks “{shown(wanted[1], _WINDOW)}”, which {source} says", f"{CARD}:{after}", AGAIN)
    elif wanted is None and found is not None:
        yield Mistake(f"says “{shown(found[1], _WINDOW)}”, which no file says", f"{CARD}:{found[0]}", AGAIN)
    elif found is not None and wanted is not None and found[1] != wanted[1]:
        where = f"{CARD}:{found[0]}"
        one, other = _cells(found[1]), _cells(wanted[1])
        if found[1].startswith("|") and wanted[1].startswith("|") and len(one) == len(other):
            for cell, right in zip(one[1:], other[1:], strict=True):
                if cell != right:
                    message = f"says {shown(cell)} of {shown(one[0])}, {source} says {shown(right)}"
                    yield Mistake(message, where, AGAIN)
        else:
            one_, other_ = _around(found[1], wanted[1])
            yield Mistake(f"says “{shown(one_, _WINDOW)}”, {source} says “{shown(other_, _WINDOW)}”", where, AGAIN)


def _around(one: str, other: str) -> tuple[str, str]:
    """Both texts from shortly before they differ."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, same - 30)
    return tuple(("..." if start else "") + text[start : start + _WINDOW] for text in (one, other))  # type: ignore[return-value]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
