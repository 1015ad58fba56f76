"""Tasks by what the user names: a benchmark, a data file of their own, a Python file with tasks, or a recipe.

names, columns, scorer -> Task; EvalSection -> ChosenTask

A task of the user's own is called by its file's stem, and nothing but the file's name enters results.
"""

import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from perl.data import simple_name
from perl.errors import Mistake, PerlError, RecipeError, did_you_mean, raise_all
from perl.evaluation.scoring.reward_scorer import find_scorer
from perl.evaluation.scoring.task import MATH, Task, all_tasks, find_tasks, load_module
from perl.evaluation.tasks.heldout import HELDOUT, RECIPE_SUFFIXES, holds_problems_out, task_of_recipe
from perl.evaluation.tasks.task_data import check_examples
from perl.recipe.eval_section import EvalSection
from perl.recipe.sections import is_data_file

_PROMPT, _ANSWER, _ID, _CHOICES = "prompt", "answer", "id", "choices"
ROLES = (_PROMPT, _ANSWER, _ID, _CHOICES)
"""What a column may hold."""
_PYTHON = re.compile(r"(.+\.py)(?::(.*))?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
_USUAL = {_PROMPT: ("prompt", "problem", "question"), _ANSWER: ("answer", "solution"), _ID: ("id", "unique_id")}

# Option of the command line -> key of a task.
_KEYS = {"--tasks": "", "--columns": ".columns", "--scorer": ".scorer", "--limit": ".limit", "--few-shot": ".few_shot"}


def file_task(
    path: str | Path,
    columns: Mapping[str, str] | None = None,
    scorer: str | None = None,
    prompt: str | None = None,
    name: str | None = None,
) -> Task:
    """A data file as a task.

    Args:
        path: Ends in .jsonl, .json, .csv or .parquet.
        columns: Any of ``prompt``, ``answer``, ``id`` and ``choices`` -> the column that holds it; None: usual names.
        scorer: See :func:`perl.evaluation.scoring.reward_scorer.find_scorer`; None: math.
        prompt: ``{problem}`` stands for the problem; None: the scorer's, which is the problem itself but for choices.
        name: In results; None: the file's stem.

    Raises:
        PerlError: There is no such scorer, or a column holds what no task has.
    """
    path, columns = Path(path).expanduser(), dict(columns or {})
    for role in columns:
        if role not in ROLES:
            raise PerlError(f"there is no column for {role!r}", "--columns", did_you_mean(role, ROLES))
    judge = find_scorer(scorer or MATH)
    asked, right, named = ((columns[r],) if r in columns else _USUAL[r] for r in (_PROMPT, _ANSWER, _ID))
    name = name or simple_name(path.stem)
    return Task(
        name=name,
        title=name,
        repository=path.name,
        split="test",
        file=path.name,
        source="a file of one's own",
        prompt=judge.prompt if prompt is None else prompt,
        problem=asked,
        answer=right,
        identifier=named,
        options=columns.get(_CHOICES, _CHOICES if judge.name == "choice" else None),
        scorer=judge.name,
        path=str(path),
    )


def named_tasks(
    names: Sequence[str], where: str = "--tasks", columns: Mapping[str, str] | None = None, scorer: str | None = None
) -> list[Task]:
    """The tasks of these names, in the order given.

    Args:
        names: Each once: of :func:`perl.evaluation.scoring.task.all_tasks`, data files, ``my_tasks.py`` and
            ``my_tasks.py:NAME``, and recipes, whose held-out problems are asked.
        where: What the user named them in.
        columns: Of the data files.
        scorer: Of the data files.

    Raises:
        PerlError: With every name that is unknown or stands twice; a file cannot be read.
    """
    files = [name for name in names if is_file_name(name)]
    for option, given in (("--columns", columns), ("--scorer", scorer)):
        if given and not any(map(is_data_file, files)):
            raise PerlError("is about a data file, and none is named", option, "as in --tasks my.jsonl")
    benchmarks = [name for name in names if name not in files]
    known = {task.name: task for task in (find_tasks(benchmarks, where) if benchmarks or not names else [])}
    found: list[Task] = []
    for name in names:
        if name in known:
            found.append(known[name])
        elif name.endswith(RECIPE_SUFFIXES):
            found.append(task_of_recipe(name, where))
        elif (python := _PYTHON.fullmatch(name)) is not None:
            found += _tasks_in(python[1], python[2], where)
        elif Path(name).expanduser().is_file():
            found.append(file_task(name, columns, scorer))
        else:
            raise PerlError(f"no such file: {name}", where)
    _check_names(found, where)
    return found


@dataclass(frozen=True)
class ChosenTask:
    """A task as a recipe names it.

    Attributes:
        task: What it is.
        limit: Only the first so many problems; None: all.
        few_shot: Examples before each of them.
        place: Its key, ``eval.tasks[1]``.
    """

    task: Task
    limit: int | None
    few_shot: int
    place: str


def chosen_tasks(settings: EvalSection, where: str) -> list[ChosenTask]:
    """The tasks of a recipe's ``eval`` section, or of a script's callback.

    Args:
        settings: Names them.
        where: As an error calls its list of tasks; a mistake names the task's place in it, ``eval.tasks[1].limit``.

    Raises:
        PerlError: With every name that is unknown or stands twice; a file cannot be read; no task has the best score.
    """
    if not settings.tasks:
        find_tasks([], where)
    above, found = where.removesuffix("tasks"), []
    for i, item in enumerate(settings.tasks):
        place = f"{where}[{i}]"
        own_limit = "limit" in item.model_fields_set
        limit = item.limit if own_limit else settings.limit_of_tasks
        places = f"{place}.limit" if own_limit else f"{above}limit", f"{place}.few_shot"
        with in_keys(place, above):
            for task in named_tasks([item.name], place, item.columns, item.scorer):
                check_examples(task, limit, item.few_shot, places)
                found.append(ChosenTask(task, limit, item.few_shot, place))
    _check_names([one.task for one in found], where)
    known = [f"{one.task.name}/{what}@{settings.k}" for one in found for what in ("avg", "pass")]
    if settings.best is not None and settings.best not in known:
        raise RecipeError(f"there is no score {settings.best!r}", f"{above}best", did_you_mean(settings.best, known))
    return found


def for_each(
    given: int | Mapping[str, int] | None, names: Sequence[str], tasks: Sequence[Task], option: str
) -> list[int | None]:
    """A number for each task, of one for all of them or of one by name.

    Args:
        given: A number, or task -> number; a file may be named as it was typed.
        names: As the tasks were typed.
        tasks: What they are.
        option: Where the user gave it.

    Raises:
        PerlError: A name is not asked.
    """
    if not isinstance(given, Mapping):
        return [given] * len(tasks)
    spelled = {name: simple_name(Path(name).stem) for name in names if is_data_file(name)}
    held_out = [task.name for task in tasks if holds_problems_out(task)]
    recipes = [name for name in names if name == HELDOUT or name.endswith(RECIPE_SUFFIXES)]
    spelled |= dict(zip(recipes, held_out, strict=True))
    numbers = {spelled.get(name, name): number for name, number in given.items()}
    known = [task.name for task in tasks]
    unknown = [name for name in numbers if name not in known]
    mistakes = [Mistake(f"{name!r} is not asked", option, did_you_mean(name, known)) for name in unknown]
    raise_all(PerlError, mistakes)
    return [numbers.get(name) for name in known]


def is_file_name(name: str) -> bool:
    """Whether a task's name is that of a file."""
    return is_data_file(name) or name.endswith(RECIPE_SUFFIXES) or _PYTHON.fullmatch(name) is not None


def _check_names(tasks: Sequence[Task], where: str) -> None:
    """Refuses names of the user's own tasks that results cannot have, that stand twice, or that are a benchmark's."""
    known, names = all_tasks(), [task.name for task in tasks]
    problems = [
        Mistake(f"{name} is named {names.count(name)} times", where, "once is enough; a file is called by its stem")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    for task in (one for one in tasks if not holds_problems_out(one)):
        if _NAME.fullmatch(task.name) is None or ".." in task.name:
            hint = "letters, digits, and any of _ . : -"
            problems.append(Mistake(f"{task.name!r:.60} cannot be the name of a task", where, hint))
        elif task.name in known and task != known[task.name]:
            hint = f"rename it{'' if task.path is None else '; --data DIR says where a benchmark lies'}"
            problems.append(Mistake(f"{task.name} is the name of a task of perl eval", where, hint))
    raise_all(PerlError, problems)


def _tasks_in(shown: str, name: str | None, where: str) -> list[Task]:
    """``TASKS`` of a Python file, or the one of a name; what its code raises is a line with the number of its line."""
    path = Path(shown).expanduser().absolute()
    if not path.is_file():
        raise PerlError(f"no such file: {shown}", where, "my_tasks.py, or my_tasks.py:NAME")
    try:
        found = getattr(load_module(path, f"perl_tasks_{path.stem}"), "TASKS", None)
    except PerlError as error:
        at = f"{shown}:{_line_of(error, path)}"
        raise error.moved(lambda place: f"{at}: {place}" if place else at) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the user's file may raise anything)
        what = f"cannot be imported: {type(error).__name__}: {error}"
        raise PerlError(what, f"{shown}:{_line_of(error, path)}") from None
    if not found or not isinstance(found, list | tuple) or not all(isinstance(one, Task) for one in found):
        raise PerlError("defines no TASKS", shown, "TASKS = (file_task(...),), or as a module of eval/")
    tasks = [_resolved(task, path, shown) for task in found]
    some = [task for task in tasks if name in (None, task.name)]
    if not some:
        raise PerlError(f"{shown} has no task {name!r}", where, did_you_mean(str(name), [task.name for task in tasks]))
    return some


def _resolved(task: Task, path: Path, shown: str) -> Task:
    """A task with its scorer found, and its data file looked for beside the file that defines it."""
    try:
        scorer = find_scorer(task.scorer, where=task.name).name
    except PerlError as error:
        raise error.moved(lambda place: f"{shown}: {place}") from None
    if task.path is None:
        return replace(task, scorer=scorer)
    if task.examples is not None:
        what = "is a file, whose examples are set aside from its own problems; examples names a split of a data set"
        raise PerlError(what, f"{shown}: {task.name}", "leave examples out")
    return replace(task, scorer=scorer, file=Path(task.path).name, path=str(path.parent / Path(task.path).expanduser()))


def _line_of(error: BaseException, path: Path) -> int:
    """The last line of a file that an error passed."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or 0
    lines = [frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return lines[-1] if lines else 0


@contextmanager
def in_keys(place: str, above: str) -> Iterator[None]:
    """A mistake names keys of a recipe where the command line would name options and tasks.

    Args:
        place: Of the task, ``eval.tasks[1]``.
        above: What stands before the keys of its section, ``eval.``.
    """
    try:
        yield
    except PerlError as error:
        first, *others = [_in_keys(mistake, place, above) for mistake in error.mistakes]
        raise type(error)(first.message, first.where, first.hint, tuple(others)) from error


def _in_keys(mistake: Mistake, place: str, above: str) -> Mistake:
    where = mistake.where
    if not where or where.startswith("task "):
        where = place
    elif where in _KEYS:
        where = place + _KEYS[where]
    elif where == "--system-prompt":
        where = "data.system_prompt"
    hint = re.sub(r"--columns (\w+)=(\w+)", r"columns: {\1: \2}", mistake.hint.replace("--newest-data, or ", ""))
    hint = re.sub(r"--tasks (\S+)", r"name: \1", hint)
    return replace(mistake, where=where, hint=hint.replace("--data DIR", f"{above}data: DIR"))
