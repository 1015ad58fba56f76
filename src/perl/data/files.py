"""The rows of a file of JSON, JSON lines, CSV or Parquet, with every value as it is written there.

path, columns of answers -> Dataset; columns of any values -> Dataset
"""

import csv
import io
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]

from perl.errors import DataError

Named = Collection[str | None]
"""Columns by name; None: there is no such column."""
# Kinds of values whose text Python would change: 0.1 of 32 bits is 0.10000000149011612, and bytes are b'7'.
_TEXT_BY_ARROW = {pyarrow.float16(), pyarrow.float32(), pyarrow.binary(), pyarrow.large_binary()}


class _Json(datasets.Json):
    """Values as JSON: those of different kinds, objects with different keys. The library's own rounds numbers."""

    def decode_example(self, example_data: str | None, *_: object, **__: object) -> Any:  # noqa: ANN401
        return None if example_data is None else json.loads(example_data)


class _Written(str):
    """A number as it is written, which has no quotation marks within a list either."""

    __slots__ = ()
    __repr__ = str.__str__


_AS_WRITTEN: dict[str, Any] = dict.fromkeys(("parse_int", "parse_float", "parse_constant"), _Written)
_SHAPES = "a file is a list of objects, or one object on each line"


def read_data_file(path: Path, answers: Named, where: str) -> datasets.Dataset:
    """The rows of a file.

    Args:
        path: Ends in .jsonl, .json, .csv or .parquet.
        answers: Columns that may hold answers, which become text: digits as they are written. Of a CSV file any other
            column is text too, unless it holds only numbers or truth values as Python writes them.
        where: What the user named it in.

    Raises:
        DataError: It is absent, empty or broken.
    """
    if not path.is_file():
        hint = "" if path.is_absolute() else f"in {Path.cwd()}, nor beside a recipe that names it"
        raise DataError(f"no such file: {path}", where, hint)
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty", where)
    try:
        if path.suffix.lower() == ".parquet":
            table = pyarrow.parquet.read_table(path)
            for i, name in enumerate(table.column_names):
                table = table.set_column(i, name, _exact(table[name])) if name in answers else table
            return datasets.Dataset(table)
        return rows_of_texts([read_text(path)], answers, "," if path.suffix.lower() == ".csv" else None)
    except (csv.Error, pyarrow.ArrowException, ValueError, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}", where) from error


def rows_of_texts(texts: Sequence[str], answers: Named, between: str | None) -> datasets.Dataset:
    """The rows of files of one kind, one after another.

    Args:
        texts: What stands in each.
        answers: As of :func:`read_data_file`.
        between: What stands between two cells of a line; None: they are JSON or JSON lines.

    Raises:
        ValueError: One is broken; csv.Error likewise.
    """
    if between is not None:
        columns = _columns(row for text in texts for row in _csv_rows(text, between))
        return as_dataset({name: cells if name in answers else _as_numbers(cells) for name, cells in columns.items()})
    columns = _columns(row for text in texts for row in _json_rows(text))
    if named := [name for name in columns if name in answers]:
        written = _columns(row for text in texts for row in _json_rows(text, **_AS_WRITTEN))
        columns |= {name: [None if value is None else str(value) for value in written[name]] for name in named}
    return as_dataset(columns)


def as_dataset(columns: Mapping[str, Sequence[Any]]) -> datasets.Dataset:
    """A data set that gives every value back as it is, whatever else is in its column.

    Args:
        columns: Values of JSON, a name each.
    """
    return _dataset(pyarrow.table({name: _array(values) for name, values in columns.items()}))


def beside(rows: datasets.Dataset, others: datasets.Dataset) -> datasets.Dataset:
    """The columns of two data sets of as many rows."""
    return _dataset(datasets.concatenate_datasets([rows, others], axis=1).data)


def _dataset(table: Any) -> datasets.Dataset:  # noqa: ANN401 (Arrow's, or the library's)
    features = datasets.Features.from_arrow_schema(table.schema)
    kept = {name: _Json() if isinstance(found, datasets.Json) else found for name, found in features.items()}
    return datasets.Dataset(table, info=datasets.DatasetInfo(features=datasets.Features(kept)))


def texts_of(rows: datasets.Dataset, column: str) -> list[str | None]:
    """A column's values as text; None where there is none."""
    if rows.data.column(column).type in _TEXT_BY_ARROW:
        return _exact(rows.data.column(column)).to_pylist()
    return [None if value is None else str(value) for value in rows[column]]


def _exact(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    return column.cast(pyarrow.string()) if column.type in _TEXT_BY_ARROW else column


def _array(values: Sequence[Any]) -> pyarrow.Array:
    """The values, as JSON where Arrow would change one: it fills objects with each other's keys."""
    with suppress(pyarrow.ArrowException, OverflowError):  # different kinds, or integers of more than 64 bits
        array = pyarrow.array(values)
        given = () if pyarrow.types.is_string(array.type) else array.to_pylist()
        if all(repr(value) == repr(own) for value, own in zip(given, values, strict=False)):
            return array
    return pyarrow.array([None if value is None else json.dumps(value) for value in values], pyarrow.json_())


def read_text(path: Path) -> str:
    """A file of UTF-8, or ValueError that says where it is not."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line}, byte {error.start + 1} of the file: not UTF-8; save it as UTF-8") from None
    if "\0" in text:
        raise ValueError("it looks like UTF-16; save it as UTF-8")
    return text


def _csv_rows(text: str, between: str) -> Iterator[dict[str, str]]:
    csv.field_size_limit(sys.maxsize)  # a worked solution may be long
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True, delimiter=between)
    names = reader.fieldnames or [""]
    mark = next((mark for mark in ";\t|" if mark in names[0] and mark != between), None)
    if mark is not None and len(names) == 1:
        raise ValueError(f"the names of its columns stand between {mark!r}; write commas")
    if len(set(names)) < len(names):
        raise ValueError(f"two columns have one name: {', '.join(names)}")
    for row in reader:
        if None in row or None in row.values():
            raise ValueError(f"line {reader.line_num} has not as many cells as there are columns, {len(names)}")
        yield {name: cell for name, cell in row.items() if name}  # the index of a table has none


def _as_numbers(cells: list[str]) -> list[Any]:
    """Cells as numbers or truth values, if that is all they say, and an empty one as None; else as they are."""
    for kind in (int, float, {"True": True, "False": False}.__getitem__):
        with suppress(ValueError, KeyError):
            values = [kind(cell) if cell else None for cell in cells]
            known = [(value, cell) for value, cell in zip(values, cells, strict=True) if value is not None]
            if known and all(str(value) == cell and value * 0 == 0 for value, cell in known):  # not nan, not inf
                return values
    return cells


def _columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    rows = list(rows)
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _json_rows(text: str, **numbers: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 (of json.loads)
    """The objects of a list, or of one on each line."""
    whole = text.lstrip().startswith("[")
    for number, part in enumerate([text] if whole else text.split("\n"), start=1):
        if not part.strip():
            continue
        try:
            found = json.loads(part, **numbers)
        except json.JSONDecodeError as error:
            line = error.lineno if whole else number
            what = f"line {line}, column {error.colno}: {error.msg}"
            with suppress(ValueError):
                what = f"it is one object, of {', '.join(json.loads(text))}"
            raise ValueError(f"{what}; {_SHAPES}") from None
        for i, row in enumerate(found if whole else [found], start=1):
            if not isinstance(row, dict):
                place = f"number {i}" if whole else f"line {number}"
                raise ValueError(f"{place}: not an object but {row!r:.40}; {_SHAPES}")
            yield row
