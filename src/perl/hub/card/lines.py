"""Where a card differs from the card that its files give, as text.

card, card rendered again -> a line for each difference, with the file that says otherwise

Empty lines do not count, and a front matter that holds the same values may be laid out in another way: the Hub and
other versions of its library write YAML of their own.
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

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
_TEMPLATE = "this version of perl"
_TITLE = "# "
# The file that a part of the card comes from, by the beginning of its key in the front matter or of its heading...
_PARTS = {
    "base_model": CONFIG,
    "license": RUN_FACTS,
    "datasets": PUBLIC_RECIPE,
    "tags": RUN_FACTS,
    "model-index": SCORES,
    _TITLE: RUN_FACTS,
    "## Results": SCORES,
    "## Learning curves": SCORES,
    "## Use it": CONFIG,
    "## Training": RUN_FACTS,
    "## Limitations": SCORES,
    "## Citation": RUN_FACTS,
}
# ... and of single lines that come from another file than the part they stand in.
_LINES = {
    "On ": SCORES,
    "| data |": PUBLIC_RECIPE,
    "| mean reward, first and last step |": METRICS,
    "| KL to the teacher, first and last step |": METRICS,
    "| tokens, prompts included |": METRICS,
    "- It was trained ": RUN_FACTS,
    '{"hint": ': PUBLIC_RECIPE,
    '{"system_prompt": ': PUBLIC_RECIPE,
}
_PART = re.compile(r"(?P<key>[\w-]+):|## ")


@dataclass(frozen=True)
class _Line:
    """A line of a card.

    Attributes:
        number: From 1.
        text: Of the line.
        key: Of the front matter, in which it stands; empty: it stands below the front matter.
        source: The file that says it, if it stands in the card that the files give.
    """

    number: int
    text: str
    key: str
    source: str


def differences(card: str, expected: str) -> list[Mistake]:
    """Every difference, as ``README.md:12: says ..., metrics.jsonl says ...``.

    Args:
        card: As it was found; its front matter is plain YAML.
        expected: As its files give it.
    """
    there, right = list(_lines(card)), list(_lines(expected))
    if len(there) > 4 * len(right) + 1000:
        return [Mistake(f"has {len(there):,} lines, its files give {len(right):,}", CARD, AGAIN)]
    if _same_metadata(card, expected):
        there, right = ([line for line in lines if not line.key] for lines in (there, right))
    found: list[Mistake] = []
    ours, theirs = ([line.text for line in lines] for lines in (right, there))
    for kind, first, last, begin, end in difflib.SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes():
        if kind != "equal":
            before = there[min(first, len(there) - 1)].number if there else 1
            found += [_difference(*pair, before) for pair in zip_longest(there[first:last], right[begin:end])]
    if len(found) > MOST_LINES:
        more = Mistake(f"and {len(found) - MOST_LINES:,} more lines differ", CARD, AGAIN)
        return [*found[:MOST_LINES], more]
    return found


def _lines(card: str) -> Iterator[_Line]:
    """The lines that are not empty, without the dashes around the front matter."""
    match = FRONT_MATTER.match(card)
    last = match[0].count("\n") if match else 0
    part = ""
    for number, text in enumerate(card.split("\n"), 1):
        begun = _PART.match(text)
        if number == last:
            part = _TITLE
        elif begun and (number < last) == (begun["key"] is not None):
            part = begun["key"] or text
        if text.strip() and number not in (1, last):
            sources = [file for start, file in _LINES.items() if number > last and text.startswith(start)]
            sources += [file for start, file in _PARTS.items() if part.startswith(start)]
            yield _Line(number, text.rstrip(" \t\r"), part if number < last else "", [*sources, _TEMPLATE][0])


def _same_metadata(card: str, expected: str) -> bool:
    """Whether two front matters hold the same values, each key once."""
    one, other = (match[1] if (match := FRONT_MATTER.match(text)) else "" for text in (card, expected))
    return not _repeats(yaml.compose(one, Loader=PlainLoader)) and bool(plain_value(one) == plain_value(other))


def _repeats(node: yaml.Node | None) -> bool:
    """Whether a key stands twice in any mapping: readers of YAML differ in which of the values they take."""
    if isinstance(node, yaml.MappingNode):
        keys = [str(key.value) for key, _ in node.value]
        return len(set(keys)) < len(keys) or any(_repeats(inner) for _, inner in node.value)
    return isinstance(node, yaml.SequenceNode) and any(map(_repeats, node.value))


def _difference(found: _Line | None, wanted: _Line | None, before: int) -> Mistake:
    """Lines that stand for each other, one of which may be absent; ``before`` is where the absent one would be."""
    if found is not None and wanted is not None:
        one, other = _around(found.text, wanted.text)
        message = f"says “{shown(one, _WINDOW)}”, {wanted.source} says “{shown(other, _WINDOW)}”"
    elif found is not None:
        message = f"says “{shown(found.text.strip(), _WINDOW)}”, which no file says"
    else:
        message = f"lacks “{shown(wanted.text.strip(), _WINDOW)}”, which {wanted.source} says" if wanted else ""
    key = next((line.key for line in (found, wanted) if line is not None and line.key), "")
    where = f"{CARD}:{found.number if found else before}"
    return Mistake(message, f"{where}: {shown(key)}" if key else where, AGAIN)


def _around(one: str, other: str) -> tuple[str, str]:
    """Both texts from shortly before they differ."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, same - 30)
    before, after = (("..." if start else "") + text[start : start + _WINDOW].strip() for text in (one, other))
    return before, after
