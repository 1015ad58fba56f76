"""Which columns of somebody's data hold question and gold answer, what is held out, and a new recipe's comments.

name or mapping -> ``data`` as a recipe has it
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import yaml
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from perl.data import ORIGINAL, Role, checked_prompt, read_source
from perl.errors import DataError, PerlError, RecipeError, visible
from perl.recipe.plain_yaml import PlainDumper
from perl.recipe.sections import DataSection, DataSource, as_share, is_data_file
from perl.recipe.settings_list import shown_value
from perl.recipe.validation import checked
from perl.sandbox import is_sandbox

QUESTIONS = ("prompt", "question", "problem", "query", "instruction", "messages", "input")
ANSWERS = ("answer", "final_answer", "gold_answer", "gold", "solution", "target", "label")
"""Names of columns that are taken for question and gold answer, the first that a data set has."""
# Where a worked solution stands, the gold answer last: some are the end of one.
_WORKED, _LOOKED_AT = (f"{ORIGINAL}solution", "rationale", "reasoning", "explanation", "solution"), 512
_COLUMN, _WIDTH = 32, 118
# Of a file of at least so many problems, percent that are held out.
_FEWEST, _SHARE = 50, 10
_COMMENTS = {
    "model.name": "Hub id or folder; loaded once, never written",
    "model.dtype": "of the base; the adapter is float32",
    "peft.method": "`perl methods` lists the others",
    "peft.rank": "of the update B A of each linear layer",
    "peft.alpha": "the update is multiplied by alpha / rank",
    "data.eval": "of these are held out: base and adapter are scored on them",
    "data.eval.name": "held out: base and adapter are scored on them",
    "data.drop_overlap": "what is held out is not trained on",
    "data.prompt_template": "around each question",
    "subset": "of the data set's configurations",
    "split": "of the data set",
    "revision": "commit, tag or branch",
    "limit": "the first rows only",
    "prompt": "holds the question",
    "answer": "holds the gold answer; null: your reward judges without",
    "rewards": "weight in the sum",
    "train.num_generations": "of each prompt; they are compared with each other",
    "train.learning_rate": "usual for a LoRA on a model of this width",
    "train.lr_scheduler_type": "or linear, cosine, ...",
    "train.beta": "weight of the KL divergence to the base; 0.01 keeps it close",
    "train.fp16": "this GPU has no bfloat16; the loss is scaled",
    "train.bf16": "see fp16",
    "train.save_steps": "between two checkpoints; the same command goes on from one",
    "rollout.backend": "transformers, or vllm where it is installed: faster for long answers",
    "agent.environment": "its public methods are the tools",
    "agent.max_turns": "of the policy in a conversation",
    "eval.enabled": "there are no gold answers to score with",
    "eval.k": "completions of each held-out problem, by base and adapter",
    "eval.limit": "the first held-out problems; null: all",
    "eval.batch_size": "completions written at a time",
    "engine.device": "auto takes a GPU if there is one",
}


def data_section(data: str | Mapping[str, Any], columns: Mapping[str, str], *, judged: bool) -> dict[str, Any]:
    """The section with the columns of question and answer, and with problems that are held out where there are some.

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
    held: Mapping[str, Any] = section.get("eval") or {}
    if held and as_share(held.get("name", "10%")) is not None:  # a share of what is trained on
        return {**section, "eval": held.get("name", held)}
    if section.get("eval") is not None:
        section["eval"] = _with_columns(section["eval"], "eval", train.get("columns", {}), judged=True)
    elif not is_sandbox(train["name"]) and train["columns"]["answer"] is not None:
        if is_data_file(train["name"]):  # a share of one that is long enough
            rows, _ = read_source(checked(DataSource, train), "train", "data.train")
            section |= {"eval": f"{_SHARE}%"} if len(rows) >= _FEWEST else {}
        else:  # the split ``test`` of a Hub data set, if it has one
            own = {key: train[key] for key in ("name", "subset", "revision") if train.get(key) is not None}
            own |= {"split": "test", "columns": train["columns"]}
            with suppress(PerlError):
                read_source(checked(DataSource, own), "eval", "data.eval")
                section["eval"] = own
    return {**section, "drop_overlap": True} if isinstance(section.get("eval"), dict) else section


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
    question = columns.get("prompt") or _guessed(QUESTIONS, known)
    if question is None:
        lists = {name: cell for name, cell in rows[0].items() if isinstance(cell, list) and cell} if len(rows) else {}
        roles = {name: [isinstance(one, Mapping) and "role" in one for one in cell] for name, cell in lists.items()}
        chats = [name for name, has_role in roles.items() if all(has_role)]
        question = chats[0] if len(chats) == 1 else None
    gold = columns["answer"] if "answer" in columns else _guessed(ANSWERS, [name for name in known if name != question])
    there = f"there are {', '.join(known)}" if known else f"{source['name']} is empty"
    if question is None:
        raise DataError("which column holds the question?", f"{where}.columns.prompt", there)
    if question in known:
        checked_prompt(rows[0][question], "row 1", f"{where}.columns.prompt")
    if gold is None and judged and "answer" not in columns:
        raise DataError("which column holds the gold answer?", f"{where}.columns.answer", there)
    return {**source, "columns": {"prompt": question, "answer": gold}}


def _guessed(usual: Iterable[str], known: Sequence[str]) -> str | None:
    return next((there for name in usual for there in known if there.casefold() == name), None)


def worked_tokens(problems: Dataset, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of half as much again as the data's worked solutions, but for the longest twentieth; 0: it has none."""
    column = _guessed(_WORKED, problems.column_names)
    texts = [str(text or "") for text in problems[:_LOOKED_AT][column]] if column is not None else [""]
    lengths = sorted(map(len, tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]))
    return 64 * -(-3 * lengths[(19 * len(lengths) - 1) // 20] // (2 * 64))


def recipe_text(values: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """The file.

    Args:
        values: The recipe.
        notes: What is said of keys in this recipe, by ``section.key``; of "" the head.
    """
    lines = []
    for paragraph in notes[""].splitlines():
        lines += textwrap.wrap(f"# {visible(paragraph)}", _WIDTH, subsequent_indent="# ") or ["#"]
    for section, inside in values.items():
        lines += ["", f"{section}:", *_lines(inside, (section,), {**_COMMENTS, **notes})]
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Any], above: tuple[str, ...], comments: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * len(above)
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _lines(value, (*above, key), comments)
            continue
        names = (".".join((*above, key)), *((key,) if above[0] == "data" else above[:1]))
        comment = next((comments[name] for name in names if name in comments), "")
        shown = shown_value(value)
        if isinstance(value, str) and ("\n" in value or "\\" in value or not value.isascii()):
            shown = yaml.dump(
                value, Dumper=PlainDumper, default_style='"', allow_unicode=True, width=float("inf")
            ).strip()
        elif isinstance(value, float) and 0 < value < 0.01:
            shown = f"{value:.0e}".replace("e-0", "e-")
        begin = f"{indent}{key}: {shown}"
        line = f"{begin.ljust(_COLUMN)}  # {comment}"
        if comment and len(line) > _WIDTH:
            yield f"{indent}# {comment}:"
        yield line if comment and len(line) <= _WIDTH else begin
