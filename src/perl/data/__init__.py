"""Problems from the sandbox, local files or the Hub, as prompts with gold answers; checked before training.

DataSection -> ProblemSet (columns: prompt, solution, and every column of the data set)
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import datasets

from perl.data.files import as_dataset, beside, texts_of
from perl.data.files import read_data_file as read_data_file
from perl.data.hub import load_hub_rows as load_hub_rows
from perl.data.hub import split_rows as split_rows
from perl.data.overlap import normalised, same
from perl.data.prompts import checked_prompt as checked_prompt
from perl.data.prompts import conversation
from perl.data.prompts import prompt_text as prompt_text
from perl.data.prompts import render_prompts as render_prompts
from perl.data.prompts import thinking_arguments as thinking_arguments
from perl.errors import DataError, Mistake, did_you_mean, raise_all
from perl.recipe.sections import DATA_FILE_SUFFIXES, DataSection, DataSource, is_data_file
from perl.run.files import sha256_of
from perl.sandbox import is_sandbox, load_problems

# Names that a row of ours has, or that TRL hands on to no reward: a column of the data set that is called so is stored
# under another name, and reaches custom rewards under its own.
OF_ROWS = frozenset({"prompt", "solution", "completion"})
# What TRL calls its own arguments of a reward function: such a column has another name there too.
OF_TRL = {"prompts", "completions", "completion_ids", "trainer_state", "environments"} | {"log_extra", "log_metric"}
TAKEN_NAMES = OF_ROWS | OF_TRL
ORIGINAL = "original_"
"""Begins the name of a column of the data set whose own name means something else to a reward function."""

Role = Literal["train", "eval"]


@dataclass(frozen=True)
class ProblemSet:
    """The problems of a recipe.

    Attributes:
        train: Rows with ``prompt`` (text or chat messages) and, where the data has answers, ``solution`` (text).
        heldout: The same for held-out problems; None where there are none.
        heldout_name: What the held-out problems are called in results.
        train_version: Commit of a Hub data set, SHA-256 of a file; None of the sandbox, which comes with the package.
        heldout_version: Likewise.
        renamed: What became of columns whose names are TRL's arguments of a reward function, a line a set.
        own_names: Name in the data set -> where it is stored, of the columns that custom rewards get by it.
        rows: Of each training problem, its row in the data set; None: as they come.
    """

    train: datasets.Dataset
    heldout: datasets.Dataset | None
    heldout_name: str | None
    train_version: str | None = None
    heldout_version: str | None = None
    renamed: tuple[str, ...] = ()
    own_names: Mapping[str, str] = field(default_factory=dict)
    rows: Sequence[int] | None = None


def load_problem_set(section: DataSection, *, chat: bool) -> ProblemSet:
    """Reads both splits and checks them.

    Args:
        section: The recipe's ``data`` section.
        chat: Whether questions become chat messages; ``section.chat`` overrides it.

    Raises:
        DataError: A set is absent, empty, lacks a column or an answer, or the two overlap.
    """
    chat = chat if section.chat is None else section.chat
    if section.system_prompt and not chat:
        raise DataError("a system prompt needs chat messages", "data.system_prompt", "set data.chat: true")
    train, train_version, names, part = _load(section.train, "train", section, chat)
    renamed, own = _renamed(names, section.train, "data.train"), _own_names(names)
    source = _heldout(section)
    if source is None:
        return ProblemSet(train, None, None, train_version, renamed=renamed, own_names=own)
    heldout, version, names, _ = _load(source, "eval", section, chat)
    prompts, kept = [prompt_text(prompt) for prompt in train["prompt"]], None
    if repeated := same(prompts, [prompt_text(prompt) for prompt in heldout["prompt"]]):
        if not section.drop_overlap:
            what = f"{len(repeated)} training prompts are also held out, e.g. {prompts[repeated[0]][:60]!r}"
            raise DataError(what, "data.eval", "set data.drop_overlap: true to drop them from training")
        kept = sorted(set(range(len(train))) - set(repeated))
        if not kept:
            raise DataError("every training prompt is also held out", "data.eval", "use another set")
        train = train.select(kept)
    if part is not None:
        kept = part if kept is None else [part[i] for i in kept]
    renamed, own = (*renamed, *_renamed(names, source, "data.eval")), {**_own_names(names), **own}
    return ProblemSet(train, heldout, heldout_name(section), train_version, version, renamed, own, kept)


def heldout_name(section: DataSection) -> str | None:
    """What a recipe's held-out problems are called in results; None where there are none."""
    source = _heldout(section)
    if source is None:
        return None
    return source.name if is_sandbox(source.name) else simple_name(Path(source.name).stem)


