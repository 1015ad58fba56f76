"""Columns as text: for a terminal, in Markdown, in HTML, as CSV; and which settings of several columns differ.

headings and cells -> lines; recipes as plain values -> key -> text; texts of several -> the keys that are not the same

What others wrote (names, notes, methods) is made harmless for the place it is shown in.
"""

import base64
import csv
import hashlib
import html
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

Value = str | int | float | None

DASH = "-"
"""What a run has that has not the key."""
NOTHING = {DASH, "none", "{}", "[]"}
"""Texts of a setting that stand for none."""
_MARKDOWN = re.compile(r"([\\|<>\[\]*`&])")
# A spreadsheet takes a text that begins so for a formula.
_FORMULA = ("=", "+", "-", "@")


def plain(text: object) -> str:
    """A text on one line, without characters that steer a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def in_markdown(text: object) -> str:
    """A text that means itself in Markdown."""
    return _MARKDOWN.sub(r"\\\1", plain(text))


def plain_table(rows: Sequence[Sequence[str]], right: Sequence[bool] | None = None) -> list[str]:
    """Lines of a table for a terminal.

    Args:
        rows: Cells, the headings first where there are any.
        right: Which columns are aligned to the right; None: all but the first.
    """
    lines = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.rjust if r else str.ljust for r in _sides(right, len(widths))]
    return [
        "  ".join(side(cell, width) for cell, width, side in zip(line, widths, sides, strict=True)).rstrip()
        for line in lines
    ]


def markdown_table(rows: Sequence[Sequence[str]], right: Sequence[bool] | None = None) -> list[str]:
    """Lines of a table in Markdown; arguments as of :func:`plain_table`, the cells in Markdown."""
    rule = ["---:" if r else "---" for r in _sides(right, len(rows[0]))]
    lines = [rows[0], rule, *rows[1:]]
    return ["| " + " | ".join(line) + " |" for line in lines]


def html_table(rows: Sequence[Sequence[str]], right: Sequence[bool] | None = None) -> str:
    """A table in HTML, whose cells may hold anything.

    Args:
        rows: Cells, the headings first.
        right: As of :func:`plain_table`.
    """
    sides = ["right" if r else "left" for r in _sides(right, max(map(len, rows)))]
    cells = (
        "".join(
            f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
            for cell, side in zip(row, sides, strict=False)
        )
        for row, tag in zip(rows, ["th", *["td"] * len(rows)], strict=False)
    )
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def csv_text(headings: Sequence[str], rows: Sequence[Sequence[Value]]) -> str:
    """A CSV file; what is not known is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows([_csv_cell(value) for value in row] for row in rows)
    return out.getvalue()


def percent(share: float | None) -> str:
    """A share in percent with one decimal, ``46.6``, or a dash."""
    return "-" if share is None else f"{100 * share:.1f}"


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


def flat(value: Any, path: str = "") -> dict[str, str]:  # noqa: ANN401 (YAML)
    """``{"train": {"seed": 1}}`` -> ``{"train.seed": "1"}``.

    Args:
        value: A mapping, or what stands in one.
        path: At which key.
    """
    if not isinstance(value, Mapping) or not value:
        return {path: as_text(value)} if path else {}
    found: dict[str, str] = {}
    for key, inner in value.items():
        found |= flat(inner, f"{path}.{key}" if path else str(key))
    return found


def as_text(value: Any) -> str:  # noqa: ANN401 (JSON, YAML)
    """A setting for a person to read."""
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def differing(columns: Sequence[Mapping[str, str]], *, all_rows: bool = False) -> dict[str, list[str]]:
    """Key -> its text in each column, of the keys that are not the same in all; a dash where a column has it not.

    A setting that one has at nothing and another has not is none. A column that is empty, as a script has no recipe, is
    left out of the comparison.

    Args:
        columns: Key -> text.
        all_rows: Those that are the same in all, too.
    """
    found = {}
    for key in dict.fromkeys(key for column in columns for key in column):
        values = {column.get(key, DASH) for column in columns if column}
        if all_rows or (len(values) > 1 and not values <= NOTHING):
            found[key] = [column.get(key, DASH) for column in columns]
    return found


def html_templates(folder: Path) -> "Environment":
    """The templates of a folder: what stands in them is escaped, and a name that nobody gave is an error.

    Their filters: ``plain``, and ``hash``, by which a content security policy names a script or a style.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(folder)
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"plain": plain, "hash": _policy_hash}
    return found


def _policy_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _sides(right: Sequence[bool] | None, columns: int) -> Sequence[bool]:
    return [i > 0 for i in range(columns)] if right is None else right


def _csv_cell(value: Value) -> Value:
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text.startswith(_FORMULA) else text
