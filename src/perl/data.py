"""Problems from the sandbox, local files or the Hub, as prompts with gold answers; checked before training.

DataSection -> ProblemSet (columns: prompt, solution, and every column of the data set); rows, tokenizer -> Prompts
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import datasets
import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
from huggingface_hub import constants

from perl.errors import DataError, Mistake, did_you_mean, raise_all
from perl.policy.hub_files import look_up
from perl.recipe.sections import DATA_FILE_SUFFIXES, DataSection, DataSource
from perl.run.files import sha256_of
from perl.sandbox import is_sandbox, load_problems
from perl.sandbox.tasks import Problem
from perl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Names that a row of ours has, or that TRL hands on to no reward: a column of the data set that is called so is stored
# under another name, and reaches custom rewards under its own.
OF_ROWS = frozenset({"prompt", "solution", "completion"})
# What TRL calls its own arguments of a reward function: such a column has another name there too.
OF_TRL = {
    "completions",
    "completion_ids",
    "prompts",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
}
TAKEN_NAMES = OF_ROWS | OF_TRL
ORIGINAL = "original_"
"""Begins the name of a column of the data set whose own name means something else to a reward function."""

# Characters of what the Hub's library says when it cannot load a data set: it lists the subsets or splits that exist.
_LONGEST_CAUSE = 1000
_LONGEST_VALUE = 40

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
    """

    train: datasets.Dataset
    heldout: datasets.Dataset | None
    heldout_name: str | None
    train_version: str | None = None
    heldout_version: str | None = None
    renamed: tuple[str, ...] = ()
    own_names: Mapping[str, str] = field(default_factory=dict)


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
    train, train_version, names = _load(section.train, "train", section, chat)
    renamed, own = _renamed(names, section.train, "data.train"), _own_names(names)
    source = _heldout(section)
    if source is None:
        return ProblemSet(train, None, None, train_version, renamed=renamed, own_names=own)
    heldout, version, names = _load(source, "eval", section, chat)
    train = _without_overlap(train, heldout, drop=section.drop_overlap)
    renamed, own = (*renamed, *_renamed(names, source, "data.eval")), {**_own_names(names), **own}
    return ProblemSet(train, heldout, heldout_name(section), train_version, version, renamed, own)


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
) -> tuple[datasets.Dataset, str | None, dict[str, str]]:
    """One set, read, mapped and checked, its version, and under which name each column is stored."""
    where = f"data.{role}"
    raw, version = read_source(source, role, where)
    if len(raw) == 0:
        raise DataError(f"{source.name} is empty", where)
    if source.limit is not None:
        raw = raw.select(range(min(source.limit, len(raw))))
    _check_columns(raw, source, section, where)
    names = _kept_names(raw.column_names, source)
    rows = [_row(raw[i], names, source, section, chat) for i in range(len(raw))]
    _check_rows(rows, source, where)
    return datasets.Dataset.from_list(rows), version, names


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
        return datasets.Dataset.from_list([_sandbox_row(problem) for problem in problems]), None
    path = Path(source.name).expanduser()
    if path.suffix in DATA_FILE_SUFFIXES:
        return read_data_file(path, (source.columns.answer,), where), sha256_of(path)
    wanted = source.split or ("train" if role == "train" else "test")

    def instead(found: Mistake | None) -> str:
        local = f"a local file ends in {', '.join(DATA_FILE_SUFFIXES)}" if found else ""
        return "; ".join(filter(None, [found.hint if found else "", local, "sandbox:addition needs no network"]))

    return load_hub_rows(source.name, source.subset, wanted, source.revision, where, instead)


def _sandbox_row(problem: Problem) -> dict[str, Any]:
    """A problem of the sandbox as a row; of tasks that have levels, with its level."""
    level = {} if problem.level is None else {"level": problem.level}
    return {"prompt": problem.question, "answer": problem.answer, **level}


def read_data_file(path: Path, answers: Collection[str | None], where: str) -> datasets.Dataset:
    """The rows of a file of JSON, JSON lines, CSV or Parquet.

    Args:
        path: Ends in one of the suffixes.
        answers: Columns that may hold answers, which stay text.
        where: What the user named it in.

    Raises:
        DataError: It is absent, empty or broken.
    """
    if not path.is_file():
        hint = "" if path.is_absolute() else f"in {Path.cwd()}: a path begins where the command runs"
        raise DataError(f"no such file: {path}", where, hint)
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty", where)
    try:
        if path.suffix in {".jsonl", ".json"}:
            return datasets.Dataset.from_list(_json_rows(path, answers))
        if path.suffix == ".parquet":
            return datasets.Dataset(pyarrow.parquet.read_table(path))
        _check_separator(path)
        return datasets.load_dataset("csv", data_files=str(path), split="train")
    except (datasets.exceptions.DatasetGenerationError, pyarrow.ArrowException, ValueError, OSError) as error:
        if "corresponds to no data" in str(error):
            raise DataError(f"{path} is empty", where) from None
        raise DataError(f"{path} cannot be read: {error.__cause__ or error}", where) from error


