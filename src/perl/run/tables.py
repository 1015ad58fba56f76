"""Tables as text: for a terminal, in Markdown, in HTML, as CSV or JSON; and which settings of several columns differ.

rows of cells -> text; recipes as plain values -> key -> text; texts of several -> the keys that are not the same

What others wrote (names, notes, methods) is made harmless for the place it is shown in.
"""

import base64
import csv
import hashlib
import html
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jinja2 import Environment

Value = str | int | float | None

DASH = "-"
"""What a run has that has not the key."""
NOTHING = {DASH, "none", "{}", "[]"}
"""Texts of a setting that stand for none."""


class TableCell(NamedTuple):
    """A value, and how people read it."""

    value: Value
    text: str


Row = Mapping[str, TableCell]
"""Column -> cell; a column that the row lacks is unknown."""
UNKNOWN = TableCell(None, DASH)
_MARKDOWN = re.compile(r"([\\|<>\[\]*`&])")
# A spreadsheet takes a text that begins so for a formula.
_FORMULA = ("=", "+", "-", "@")


def plain(text: object) -> str:
    """A text on one line, without characters that steer a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def in_markdown(text: object) -> str:
    """A text that means itself in Markdown."""
    return _MARKDOWN.sub(r"\\\1", plain(text))


def fact_cell(value: Value) -> TableCell:
    """A cell with a fact; what is None is unknown."""
    if value is None:
        return UNKNOWN
    return TableCell(value, f"{value:,.0f}" if isinstance(value, int | float) else value)


def printed(
    rows: Sequence[Row], columns: Sequence[str] | None = None, style: str | None = None, *, in_marks: bool = False
) -> str:
    """The rows of a table as text.

    Args:
        rows: In order.
        columns: To show; None: those that are known of any row.
        style: ``markdown``, ``html``, ``csv`` (values unrounded) or ``json`` (likewise); None: for a terminal.
        in_marks: The cells are Markdown themselves.
    """
    names = known_columns(rows) if columns is None else columns
    cells, right = cells_of(rows, names), to_the_right(rows, names)
    texts = [list(names), *([cell.text for cell in line] for line in cells)]
    if style == "json":
        return json.dumps(as_records(rows, names), indent=2)
    if style == "csv":
        return csv_text(names, [[cell.value for cell in line] for line in cells])
    if style == "html":
        return html_table([list(map(plain, line)) for line in texts], right)
    if style == "markdown":
        shown = [[text.replace("|", "\\|") if in_marks else in_markdown(text) for text in line] for line in texts]
        return "\n".join(markdown_table(shown, right))
    return "\n".join(plain_table(texts, right))


def known_columns(rows: Sequence[Row], columns: Sequence[str] | None = None) -> list[str]:
    """The columns, of all or of some, that are known of any row."""
    names = dict.fromkeys(name for row in rows for name in row) if columns is None else columns
    return [name for name in names if any(row.get(name, UNKNOWN) != UNKNOWN for row in rows)]


def cells_of(rows: Sequence[Row], columns: Sequence[str]) -> list[list[TableCell]]:
    """The cells of some columns, row by row."""
    return [[row.get(name, UNKNOWN) for name in columns] for row in rows]


def to_the_right(rows: Sequence[Row], columns: Sequence[str]) -> list[bool]:
    """Of each column whether it holds numbers."""
    return [any(isinstance(row.get(name, UNKNOWN).value, int | float) for row in rows) for name in columns]


def as_records(rows: Sequence[Row], columns: Sequence[str] | None = None) -> list[dict[str, Value]]:
    """For JSON; without columns all that is known of each row."""
    return [{name: row.get(name, UNKNOWN).value for name in columns or row} for row in rows]


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
    for row in rows:
        cells = [plain(value) if isinstance(value, str) else value for value in row]
        is_formula = [isinstance(cell, str) and cell.startswith(_FORMULA) for cell in cells]
        writer.writerow([f"'{cell}" if risky else cell for cell, risky in zip(cells, is_formula, strict=True)])
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