def _heldout(section: DataSection) -> DataSource | None:
    return section.eval or (section.train if is_sandbox(section.train.name) else None)


def simple_name(name: str) -> str:
    """A file's name as a task may be called."""
    return re.sub(r"\.{2,}", ".", re.sub(r"[^A-Za-z0-9_.:-]+", "-", name))


def _load(
    source: DataSource, role: Role, section: DataSection, chat: bool
) -> tuple[datasets.Dataset, str | None, dict[str, str], list[int] | None]:
    """One set, read, mapped and checked, its version, how each column is stored, and its rows of the source if few."""
    where = f"data.{role}"
    raw, version = read_source(source, role, where)
    if len(raw) == 0:
        raise DataError(f"{source.name} is empty", where)
    if source.limit is not None:
        raw = raw.select(range(min(source.limit, len(raw))))
    _check_columns(raw, source, section, where)
    # The question under the name prompt is prompts to rewards, the answer under the name solution is that.
    names, there = {}, {"prompt": source.columns.prompt, "solution": source.columns.answer}
    for column in raw.column_names:
        taken = column in TAKEN_NAMES and not (column == "solution" and source.columns.answer is None)
        if there.get(column) != column:
            names[column] = _free(ORIGINAL + column, raw.column_names) if taken else column
    prompts, mistakes = _prompts(raw, source, section, chat, where)
    columns: dict[str, Any] = {"prompt": prompts}
    if (answer := source.columns.answer) is not None:
        columns["solution"] = texts_of(raw, answer)
        empty = [not (text or "").strip() for text in columns["solution"]]
        mistakes += empty_cells(empty, "answer", source.name, where)
        if answer in names:  # text under its own name too, whatever the file's format makes of it
            columns[names[answer]] = columns["solution"]
    raise_all(DataError, mistakes)
    rows = as_dataset(columns)
    if others := {column: name for column, name in names.items() if name not in columns}:
        rows = beside(raw.select_columns(list(others)).rename_columns(others), rows)
    if section.eval is None or section.eval.share is None:
        return rows, version, names, None
    part = _part(raw[source.columns.prompt] if source.columns.prompt else prompts, section.eval.share, role)
    return rows.select(part), version, names, part


def _part(questions: Sequence[Any], share: float, role: Role) -> list[int]:
    """The rows that are held out, or the others: by a hash of each question, so that copies of one stay together.

    Raises:
        DataError: One of the two parts is empty.
    """
    texts = [normalised(prompt_text(question)) for question in questions]
    held_out = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) < share * 2**64 for text in texts]
    if len(set(held_out)) < 2:
        what = f"a share of {share:g} of {len(texts)} problems holds out {'all' if held_out[0] else 'none'} of them"
        raise DataError(what, "data.eval", "another share, or a file of its own")
    return [i for i, held in enumerate(held_out) if held == (role == "eval")]


def read_source(source: DataSource, role: Role, where: str) -> tuple[datasets.Dataset, str | None]:
    """The rows of a set as they are, and its version, as in :class:`ProblemSet`.

    Args:
        source: The set.
        role: Which split it is where none is named.
        where: What the user named it in.

    Raises:
        DataError: It is absent, empty or cannot be read.
    """
    if is_sandbox(source.name):
        split: Literal["train", "heldout"] = "train" if role == "train" else "heldout"
        try:
            problems = load_problems(source.name, split)
        except DataError as error:
            raise error.moved(lambda _: where) from None
        levels = {} if problems[0].level is None else {"level": [problem.level for problem in problems]}
        asked, answers = [problem.question for problem in problems], [problem.answer for problem in problems]
        return as_dataset({"prompt": asked, "answer": answers, **levels}), None
    columns = {source.columns.prompt: False, source.columns.answer: True}
    path = Path(source.name).expanduser()
    if is_data_file(path):
        return read_data_file(path, columns, where), sha256_of(path)
    if path.is_dir():
        file = next((f", as {file}" for file in sorted(path.iterdir()) if is_data_file(file)), "")
        hint = f"name a file in it{file}; a data set of the Hub must not have the name of a folder here"
        raise DataError(f"{source.name} is a folder", where, hint)
    if path.is_file() or "://" in source.name:
        what = f"{source.name} is no data set of the Hub and no file of one of these kinds"
        raise DataError(what, where, f"save it as a file that ends in {', '.join(DATA_FILE_SUFFIXES)}")
    wanted = source.split or ("train" if role == "train" or source.share is not None else "test")
    instead = f"a local file ends in {', '.join(DATA_FILE_SUFFIXES)}; sandbox:addition needs no network"
    return load_hub_rows(source.name, source.subset, wanted, source.revision, columns, where, instead)


