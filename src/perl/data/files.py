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

from perl.errors import DataError, first_line, warn

Named = Collection[str | None]
"""Columns by name; None: there is no such column. Of a mapping those whose value is false keep lists and objects."""
# Kinds of values whose text Python would change: 0.1 of 32 bits is 0.10000000149011612, and bytes are b'7'.
_TEXT_BY_ARROW = {pyarrow.float16(), pyarrow.float32(), pyarrow.binary(), pyarrow.large_binary()}
_LISTS = (pyarrow.types.is_list, pyarrow.types.is_large_list, pyarrow.types.is_fixed_size_list)


class _Json(datasets.Json):
    """Values as JSON: those of different kinds, objects with different keys. The library's own rounds numbers."""

    def decode_example(self, example_data: str | None, *_: object, **__: object) -> Any:  # noqa: ANN401
        return None if example_data is None else json.loads(example_data)


class _Written(str):
    """A number as it is written, which has no quotation marks within a list either."""

    __slots__ = ()
    __repr__ = str.__str__


def _constant(word: str) -> _Written | None:
    """Infinity as it is written; NaN, which a table has where a number is missing, as None."""
    return None if word == "NaN" else _Written(word)


_AS_WRITTEN = {"parse_int": _Written, "parse_float": _Written, "parse_constant": _constant}
_SHAPES = "a file is a list of objects, or one object on each line"


def read_data_file(path: Path, answers: Named, where: str) -> datasets.Dataset:
    """The rows of a file.

    Args:
        path: Ends in .jsonl, .json, .csv or .parquet.
        answers: Columns that hold answers or questions, which become text: digits as they are written, but for chat
            messages. Of a CSV file any other column is text too, unless it holds only numbers or truth values as Python
            writes them.
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
            return _parquet_rows(path, answers, where)
        return rows_of_texts([read_text(path)], answers, "," if path.suffix.lower() == ".csv" else None)
    except (csv.Error, pyarrow.ArrowException, ValueError, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}", where) from error


def _parquet_rows(path: Path, answers: Named, where: str) -> datasets.Dataset:
    """The columns that a data set can hold, those of answers exact."""
    table, left = pyarrow.parquet.read_table(path), []
    for name in table.column_names:
        try:
            datasets.Features.from_arrow_schema(pyarrow.schema([table.schema.field(name)]))
        except ValueError as error:
            if name in answers:
                raise
            left.append(f"{name} ({first_line(error)})")
            table = table.drop_columns([name])
    if left:
        warn("PRL311", "%s: %s leaves columns out: %s", where, path, "; ".join(left))
    for i, name in enumerate(table.column_names):
        if name not in answers:
            continue
        texts = _column_texts(name, _texts(table[name]), answers)
        if all(text is None or isinstance(text, str) for text in texts):
            table = table.set_column(i, name, pyarrow.array(texts, pyarrow.string()))
    return datasets.Dataset(table)


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
        columns |= {name: _column_texts(name, written[name], answers) for name in named}
    return as_dataset(columns)


def as_dataset(columns: Mapping[str, Sequence[Any]]) -> datasets.Dataset:
    """A data set that gives every value back as it is, whatever else is in its column.

    Args:
        columns: Values of JSON, a name each.
    """
    arrays = {}
    for name, values in columns.items():
        with suppress(pyarrow.ArrowException, OverflowError):  # different kinds, or integers of more than 64 bits
            array = pyarrow.array(values)
            given = () if pyarrow.types.is_string(array.type) else array.to_pylist()
            if all(repr(value) == repr(own) for value, own in zip(given, values, strict=False)):
                arrays[name] = array
                continue
        # Arrow would change a value: it fills objects with each other's keys.
        as_json = [None if value is None else json.dumps(value) for value in values]
        arrays[name] = pyarrow.array(as_json, pyarrow.json_())
    return _dataset(pyarrow.table(arrays))


def beside(rows: datasets.Dataset, others: datasets.Dataset) -> datasets.Dataset:
    """The columns of two data sets of as many rows."""
    return _dataset(datasets.concatenate_datasets([rows, others], axis=1).data)


def _dataset(table: Any) -> datasets.Dataset:  # noqa: ANN401 (Arrow's, or the library's)
    features = datasets.Features.from_arrow_schema(table.schema)
    kept = {name: _Json() if isinstance(found, datasets.Json) else found for name, found in features.items()}
    return datasets.Dataset(table, info=datasets.DatasetInfo(features=datasets.Features(kept)))


def texts_of(rows: datasets.Dataset, column: str) -> list[str | None]:
    """A column's values as text; None where there is none."""
    held = rows.data.column(column)
    values = _texts(held) if _exact_type(held.type) != held.type else rows[column]
    return [_as_text(value) for value in values]


def _texts(column: pyarrow.ChunkedArray) -> list[Any]:
    """An Arrow column's values, as text where Python would change them."""
    kind = _exact_type(column.type)
    values = column.cast(kind).to_pylist()
    if kind == column.type:
        return values
    return [None if value == "nan" else _unquoted(value) for value in values]  # of a number, which is missing


def _column_texts(name: str, values: Sequence[Any], answers: Named) -> list[Any]:
    keeps = isinstance(answers, Mapping) and not answers[name]
    return [value if keeps and isinstance(value, list | dict) else _as_text(value) for value in values]


def _as_text(value: Any) -> str | None:  # noqa: ANN401 (of a cell)
    """A cell as text; a list of one is that one."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return None if value is None or value != value else str(value)  # NaN: a number is missing


def _unquoted(value: Any) -> Any:  # noqa: ANN401
    """Texts within lists and objects as numbers are written there."""
    if isinstance(value, list):
        return [_unquoted(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _unquoted(one) for key, one in value.items()}
    return _Written(value) if isinstance(value, str) else value


def _exact_type(kind: pyarrow.DataType) -> pyarrow.DataType:
    """The type of the same values as text where Python would change them, within lists and objects too."""
    if any(of(kind) for of in _LISTS):
        return pyarrow.list_(_exact_type(kind.value_type))
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([(one.name, _exact_type(one.type)) for one in kind])
    return pyarrow.string() if kind in _TEXT_BY_ARROW else kind


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
