"""Is what a page shows what its commands print?

output, lines that are shown -> the lines that were not found, in order

What differs from one machine to the next counts as alike: seconds, times, speeds, hashes, folders of the checkout.
Where a policy was trained or asked so do numbers that are near each other, since another processor rounds otherwise.
"""

import re
from collections.abc import Iterable, Sequence

from tests.conftest import CHECKOUT

GAP = "..."
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# What libraries remark while they are imported is no output of ours; how many cores there are is the machine's.
REMARK = re.compile(r"^(Failed to load |[IWE]\d{4} \d\d:\d\d:\d\d)|\[PRL320\]$")
# Of another machine's run they are others.
_CHANGING = (
    (re.compile(rf"{re.escape(str(CHECKOUT))}|/\S*/site-packages/perl\b"), "CHECKOUT"),
    (re.compile(r"\b\d+:\d\d(?::\d\d)?\b"), "TIME"),
    (re.compile(r"\b[\d.]+ s\b"), "TIME"),
    (re.compile(r"\b[\d,.]+ tokens/s"), "SPEED"),
    (re.compile(r"\b(?=\w*\d)[0-9a-f]{7,64}\b"), "HASH"),
    (re.compile(r"\b\d+\.\d+\.\d+(?:\+\w+)?(?![\d.])"), "VERSION"),
    (re.compile(r"\b[\d,]+ bytes"), "BYTES"),
)
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
# Numbers of a policy that was trained elsewhere: within a tenth, or one (token, completion), or 0.2 with a fraction (a
# reward, an error).
_SHARE, _ONE, _OF_A_FRACTION = 0.1, 1.0, 0.2


def missing(output: str, shown: Sequence[str], *, learned: bool) -> list[str]:
    """The first group of lines that the output lacks; empty: it has all of them, in their order.

    Args:
        output: What the commands printed.
        shown: What the page shows: the first line is the first that is printed and the last the last one, unless a gap
            is there.
        learned: The numbers are those of a trained policy.
    """
    lines = _ANSI.sub("", output).replace("\r", "\n").splitlines()
    printed = [_plain(line) for line in lines if not REMARK.search(line)]
    groups, at = _groups(shown), 0
    for number, group in enumerate(groups):
        wanted = [_plain(line) for line in group]
        places: Iterable[int] = range(at, len(printed))
        if number == 0 and not _is_gap(shown[0]):
            places = [0]
        if number == len(groups) - 1 and not _is_gap(shown[-1]):
            places = [place for place in places if place == len(printed) - len(group)]
        found = next((i for i in places if _begins(printed[i:], wanted, learned=learned)), None)
        if found is None:
            return group
        at = found + len(group)
    return []


def _groups(shown: Sequence[str]) -> list[list[str]]:
    """Lines that stand together, between lines that are left out."""
    groups: list[list[str]] = [[]]
    for line in shown:
        if _is_gap(line):
            groups.append([])
        else:
            groups[-1].append(line)
    return [group for group in groups if group]


def _is_gap(line: str) -> bool:
    return line.strip() == GAP


def _plain(line: str) -> str:
    for pattern, name in _CHANGING:
        line = pattern.sub(name, line)
    return " ".join(line.split())


def _begins(lines: Sequence[str], wanted: Sequence[str], *, learned: bool) -> bool:
    return len(lines) >= len(wanted) and all(
        _alike(line, want, learned=learned) for line, want in zip(lines, wanted, strict=False)
    )


def _alike(line: str, want: str, *, learned: bool) -> bool:
    if not learned:
        return re.fullmatch(_pattern(want), line) is not None
    match = re.fullmatch(f"({_NUMBER.pattern})".join(_pattern(text) for text in _NUMBER.split(want)), line)
    return match is not None and all(
        abs(_value(one) - _value(other)) <= max(_OF_A_FRACTION if "." in other else _ONE, _SHARE * abs(_value(other)))
        for one, other in zip(match.groups(), _NUMBER.findall(want), strict=True)
    )


def _pattern(text: str) -> str:
    """Of a text in which dots, with the spaces around them, stand for anything."""
    return ".*?".join(re.escape(part) for part in re.split(r" ?\.\.\. ?", text))


def _value(number: str) -> float:
    return float(number.replace(",", ""))