_OR_NONE = {"prompt": "", "answer": "; null: there is none, and nothing judges answers"}


def _check_columns(raw: datasets.Dataset, source: DataSource, section: DataSection, where: str) -> None:
    problems = []
    shown = [name if name == name.strip() else repr(name) for name in raw.column_names]
    has = ", ".join(shown)
    for role, column in (("prompt", source.columns.prompt), ("answer", source.columns.answer)):
        if column is not None and column not in raw.column_names:
            hint = did_you_mean(column, shown)
            hint = hint if hint.startswith("did") else f"name the column that holds the {role}{_OR_NONE[role]}"
            what = f"{source.name} has no column {column!r}, it has {has}"
            problems.append(Mistake(what, f"{where}.columns.{role}", hint))
    for column in ("image", "images"):  # TRL's names for what a prompt shows besides
        if column in raw.column_names and not isinstance(raw.features[column], datasets.Value):
            hint = "train in a script, whose prompts may hold images; or leave the column out of the data"
            problems.append(Mistake(f"{source.name} has images ({column}), and a recipe asks with text", where, hint))
    raise_all(DataError, problems)
    if section.prompt_template is not None:
        try:
            section.prompt_template.format_map({**raw[0], "prompt": ""})
        except (KeyError, ValueError, IndexError) as error:
            hint = f"names in braces: prompt, {has}; write {{{{ for a brace"
            raise DataError(f"the template cannot be filled: {error!r}", "data.prompt_template", hint) from None


def _free(name: str, columns: Sequence[str]) -> str:
    """The name, or one like it that no column has."""
    return name if name not in columns else _free(ORIGINAL + name, columns)


def _renamed(names: Mapping[str, str], source: DataSource, where: str) -> tuple[str, ...]:
    """A line on the columns that have another name to every reward; none if there are none."""
    renamed = ", ".join(f"{column} as {name}" for column, name in names.items() if column in OF_TRL)
    return (f"{where}: reward functions get the columns {renamed} ({source.name} has TRL's names)",) if renamed else ()


def _own_names(names: Mapping[str, str]) -> dict[str, str]:
    """Of how columns are stored, those that custom rewards get under their own names."""
    return {column: name for column, name in names.items() if column in OF_ROWS and column != name}


def _prompts(
    raw: datasets.Dataset, source: DataSource, section: DataSection, chat: bool, where: str
) -> tuple[list[Any], list[Mistake]]:
    """The prompts as the policy is asked them, all texts or all chat messages, and a mistake where some ask nothing."""
    column, template = source.columns.prompt, section.prompt_template
    rows = raw if template is not None or column is None else raw.select_columns([column])
    named = [f"row {number} of {source.name}" for number in range(1, len(rows) + 1)]
    prompts, empty = [], []
    for row, name in zip(rows, named, strict=True):
        question = "" if column is None else checked_prompt(row[column], name, f"{where}.columns.prompt")
        prompt = question
        if isinstance(question, str):
            questions = [*(shown.prompt for shown in section.examples), question]
            asked = [(template or "{prompt}").format_map({**row, "prompt": text}) for text in questions]
            prompt = conversation(asked, [shown.answer for shown in section.examples], chat=chat)
        elif question is not None and (template is not None or section.examples):
            key = "data.examples" if template is None else "data.prompt_template"
            raise DataError("does nothing to prompts that are chat messages", key, "leave it out")
        empty.append(not prompt_text(prompt if column is None else question).strip())
        if section.system_prompt and isinstance(prompt, list):
            prompt = [{"role": "system", "content": section.system_prompt}, *prompt]
            if isinstance(question, list):  # which may have a system message of its own
                prompt = checked_prompt(prompt, name, "data.system_prompt")
        prompts.append(prompt)
    other = next((i for i, prompt in enumerate(prompts) if type(prompt) is not type(prompts[0])), None)
    if other is not None and not any(empty):
        raise DataError(f"{named[0]} and {named[other]} are text and chat messages", where, "set data.chat: true")
    return prompts, empty_cells(empty, "question", source.name, where)


def empty_cells(empty: Sequence[bool], what: str, source: str, where: str) -> list[Mistake]:
    """One mistake if some rows of a data set lack a question or an answer, with their number and the first of them."""
    if not any(empty):
        return []
    message = f"{sum(empty)} of {len(empty)} rows of {source} have no {what}, first row {empty.index(True) + 1}"
    return [Mistake(message, where)]
