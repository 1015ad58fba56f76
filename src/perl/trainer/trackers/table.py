"""Rows of a log as a table with columns.

rows of samples.jsonl or alarms.jsonl -> Table
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LEFT_OUT = ("tokens", "gaps")
_LONGEST_CELL = 4000
"""Characters of a cell in a text; longer ones make a page of many rows too slow to scroll."""


@dataclass(frozen=True)
class Table:
    """Columns and rows; cells are text, numbers, booleans or None."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def by_column(self) -> dict[str, list[Any]]:
        """Column -> its cells."""
        return {name: [row[i] for row in self.rows] for i, name in enumerate(self.columns)}

    def markdown(self) -> str:
        """The table as Markdown, long cells cut off."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(map(_in_cell, line))} |" for line in lines)


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The table of a log's rows.

    A mapping inside a row, as that of rewards, becomes a column for each of its names; a list becomes JSON. Tokens and
    their gaps, which are several times as long as the completion, stay in the file.
    """
    flat = [_flat({name: value for name, value in row.items() if name not in _LEFT_OUT}) for row in rows]
    columns = tuple(dict.fromkeys(name for row in flat for name in row))
    return Table(columns, tuple(tuple(row.get(name) for name in columns) for row in flat))


def _flat(row: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{above}{name}/")
        elif isinstance(value, list):
            found[f"{above}{name}"] = json.dumps(value, ensure_ascii=False)
        else:
            found[f"{above}{name}"] = value
    return found


def _in_cell(value: Any) -> str:  # noqa: ANN401 (of any cell)
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    text = text if len(text) <= _LONGEST_CELL else f"{text[:_LONGEST_CELL]} ..."
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
