"""Which columns of somebody's data hold question and gold answer, and what is held out of it.

name or mapping -> ``data.train`` and ``data.eval`` as a recipe has them
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from perl.data import read_source
from perl.errors import DataError, Mistake, PerlError, RecipeError, did_you_mean, raise_all
from perl.recipe.sections import DATA_FILE_SUFFIXES, DataSection, DataSource
from perl.recipe.validation import checked
from perl.sandbox import is_sandbox

QUESTIONS = ("prompt", "question", "problem", "query", "instruction", "messages", "input")
ANSWERS = ("answer", "final_answer", "gold_answer", "gold", "solution", "target", "label")
"""Names of columns that are taken for question and gold answer, the first that a data set has."""
_ROLES = ("train", "eval")
_HELD_OUT = "data.eval"


def sources_of(data: str | Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """``train`` and perhaps ``eval``, each as it was given, with its name.

    Args:
        data: A name, a mapping as ``data.train`` has it, or one of the two.

    Raises:
        RecipeError: It is none of these.
    """
    if isinstance(data, str):
        data = {"train": data}
    elif not isinstance(data, Mapping):
        raise RecipeError(
            f"must be a name or a mapping, not {data!r}", "data", "my.jsonl, or {'train': ..., 'eval': ...}"
        )
    elif "train" not in data and "eval" not in data:
        data = {"train": data}
    raise_all(RecipeError, [_not_taken(str(key)) for key in data.keys() - set(_ROLES)])
    if data.get("train") is None:
        raise RecipeError("is required", "data.train")
    named = {role: _named(data[role]) for role in _ROLES if data.get(role) is not None}
    try:
        checked(DataSection, named)
    except RecipeError as error:
        raise error.moved(lambda where: f"data.{where}") from None
    raise_all(RecipeError, [mistake for role, source in named.items() for mistake in _not_of_hub(source, role)])
    return named


def _not_taken(key: str) -> Mistake:
    near = did_you_mean(key, _ROLES)
    hint = near if near.startswith("did ") else "train and eval are; write it into the recipe afterwards"
    return Mistake("is not taken here", f"data.{key}", hint)


def _not_of_hub(source: Mapping[str, Any], role: str) -> Iterator[Mistake]:
    """What a file or the sandbox has not."""
    name = source["name"]
    sandbox = is_sandbox(name)
    if sandbox or Path(name).suffix in DATA_FILE_SUFFIXES:
        for key in ("subset", "split", "revision", *(("columns",) if sandbox else ())):
            if source.get(key) is not None:
                what = "has columns of its own" if key == "columns" else f"has no {key}, as a Hub data set has"
                yield Mistake(f"{name} {what}", f"data.{role}.{key}", "leave it out")


def _named(source: object) -> Any:  # noqa: ANN401 (checked by its model)
    if isinstance(source, str):
        return {"name": source}
    return dict(source) if isinstance(source, Mapping) else source


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


def guessed_question(rows: Dataset) -> str | None:
    """The column of the question: one of a usual name, else the only one that holds chat messages."""
    chats = [name for name in rows.column_names if _is_chat(rows[0][name])]
    return guessed(QUESTIONS, rows.column_names) or (chats[0] if len(chats) == 1 else None)


def _is_chat(value: Any) -> bool:  # noqa: ANN401 (a cell)
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in value)
    )


def check_question(rows: Dataset, column: str | None) -> None:
    """Refuses chat messages that hold the answer, which the policy would be asked with.

    Raises:
        DataError: The first row's end with the assistant's.
    """
    value: Any = rows[0][column] if column in rows.column_names else None
    if _is_chat(value) and value[-1]["role"] == "assistant":
        message = f"the messages of {column!r} end with the assistant's answer, and a prompt ends with the question"
        raise DataError(message, "prompt", "a column without the last message, and a column with the gold answer")


def with_columns(source: Mapping[str, Any], prompt: str | None, answer: str | None, *, judged: bool) -> dict[str, Any]:
    """A source with the columns of question and answer.

    Args:
        source: As ``data.train``; columns that it names stay.
        prompt: Column of the question; None: the first usual one, or the one with chat messages.
        answer: Of the answer; None: the first usual one.
        judged: Whether gold answers are needed.

    Raises:
        DataError: The data has no such column, or none of a usual name; or takes none.
    """
    asked = {"prompt": prompt, "answer": answer}
    given = source.get("columns", {})
    for role, name in asked.items():
        if name is not None and is_sandbox(source["name"]):
            raise DataError(f"{source['name']} has columns of its own", role, "leave it out")
        if name is not None and role in given:
            raise DataError(f"{name!r} is said twice", role, f"data.train.columns.{role} is {given[role]!r}")
    if is_sandbox(source["name"]):
        return dict(source)
    rows = rows_of(source)
    known = list(rows.column_names)
    question = given["prompt"] if "prompt" in given else check_column(prompt, known, "prompt")
    question = guessed_question(rows) if question is None else question
    if question is None:
        raise DataError("which column holds the question?", "prompt", f"there are {', '.join(known)}")
    check_question(rows, question)
    others = [name for name in known if name != question]
    gold = given.get("answer") if "answer" in given or answer is None else check_column(answer, known, "answer")
    gold = guessed(ANSWERS, others) if gold is None and "answer" not in given else gold
    if gold is None and judged:
        hint = f"there are {', '.join(known)}; or a reward of your own, package.module:function"
        raise DataError("which column holds the gold answer?", "answer", hint)
    return {**source, "columns": {"prompt": question, "answer": gold}}


def check_column(asked: str | None, known: Sequence[str], role: str) -> str | None:
    """The column that is asked for, if any.

    Raises:
        DataError: The data has no such column.
    """
    if asked is not None and asked not in known:
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
    if given is not None:
        return _given_held_out(train.get("columns"), given)
    columns = train.get("columns")
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


def _given_held_out(columns: Mapping[str, Any] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """With the columns of the training problems where it has them, else those of usual names."""
    if is_sandbox(given["name"]):
        return dict(given)
    rows = rows_of(given, _HELD_OUT)
    known = rows.column_names
    own = given.get("columns", {})
    if columns is not None and not own and all(name is None or name in known for name in columns.values()):
        return {**given, "columns": dict(columns)}
    question = own.get("prompt") or guessed_question(rows)
    gold = own["answer"] if "answer" in own else guessed(ANSWERS, [name for name in known if name != question])
    if question is None or (gold is None and "answer" not in own):
        lacking = "question" if question is None else "gold answer"
        named = [name for name in (columns or {}).values() if name is not None]
        hint = f"there are {', '.join(known)}" + (f"; the training data has {', '.join(named)}" if named else "")
        raise DataError(f"which column holds the {lacking}?", _HELD_OUT, hint)
    try:
        check_question(rows, question)
    except DataError as error:
        raise error.moved(lambda _: _HELD_OUT) from None
    return {**given, "columns": {"prompt": question, "answer": gold}}
