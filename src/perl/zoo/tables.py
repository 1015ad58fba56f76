"""Columns as text: for a terminal, in Markdown, as CSV.

headings and cells -> lines

What others wrote (names, notes, methods) is made harmless for the place it is shown in. Knows nothing of entries.
"""

import csv
import io
import re
from collections.abc import Sequence

from perl import intervals

Value = str | int | float | None

_MARKDOWN = re.compile(r"([\\|<>\[\]*`&])")
# A spreadsheet takes a text that begins so for a formula.
_FORMULA = ("=", "+", "-", "@")


def plain(text: object) -> str:
    """A text on one line, without characters that steer a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def in_markdown(text: object) -> str:
    """A text that means itself in Markdown."""
    return _MARKDOWN.sub(r"\\\1", plain(text))


def plain_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Lines of a table for a terminal.

    Args:
        headings: One a column.
        rows: Cells.
        right: Which columns stand to the right.
    """
    lines = [[plain(cell) for cell in line] for line in (headings, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    return [
        "  ".join(
            cell.rjust(width) if r else cell.ljust(width) for cell, width, r in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    ]


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Lines of a table in Markdown, whose cells are Markdown already but for pipes in code."""
    lines = [headings, ["---:" if r else "---" for r in right], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def csv_text(headings: Sequence[str], rows: Sequence[Sequence[Value]]) -> str:
    """A CSV file; what is not known is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows([_csv_cell(value) for value in row] for row in rows)
    return out.getvalue()


def percent(share: float | None) -> str:
    """``46.6``, or a dash."""
    return "-" if share is None else intervals.percent(share)


def score_text(share: float | None, error: float | None, problems: int | None) -> str:
    """``46.6 ± 1.2``, ``100.0 [88.4, 100.0]`` where the error is 0.0, or a dash."""
    if share is None:
        return "-"
    return intervals.estimate_text(share, error, *(score_interval(share, error, problems) or (None, None)))


def score_interval(share: float, error: float | None, problems: int | None) -> tuple[float, float] | None:
    """The 95 % interval of a score; None unless its standard error and the number of problems are known."""
    if error is None or problems is None or problems < 2:
        return None
    return intervals.interval(share, error, problems)


def signed_percent(share: float | None) -> str:
    """``+5.6``, or a dash."""
    if share is None:
        return "-"
    shown = f"{100 * share:+.1f}"
    return "0.0" if float(shown) == 0 else shown


def size_text(size: int | None) -> str:
    """``75.2 MB``, or a dash."""
    if size is None:
        return "-"
    for unit, bytes_of_it in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= bytes_of_it:
            return f"{size / bytes_of_it:.1f} {unit}"
    return f"{size} B"


def _csv_cell(value: Value) -> Value:
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text.startswith(_FORMULA) else text