def _check_separator(path: Path) -> None:
    """Refuses a file without a comma whose first line is several names between other marks."""
    with path.open(encoding="utf-8", errors="replace") as file:
        names = file.readline()
    mark = next((mark for mark in ";\t|" if mark in names), None)
    if mark is not None and "," not in names:
        raise ValueError(f"the names of its columns stand between {mark!r}; write commas")


def _json_rows(path: Path, answers: Collection[str | None]) -> list[dict[str, Any]]:
    """The objects of a JSON or JSON-lines file, answers as text, which Arrow would take for dates or round."""
    text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    rows = _whole_json(text) if path.suffix == ".json" else list(_json_lines(text))
    return [{k: str(v) if k in answers and v is not None else v for k, v in row.items()} for row in rows]


def _whole_json(text: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        lines = "; objects on lines of their own are a .jsonl file" if error.msg == "Extra data" else ""
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}{lines}") from None
    if not isinstance(rows, list):
        raise ValueError("not a list of objects")
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"not a list of objects: {_short(row)} is number {i + 1}")
    return rows


def _json_lines(text: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            whole = "; a list over several lines is a .json file" if number == 1 and line.strip() in "[{" else ""
            raise ValueError(f"line {number}, column {error.colno}: {error.msg}{whole}") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number}: not an object but {_short(row)}")
        yield row


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def load_hub_rows(
    name: str,
    subset: str | None,
    split: str,
    revision: str | None,
    where: str,
    instead: Callable[[Mistake | None], str],
) -> tuple[datasets.Dataset, str | None]:
    """A split of a data set on the Hub, or in its cache where ``HF_HUB_OFFLINE`` is set.

    Args:
        name: ``user/name``.
        subset: Of its configurations; None: the only one.
        split: As the data set calls it.
        revision: Branch, tag or commit; None: the main branch.
        where: What the user named, for errors.
        instead: What the Hub answers, None once it has the data set -> what the user can do.

    Returns:
        The rows and the commit that they are from; None: the Hub was not asked.

    Raises:
        DataError: There is no such data set, subset or split, or it cannot be loaded.
    """
    commit = look_up("dataset", name, revision)
    if isinstance(commit, Mistake):
        raise DataError(commit.message, where, instead(commit))
    try:
        return datasets.load_dataset(name, subset, split=split, revision=commit or revision), commit
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # unknown subsets or splits too
        offline = "HF_HUB_OFFLINE is set, so only what is cached can be loaded; " if constants.HF_HUB_OFFLINE else ""
        cause = " ".join(str(error).split())[:_LONGEST_CAUSE]
        raise DataError(f"{name} cannot be loaded: {cause}", where, f"{offline}{instead(None)}") from error


_OR_NONE = {"prompt": "", "answer": "; null: there is none, and nothing judges answers"}


def _check_columns(raw: datasets.Dataset, source: DataSource, section: DataSection, where: str) -> None:
    problems = []
    for role, column in (("prompt", source.columns.prompt), ("answer", source.columns.answer)):
        if column is not None and column not in raw.column_names:
            hint = did_you_mean(column, raw.column_names)
            problems.append(
                Mistake(
                    f"{source.name} has no column {column!r}, it has {', '.join(raw.column_names)}",
                    f"{where}.columns.{role}",
                    hint if hint.startswith("did") else f"name the column that holds the {role}{_OR_NONE[role]}",
                )
            )
    raise_all(DataError, problems)
    if section.prompt_template is not None:
        try:
            section.prompt_template.format_map({**raw[0], "prompt": ""})
        except (KeyError, ValueError, IndexError) as error:
            raise DataError(
                f"the template cannot be filled: {error!r}",
                "data.prompt_template",
                f"names in braces: prompt, {', '.join(raw.column_names)}; write {{{{ for a brace",
            ) from None


def _kept_names(columns: Sequence[str], source: DataSource) -> dict[str, str]:
    """Under which name each column of a data set is stored; one that is there already is left out.

    The question under the name ``prompt`` is ``prompts`` to rewards, the answer under the name ``solution`` is that.
    """
    names = {}
    for column in columns:
        as_it_is = {"prompt": source.columns.prompt, "solution": source.columns.answer}.get(column) == column
        taken = column in TAKEN_NAMES and not (column == "solution" and source.columns.answer is None)
        if not as_it_is:
            names[column] = _free(ORIGINAL + column, columns) if taken else column
    return names


