"""Problems as the rows that verl reads.

rows with prompt, solution and columns -> parquet with data_source, prompt, ability, reward_model, extra_info
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

ABILITY = "perl"
COLUMNS = "columns"
"""Where ``extra_info`` has the columns of the data set, as JSON: rewards get them, and Parquet needs no common type."""

PLAIN = "plain"
"""Where ``extra_info`` says whether the prompt is text, beside the columns: a data set may have one of that name."""


def write_rows(problems: "Dataset", path: Path, source: str, split: str) -> None:
    """Writes problems for verl.

    Args:
        problems: With ``prompt`` (text or chat messages) and perhaps ``solution``.
        path: The file.
        source: What the problems are called.
        split: ``train`` or ``eval``.

    Raises:
        DataError: A column holds what is no JSON, so that no reward function could get it.
    """
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    rows = list(_rows(problems, source, split))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def _rows(problems: "Dataset", source: str, split: str) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(problems):
        yield {
            "data_source": source,
            "prompt": messages(row["prompt"]),
            "ability": ABILITY,
            "reward_model": {"style": "rule", "ground_truth": row.get("solution") or ""},
            "extra_info": {
                "index": index,
                "split": split,
                PLAIN: isinstance(row["prompt"], str),
                COLUMNS: _as_json(row, split),
            },
        }


def messages(prompt: Any) -> list[dict[str, str]]:  # noqa: ANN401 (text or messages)
    """A prompt as chat messages; a plain text is one of the user, which a template without words gives back."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _as_json(row: Mapping[str, Any], split: str) -> str:
    try:
        return json.dumps(dict(row), ensure_ascii=False)
    except TypeError as error:
        what = f"a column cannot be handed to verl's workers: {error}"
        raise DataError(what, f"data.{split}", "text, numbers, lists and mappings can") from None
