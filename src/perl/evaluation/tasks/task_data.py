"""The questions of a task, and solved ones to be shown before them: from a file, a folder, the Hub or the sandbox.

Task -> rows -> questions -> TaskData
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import snapshot_download

from perl.data import checked_prompt, empty_cells, load_hub_rows, prompt_text, read_data_file, split_rows
from perl.data.overlap import same
from perl.errors import DataError, Mistake, raise_all
from perl.evaluation.scoring.choices import LETTERS, listed, right_letters
from perl.evaluation.scoring.results import is_held_out
from perl.evaluation.scoring.scorers import SCORERS
from perl.evaluation.scoring.task import MATH, Example, Question, Split, Task, TaskData, questions_hash
from perl.evaluation.tasks.heldout import heldout_questions, holds_problems_out
from perl.recipe import Recipe
from perl.rewards.answers import announced_answer, gold_answer
from perl.sandbox import is_sandbox, load_problems

_BOX = "\\boxed{"
_FINAL = re.compile(r"\n*####[^\n]*\s*\Z")


def load_task_data(
    task: Task,
    data: Path | None = None,
    limit: int | None = None,
    few_shot: int = 0,
    seed: int = 0,
    *,
    cached: bool = False,
) -> TaskData:
    """Reads the questions of a task.

    Args:
        task: Sandbox tasks and files of the user's own need neither folder nor network.
        data: Folder that holds ``task.file``, with the Hub's columns or ``problem`` and ``answer``; None: the Hub.
        limit: Only the first so many questions; None: all.
        few_shot: Examples before every question: of the split that the task names, else questions of its own, which
            are not asked then.
        seed: Decides which examples.
        cached: Instead of the Hub only what was downloaded from it at the task's revision; without a network.

    Raises:
        DataError: The data is absent, gated, unreachable, broken or empty, or a question or an answer is missing.
    """
    where = f"task {task.name}"
    if limit is not None and limit < 1:
        raise DataError(f"{limit} questions are too few", where, "at least 1")
    every, source, revision = _read(task, data, where, cached=cached)
    examples: tuple[Example, ...] = ()
    if few_shot:
        pool = every
        if task.examples is not None:
            found, _, _ = _read(_of_split(task, task.examples), data, where, cached=cached)
            asked_too = set(same([one.text for one in found], [question.text for question in every]))
            pool = tuple(one for i, one in enumerate(found) if i not in asked_too)
        chosen = choose_examples(task, pool, few_shot, seed)
        examples = tuple(example(task, question) for question in chosen)
        if task.examples is None:
            every = tuple(question for question in every if question not in chosen)
        if not every:
            raise DataError(f"examples: {few_shot}, problems left to be asked: 0", where, "fewer examples")
    asked, further = every[:limit], every[len(every[:limit]) :]
    return TaskData(task, asked, source, revision, questions_hash(asked), further, examples)


def check_examples(task: Task, limit: int | None, few_shot: int, places: tuple[str, str] | None = None) -> None:
    """Refuses examples that a task cannot have, and a limit below the pool that is set aside.

    Args:
        task: That is asked.
        limit: Of its problems; None: all.
        few_shot: Examples before each.
        places: Where the user gave limit and examples; None: the error names the task.

    Raises:
        DataError: Says which.
    """
    at_limit, at_examples = places or (f"task {task.name}",) * 2
    if few_shot and is_held_out(task.title):
        what = "held-out problems are asked as in training, without examples"
        raise DataError(what, at_examples, "leave few_shot out")
    if task.examples is None and limit is not None and limit < few_shot:
        what = f"a limit of {limit} is below the {few_shot} examples, which are set aside from the same problems"
        raise DataError(what, at_limit, f"a limit of at least {few_shot}, or fewer examples")


def check_files(task: Task, data: Path | None, few_shot: int) -> None:
    """Refuses a task whose files, that of its examples included, are not here; reads none of them.

    Args:
        task: As in :func:`load_task_data`, and so on.
        data: See there.
        few_shot: See there.

    Raises:
        DataError: Names the file.
    """
    where = f"task {task.name}"
    if task.path is not None and not Path(task.path).is_file():
        raise DataError(f"no such file: {task.file or task.path}", where)
    if task.path is not None or data is None or is_sandbox(task.repository):
        return
    _file_in(data, task, where)
    if few_shot and task.examples is not None:
        _file_in(data, _of_split(task, task.examples), where)


def choose_examples(task: Task, pool: Sequence[Question], count: int, seed: int) -> list[Question]:
    """The first of a pool in an order that the seed decides: fewer examples are the first of more.

    Args:
        task: Its name enters the order, so that two tasks do not share it.
        pool: Problems with answers.
        count: How many.
        seed: Of the evaluation.

    Raises:
        DataError: There are not as many.
    """
    if count > len(pool):
        what = f"examples asked for: {count}, problems to take them from: {len(pool)}"
        raise DataError(what, f"task {task.name}", "fewer examples")

    def place(question: Question) -> bytes:
        return hashlib.sha256(f"{seed}\n{task.name}\n{question.id}\n{question.text}".encode()).digest()

    return sorted(pool, key=place)[:count]


def example(task: Task, question: Question) -> Example:
    r"""A problem with its answer as a completion would give it.

    That is the worked solution where the data has one, else the answer as the scorer reads it. The solution ends in
    ``\boxed{}`` where the task asks for that, or the verifier would find no answer in it.

    Raises:
        DataError: The problem has no answer.
    """
    if not question.gold:
        raise DataError(f"{question.id} has no answer to be shown", f"task {task.name}", "leave few_shot out")
    if question.choices:
        return Example(question, SCORERS["choice"].shown(question.gold))
    if task.scorer != MATH:
        return Example(question, SCORERS[task.scorer].shown(question.gold) if task.scorer in SCORERS else question.gold)
    boxed = SCORERS[MATH].shown(question.gold)
    # In words: of the solution's own column, or what stands where the answer does.
    cells = [question.row.get(name) for name in ("solution", *task.answer)]
    texts = [cell.strip() for cell in cells if isinstance(cell, str)]
    worked = next((text for text in texts if text and text.strip("$") != question.gold), None)
    if worked is None:
        return Example(question, boxed)
    if _BOX in worked or (_BOX not in task.prompt and announced_answer(worked) is not None):
        return Example(question, worked)
    return Example(question, f"{_FINAL.sub('', worked)}\n{boxed}")


def _read(task: Task, data: Path | None, where: str, *, cached: bool) -> tuple[tuple[Question, ...], str, str | None]:
    """All questions of a split, what they are from, and the commit of that."""
    revision = None
    if holds_problems_out(task):
        every = heldout_questions(Recipe.of_run(str(task.path)))
        if not every:
            hint = "name their column in the recipe: data.eval"
            raise DataError("the held-out problems have no answers", where, hint)
        return every, task.repository, None
    if task.path is not None:
        source, rows = task.file, _read_file(task, Path(task.path), where)
    elif is_sandbox(task.repository):
        problems = load_problems(task.repository, "train" if task.split == "train" else "heldout")
        source, rows = task.repository, [{"problem": p.question, "answer": p.answer} for p in problems]
    elif data is not None:
        source, rows = task.file, _read_file(task, _file_in(data, task, where), where)
    elif cached:
        source, revision = task.repository, task.revision
        try:  # as it was downloaded before, without a network; of a task with no revision the main one
            folder = snapshot_download(source, repo_type="dataset", revision=revision, local_files_only=True)
            rows = [dict(row) for row in split_rows(folder, task.subset, task.split, None, ())[0]]
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise DataError(f"{source} is not here", where) from error
    else:
        source = task.repository
        instead = f"{'' if task.revision is None else '--newest-data, or '}--data DIR with {task.file}"
        found, commit = load_hub_rows(source, task.subset, task.split, task.revision, (), where, instead)
        rows, revision = [dict(row) for row in found], commit or task.revision
    if not rows:
        raise DataError(f"{source} is empty", where)
    return _questions(task, rows, source, where), source, revision


def _of_split(task: Task, split: Split) -> Task:
    """The task of another split of the same data; of a folder the file that is named after it."""
    stem = task.file.removesuffix(".jsonl").removesuffix(f"_{task.split}")
    return replace(task, split=split, file=f"{stem}_{split}.jsonl")


def question_of(task: Task, row: Mapping[str, Any], identifier: str) -> Question:
    """What a row of the data asks.

    Args:
        task: Says which columns count; the row must have them.
        row: As the data set holds it.
        identifier: The question's id.
    """
    cell, choices = checked_prompt(row[_column(task.problem, row)], identifier, f"task {task.name}"), tuple[str, ...]()
    if isinstance(cell, list) and task.prompt == "{problem}" and task.options is None:  # chat messages
        return Question(identifier, prompt_text(cell), _gold(task, row), row, prompt=tuple(cell))
    problem = prompt_text(cell) if isinstance(cell, list) else str(cell)
    if task.choices:
        right, *others = [_text(row[name]) for name in task.choices]
        # A hash of the question gives the place of the right choice, which lighteval's gpqa_instruct_prompt draws.
        place = int.from_bytes(hashlib.sha256(problem.strip().encode()).digest()) % len(task.choices)
        choices, gold = (*others[:place], right, *others[place:]), LETTERS[place]
    else:
        gold = _gold(task, row)
        choices = tuple(map(_text, row[task.options])) if task.options is not None else ()
    asked = listed(problem.strip(), choices) if choices else problem
    return Question(identifier, task.prompt.replace("{problem}", asked), gold, row, choices)


def _file_in(data: Path, task: Task, where: str) -> Path:
    folder = data.expanduser()
    if not folder.is_dir():
        raise DataError(f"no such folder: {data}", where, f"the folder that holds {task.file}")
    path = folder / task.file
    if not path.is_file():
        raise DataError(f"{data} has no file {task.file}", where, "one JSON object a line")
    return path


def _questions(task: Task, rows: Sequence[Mapping[str, Any]], source: str, where: str) -> tuple[Question, ...]:
    _check_columns(task, rows, source, where)
    ids = [_text(row.get(_column(task.identifier, row))) for row in rows]
    if not all(ids) or len(set(ids)) < len(ids):  # the data set does not name all rows, or names two alike
        ids = [str(i) for i in range(len(rows))]
    questions = tuple(question_of(task, row, name) for row, name in zip(rows, ids, strict=True))
    if task.options is not None:
        letters = right_letters([one.gold for one in questions], [one.choices for one in questions])
        if isinstance(letters, Mistake):
            raise DataError(letters.message, where, letters.hint)
        questions = tuple(replace(one, gold=letter) for one, letter in zip(questions, list(letters), strict=True))
    if task.scorer in SCORERS:  # a reward may do without an answer
        empty = empty_cells([not question.gold for question in questions], "answer", source, where)
        raise_all(DataError, empty)
    first: dict[str, int] = {}
    texts = [" ".join(question.text.split()) for question in questions]
    twice = [(first[text], i) for i, text in enumerate(texts) if first.setdefault(text, i) != i]
    if twice and task.path is not None:
        one, two = twice[0]
        message = f"rows {one + 1} and {two + 1} of {source} ask the same question: {texts[two][:60]!r}"
        raise DataError(f"{message}; {len(twice)} rows repeat an earlier one", where, "leave each in once")
    return questions


def _check_columns(task: Task, rows: Sequence[Mapping[str, Any]], source: str, where: str) -> None:
    """Refuses rows that lack a question or an answer; an absent column and an empty cell are different errors."""
    needed = {"problem": task.problem}
    if task.choices:
        needed |= {name: (name,) for name in task.choices}
    elif task.scorer in SCORERS:  # a reward may do without
        needed["answer"] = task.answer
    problems = []
    for what, candidates in needed.items():
        absent = [i for i, row in enumerate(rows) if _column(candidates, row) not in row]
        if absent:
            has = ", ".join(map(str, rows[absent[0]])) or "nothing"
            message = f"row {absent[0] + 1} of {source} has no {' or '.join(candidates)}, it has {has}"
            own = "" if task.path is None else f", as in --columns {'prompt' if what == 'problem' else what}=NAME"
            problems.append(Mistake(message, where, f"the column that holds the {what}{own}"))
        else:
            empty = [not _text(row[_column(candidates, row)]) for row in rows]
            problems += empty_cells(empty, what, source, where)
    if task.options:
        problems += _choice_mistakes(task.options, rows, source, where)
    raise_all(DataError, problems)


def _choice_mistakes(column: str, rows: Sequence[Mapping[str, Any]], source: str, where: str) -> Iterator[Mistake]:
    """The first row whose choices are no list of different texts."""
    for number, row in enumerate(rows, 1):
        cell = row.get(column)
        if not cell:
            hint = f"the column that holds the choices; there are {', '.join(map(str, row))}"
            yield Mistake(f"row {number} of {source} has no choices under {column!r}", where, hint)
            return
        texts = [" ".join(_text(choice).split()) for choice in cell] if isinstance(cell, list) else []
        if not 2 <= len(texts) <= len(LETTERS) or not all(texts) or len(set(texts)) < len(texts):
            what = f"no list of 2 to {len(LETTERS)} different texts"
            message = f"the choices of row {number} of {source} are {what}: {cell!r:.60}"
            yield Mistake(message, where, "the place in the list gives the letter")
            return


def _read_file(task: Task, file: Path, where: str) -> list[dict[str, Any]]:
    """The rows of a file, each with what it has."""
    try:
        rows = read_data_file(file, task.answer if task.path is not None else (), where)
    except DataError as error:  # which names the whole path, as the user may not have typed it
        raise error.moved(lambda _: where) from None
    return [dict(row) for row in rows]


def _column(candidates: Sequence[str], row: Mapping[str, Any]) -> str:
    """The first of these columns that a row has; the first of all where it has none."""
    return next((name for name in candidates if name in row), candidates[0])


def _text(value: Any) -> str:  # noqa: ANN401 (a cell, as the data set holds it)
    """A cell as text: of a list the first entry, of a whole float the integer."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value).strip()


def _gold(task: Task, row: Mapping[str, Any]) -> str:
    """The answer as the scorer takes it; of a reward none where there is none."""
    text = _text(row.get(_column(task.answer, row)))
    if task.scorer != MATH or task.options is not None:
        return text
    gold = gold_answer(text)
    inner = gold.removeprefix("$").removesuffix("$")
    # Of one formula some copies of a data set write the $ and some do not.
    return inner.strip() if len(inner) == len(gold) - 2 and "$" not in inner else gold