def _free(name: str, columns: Sequence[str]) -> str:
    """The name, or one like it that no column has."""
    return name if name not in columns else _free(ORIGINAL + name, columns)


def _renamed(names: Mapping[str, str], source: DataSource, where: str) -> tuple[str, ...]:
    """A line on the columns that have another name to every reward; none if there are none."""
    renamed = ", ".join(f"{column} as {name}" for column, name in names.items() if column in OF_TRL)
    return (f"{where}: reward functions get the columns {renamed} ({source.name} has TRL's names)",) if renamed else ()


def _own_names(names: Mapping[str, str]) -> dict[str, str]:
    """Of what :func:`_kept_names` says, the columns that custom rewards get under their own names."""
    return {column: name for column, name in names.items() if column in OF_ROWS and column != name}


def _row(
    raw: Mapping[str, Any], names: Mapping[str, str], source: DataSource, section: DataSection, chat: bool
) -> dict[str, Any]:
    """One problem in the trainer's form; the data set's own columns stay for the user's reward functions."""
    question = "" if source.columns.prompt is None else raw[source.columns.prompt]
    row = {name: raw[column] for column, name in names.items()}
    if isinstance(question, str):
        text = (section.prompt_template or "{prompt}").format_map({**raw, "prompt": question})
        row["prompt"] = [{"role": "user", "content": text}] if chat else text
    elif section.prompt_template is not None:
        raise DataError("does nothing to prompts that are chat messages", "data.prompt_template", "leave it out")
    else:
        row["prompt"] = question
    if section.system_prompt and isinstance(row["prompt"], list):
        row["prompt"] = [{"role": "system", "content": section.system_prompt}, *row["prompt"]]
    if source.columns.answer is not None:
        answer = raw[source.columns.answer]
        row["solution"] = None if answer is None else str(answer)
        if source.columns.answer in names:  # text under its own name too, whatever the file's format makes of it
            row[names[source.columns.answer]] = row["solution"]
    return row


def _check_rows(rows: list[dict[str, Any]], source: DataSource, where: str) -> None:
    mistakes = empty_cells([not prompt_text(row["prompt"]).strip() for row in rows], "question", source.name, where)
    if source.columns.answer is not None:
        mistakes += empty_cells([not (row["solution"] or "").strip() for row in rows], "answer", source.name, where)
    raise_all(DataError, mistakes)


def empty_cells(empty: Sequence[bool], what: str, source: str, where: str) -> list[Mistake]:
    """One mistake if some rows of a data set lack a question or an answer, with their number and the first of them."""
    if not any(empty):
        return []
    message = f"{sum(empty)} of {len(empty)} rows of {source} have no {what}, first row {empty.index(True) + 1}"
    return [Mistake(message, where)]


def prompt_text(prompt: Any) -> str:  # noqa: ANN401 (text or messages, as the data set holds them)
    """The words of a prompt, whichever form it has; what two equal prompts have in common."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return "\n".join(str(message.get("content") or "") for message in prompt if isinstance(message, Mapping))
    return ""


def _without_overlap(train: datasets.Dataset, heldout: datasets.Dataset, *, drop: bool) -> datasets.Dataset:
    """The training rows whose prompt is not held out; unless they may be dropped, such a row is an error."""
    held = {" ".join(prompt_text(prompt).split()) for prompt in heldout["prompt"]}
    same = [i for i, prompt in enumerate(train["prompt"]) if " ".join(prompt_text(prompt).split()) in held]
    if not same:
        return train
    if not drop:
        example = prompt_text(train[same[0]]["prompt"])
        raise DataError(
            f"{len(same)} training prompts are also held out, e.g. {example[:60]!r}",
            "data.eval",
            "set data.drop_overlap: true to drop them from training",
        )
    kept = sorted(set(range(len(train))) - set(same))
    if not kept:
        raise DataError("every training prompt is also held out", "data.eval", "use another set")
    return train.select(kept)


def render_prompts(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    template_arguments: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """Prompts with their token ids.

    Args:
        rows: With ``prompt`` (text or chat messages) and perhaps ``solution``.
        tokenizer: The base's; its chat template renders messages up to where the completion begins.
        template_arguments: Further arguments of the chat template, as ``chat_template_kwargs`` holds them.
    """
    return [_render(row, tokenizer, template_arguments or {}) for row in rows]


def _render(
    row: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase", template_arguments: Mapping[str, Any]
) -> Prompt:
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return Prompt(prompt, tuple(tokenizer(text=prompt)["input_ids"]), row.get("solution"))
    encoded = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **template_arguments
    )
    return Prompt(tuple(prompt), tuple(encoded["input_ids"]), row.get("solution"))
