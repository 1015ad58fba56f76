"""Which columns of somebody's data hold question and gold answer, and what is held out of it.

name or mapping -> ``data.train`` and ``data.eval`` as a recipe has them
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from perl.data import read_source
from perl.errors import DataError, PerlError, did_you_mean
from perl.recipe.sections import DATA_FILE_SUFFIXES, DataSource
from perl.recipe.validation import checked
from perl.sandbox import is_sandbox

QUESTIONS = ("prompt", "question", "problem", "query", "instruction", "messages", "input")
ANSWERS = ("answer", "final_answer", "gold_answer", "gold", "solution", "target", "label")
"""Names of columns that are taken for question and gold answer, the first that a data set has."""


def sources_of(data: str | Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """``train`` and perhaps ``eval``, each with its name.

    Args:
        data: A name, a mapping as ``data.train`` has it, or one of the two.
    """
    if isinstance(data, str):
        return {"train": {"name": data}}
    if "train" not in data:
        return {"train": _named(data)}
    return {role: _named(data[role]) for role in ("train", "eval") if data.get(role) is not None}


def _named(source: str | Mapping[str, Any]) -> dict[str, Any]:
    return {"name": source} if isinstance(source, str) else dict(source)


def rows_of(source: Mapping[str, Any], where: str = "data.train") -> Dataset:
    """The rows of a source as they are.

    Raises:
        PerlError: It cannot be read, or has none.
    """
    rows, _ = read_source(checked(DataSource, source), "eval" if where.endswith("eval") else "train", where)
    if not len(rows):
        raise DataError(f"{source['name']} is empty", where)
    return rows


def guessed(usual: Iterable[str], known: Sequence[str]) -> str | None:
    """The first usual name of a column that there is."""
    return next((name for name in usual if name in known), None)


def with_columns(source: Mapping[str, Any], prompt: str | None, answer: str | None, *, judged: bool) -> dict[str, Any]:
    """A source with the columns of question and answer.

    Args:
        source: As ``data.train``.
        prompt: Column of the question; None: the first usual one.
        answer: Of the answer; None: likewise.
        judged: Whether gold answers are needed.

    Raises:
        DataError: The data has no such column, or none of a usual name.
    """
    if is_sandbox(source["name"]) or "columns" in source:
        return dict(source)
    known = list(rows_of(source).column_names)
    question = _column(prompt, QUESTIONS, known, "prompt")
    if question is None:
        raise DataError("which column holds the question?", "prompt", f"there are {', '.join(known)}")
    gold = _column(answer, ANSWERS, [name for name in known if name != question], "answer")
    if gold is None and judged:
        hint = f"there are {', '.join(known)}; or a reward of your own, package.module:function"
        raise DataError("which column holds the gold answer?", "answer", hint)
    return {**source, "columns": {"prompt": question, "answer": gold}}


def _column(asked: str | None, usual: Iterable[str], known: Sequence[str], role: str) -> str | None:
    if asked is None:
        return guessed(usual, known)
    if asked not in known:
        hint = did_you_mean(asked, known)
        raise DataError(f"the data has no column {asked!r}", role, hint or f"there are {', '.join(known)}")
    return asked


def held_out_of(train: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The held-out problems that are given, else a Hub data set's own split ``test``; None: there are none.

    Args:
        train: With its columns, which count for the other set too where it has them.
        given: As ``data.eval``.

    Raises:
        DataError: What is given cannot be read, or has no columns of question and answer.
    """
    columns = train.get("columns")
    if given is not None:
        if is_sandbox(given["name"]) or "columns" in given:
            return dict(given)
        known = rows_of(given, "data.eval").column_names
        has_them = columns is not None and all(name is None or name in known for name in columns.values())
        return {**given, "columns": columns} if has_them else with_columns(given, None, None, judged=True)
    name = train["name"]
    if is_sandbox(name) or Path(name).suffix in DATA_FILE_SUFFIXES or not columns or columns["answer"] is None:
        return None
    own = {key: train[key] for key in ("name", "subset", "revision") if train.get(key) is not None}
    own |= {"split": "test", "columns": columns}
    try:
        rows_of(own, "data.eval")
    except PerlError:
        return None
    return own
