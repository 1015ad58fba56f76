"""What differs between the settings of several runs, as texts.

recipes as plain values -> key -> text; texts of several -> the keys that are not the same in all
"""

from collections.abc import Mapping, Sequence
from typing import Any

DASH = "-"
"""What a run has that has not the key."""
NOTHING = {DASH, "none", "{}", "[]"}
"""Texts of a setting that stand for none."""


def flat(value: Any) -> dict[str, str]:  # noqa: ANN401 (YAML)
    """``{"train": {"seed": 1}}`` -> ``{"train.seed": "1"}``."""
    found: dict[str, str] = {}
    _flatten(value, "", found)
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


def _flatten(value: Any, path: str, found: dict[str, str]) -> None:  # noqa: ANN401 (YAML)
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            _flatten(inner, f"{path}.{key}" if path else str(key), found)
    elif path:
        found[path] = as_text(value)
