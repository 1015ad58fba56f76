"""Which columns of somebody's data hold question and gold answer, and what is held out of it.

name or mapping -> ``data`` as a recipe has it
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from perl.data import Role, read_source
from perl.errors import DataError, PerlError, RecipeError
from perl.recipe.sections import DATA_FILE_SUFFIXES, DataSection, DataSource
from perl.recipe.validation import checked
from perl.sandbox import is_sandbox

QUESTIONS = ("prompt", "question", "problem", "query", "instruction", "messages", "input")
ANSWERS = ("answer", "final_answer", "gold_answer", "gold", "solution", "target", "label")
"""Names of columns that are taken for question and gold answer, the first that a data set has."""


def data_section(data: str | Mapping[str, Any], columns: Mapping[str, str], *, judged: bool) -> dict[str, Any]:
    """The section with the columns of question and answer; of a Hub data set its split ``test`` is held out.

    Args:
        data: A name, a mapping as ``data.train`` has it, or as ``data``.
        columns: ``prompt`` and ``answer`` -> the column, as far as somebody has named it.
        judged: Whether gold answers are needed.

    Raises:
        PerlError: It cannot be read, or has no columns of usual names.
    """
    if not isinstance(data, str | Mapping):
        raise RecipeError(f"must be a name or a mapping, not {data!r:.60}", "data", "my.jsonl, or {'train': ...}")
    given: Mapping[str, Any] = {"train": data}
    if isinstance(data, Mapping) and not {"train", "eval"}.isdisjoint(data):
        given = data
    section = {name: {"name": part} if isinstance(part, str) else part for name, part in given.items()}
    try:
        checked(DataSection, section)
    except RecipeError as error:
        raise error.moved(lambda where: f"data.{where}") from None
    train = section["train"] = _with_columns(section["train"], "train", columns, judged=judged)
    if section.get("eval") is not None:
        section["eval"] = _with_columns(section["eval"], "eval", train.get("columns", {}), judged=True)
    elif held_out := _test_split(train):
        section["eval"] = held_out
    return {**section, "drop_overlap": True} if "eval" in section else section


def _with_columns(
    source: Mapping[str, Any], role: Role, wanted: Mapping[str, str | None], *, judged: bool
) -> dict[str, Any]:
    """A source with the columns of question and answer: its own, the wanted ones, else those of usual names."""
    where, own = f"data.{role}", source.get("columns", {})
    if is_sandbox(source["name"]):
        if role == "train" and (own or wanted):
            raise DataError(f"{source['name']} has columns of its own", f"{where}.columns", "leave them out")
        return dict(source)
    rows, _ = read_source(checked(DataSource, source), role, where)
    known = rows.column_names
    if role == "eval":  # which may have other columns than what is trained on
        wanted = {name: column for name, column in wanted.items() if column in known}
    columns = {**own, **wanted}
    question = columns.get("prompt") or _guessed(QUESTIONS, known) or _only_chat(rows)
    gold = columns["answer"] if "answer" in columns else _guessed(ANSWERS, [name for name in known if name != question])
    there = f"there are {', '.join(known)}"
    if question is None:
        raise DataError("which column holds the question?", f"{where}.columns.prompt", there)
    _check_question(rows, question, where)
    if gold is None and judged and "answer" not in columns:
        raise DataError("which column holds the gold answer?", f"{where}.columns.answer", there)
    return {**source, "columns": {"prompt": question, "answer": gold}}


def _guessed(usual: Iterable[str], known: Sequence[str]) -> str | None:
    return next((name for name in usual if name in known), None)


def _only_chat(rows: Dataset) -> str | None:
    """The only column that holds chat messages."""
    chats = [name for name in rows.column_names if _is_chat(rows[0][name])]
    return chats[0] if len(chats) == 1 else None


def _is_chat(value: Any) -> bool:  # noqa: ANN401 (a cell)
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) and "role" in one for one in value)


def _check_question(rows: Dataset, column: str, where: str) -> None:
    """Refuses chat messages that hold the answer, which the policy would be asked with."""
    value: Any = rows[0][column] if column in rows.column_names else None
    if _is_chat(value) and value[-1]["role"] == "assistant":
        message = f"the messages of {column!r} end with the assistant's answer, and a prompt ends with the question"
        hint = "a column without the last message, and a column with the gold answer"
        raise DataError(message, f"{where}.columns.prompt", hint)


def _test_split(train: Mapping[str, Any]) -> dict[str, Any] | None:
    """The split ``test`` of a Hub data set, where it has one and gold answers."""
    columns = train.get("columns", {})
    if is_sandbox(train["name"]) or Path(train["name"]).suffix in DATA_FILE_SUFFIXES or columns["answer"] is None:
        return None
    own = {key: train[key] for key in ("name", "subset", "revision") if train.get(key) is not None}
    own |= {"split": "test", "columns": columns}
    try:
        read_source(checked(DataSource, own), "eval", "data.eval")
    except PerlError:
        return None
    return own
