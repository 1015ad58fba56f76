"""The problems that a recipe holds out, as a task that any adapter can be asked.

recipe.yaml -> Task -> questions, asked as training asks them
"""

from dataclasses import replace
from pathlib import Path

from perl.data import heldout_name, load_problem_set, prompt_text
from perl.errors import PerlError
from perl.evaluation.results import BESIDE, HELD_OUT
from perl.evaluation.task import Question, Task
from perl.recipe import Recipe
from perl.run.facts import RECIPE, is_run, run_above

HELDOUT = "heldout"
"""The command line's name for the problems that the run of an adapter held out."""
RECIPE_SUFFIXES = (".yaml", ".yml")
_LEVELS = 3  # RUN/checkpoints/checkpoint-10/adapter


def held_out_by_run(name: str, path: str | None = None) -> Task:
    """The task of held-out problems.

    Args:
        name: What they are called (:func:`perl.data.heldout_name`).
        path: Of the recipe, where they are asked outside its run.
    """
    return Task(
        name=name,
        title=name + HELD_OUT,
        repository=name,
        split="heldout",
        file="",
        source="held out by the run",
        prompt="{problem}",
        path=path,
    )


def beside_another(task: Task) -> Task:
    """Held-out problems under a name of their own, where a table has another task of theirs.

    The name enters seeds and the protocol's hash, as every task's does.
    """
    name = task.name + BESIDE
    return replace(task, name=name, title=name + HELD_OUT, repository=name)


def task_of_recipe(path: str, where: str) -> Task:
    """The held-out problems of a recipe as a task.

    Args:
        path: Of the recipe.
        where: What the user named it in.

    Raises:
        PerlError: It is no recipe, or holds nothing out.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise PerlError(f"no such file: {path}", where, "a recipe, whose held-out problems are asked")
    recipe = Recipe.of_run(file)
    name = heldout_name(recipe.data)
    if name is None:
        raise PerlError(f"{path} holds no problems out", where, "name them there, as data.eval")
    return replace(held_out_by_run(name, str(file)), template_arguments=recipe.train.get("chat_template_kwargs"))


def recipe_of_run(adapter: str | None, where: str) -> str:
    """The recipe of the run that an adapter lies in.

    Raises:
        PerlError: It lies in none.
    """
    path = None if adapter is None else Path(adapter).expanduser()
    if path is not None and path.is_dir():  # a name on the Hub lies nowhere here
        run = path if is_run(path) else run_above(path, _LEVELS)
        if run is not None:
            return str(run / RECIPE)
    what = f"{HELDOUT} are the problems that an adapter's run held out, and {adapter or 'a base alone'} is in no run"
    raise PerlError(what, where, "name the recipe instead, as in --tasks my.yaml")


def holds_problems_out(task: Task) -> bool:
    """Whether a task is asked from a recipe."""
    return task.path is not None and task.path.endswith(RECIPE_SUFFIXES)


def heldout_questions(recipe: Recipe, *, chat: bool = True) -> tuple[Question, ...]:
    """The held-out problems, named and asked as :func:`perl.evaluation.heldout.heldout_task` does.

    Those without answers are none.

    Args:
        recipe: Holds them out.
        chat: Whether questions become chat messages, as for a base with a chat template; ``data.chat`` overrides it.

    Raises:
        DataError: The data cannot be read.
    """
    rows = load_problem_set(recipe.data, chat=chat).heldout
    if rows is None or "solution" not in rows.column_names:
        return ()
    found = []
    for number, row in enumerate(rows):
        own = row["prompt"]
        prompt = own if isinstance(own, str) else tuple(own)
        found.append(Question(str(number), prompt_text(own), row["solution"], row, prompt=prompt))
    return tuple(found)
