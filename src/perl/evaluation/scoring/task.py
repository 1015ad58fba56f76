"""What a benchmark asks and where its questions come from; the modules of ``eval/`` by name.

eval/*.py -> Task, Question, TaskData

Imports neither torch nor lighteval, so that a list of tasks costs nothing.
"""

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from perl.errors import Mistake, PerlError, did_you_mean, raise_all
from perl.recipe.assets import evaluation_tasks

Split = Literal["train", "test", "heldout"]
DEFAULT_TASKS = ("aime24", "aime25", "math_500")
"""What ``perl eval`` asks where no task is named."""
MATH = "math"
"""The scorer that is training's verifier."""
WITH_TOOLS = "tools: "
"""What the name of a scorer of conversations begins with; their verdicts take the run's tools."""

# The words of Qwen2.5-Math's evaluation, which most reports on RL with verifiable rewards use.
BOXED_PROMPT = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
BOXED_SOURCE = "asked as Qwen2.5-Math's evaluation does"
LIGHTEVAL_SOURCE = "asked as lighteval 0.13 does"
LIGHTEVAL_AIME_PROMPT = (
    "\nSolve the following math problem efficiently and clearly.  The last line of your response should be of the "
    "following format: 'Therefore, the final answer is: $\\boxed{ANSWER}$. I hope it is correct' (without quotes) "
    "where ANSWER is just the final number or expression that solves the problem. Think step by step before "
    "answering.\n\n{problem}\n"
)
"""lighteval's, of every year's AIME."""


@dataclass(frozen=True)
class Task:
    """A benchmark with one way of asking.

    Attributes:
        name: As the command line knows it.
        title: As tables print it.
        repository: Data set on the Hub, or ``sandbox:NAME``.
        split: Of the data set.
        file: Name of the data in a local folder.
        source: Where data and prompt come from.
        subset: Of the data set; None where it has one only.
        revision: Commit of the data set; None: the newest, which results record.
        prompt: ``{problem}`` stands for the problem; any other brace stands for itself.
        version: Of the way of asking; scores of different versions are different scores.
        max_new_tokens: What lighteval's definition allows a completion; None where it leaves that open.
        stop: Texts that end a completion.
        lighteval: Name of the task of lighteval that this is, or None.
        problem: Columns that may hold the problem, the first one present counts.
        answer: Columns that may hold the answer, likewise.
        identifier: Columns that may hold the row's name, likewise.
        choices: Columns of a question with four choices, the right one first; the answer is then a letter.
        options: Column that may hold a list of choices, whose place in the list stays; None: there is none. The answer
            is a letter, a number counted from 0, or a choice's text.
        scorer: What makes a completion right, see :func:`perl.evaluation.scoring.reward_scorer.find_scorer`.
        path: Where the problems are a file of the user's own, or a recipe that holds problems out; never in results.
        examples: Split of the data set that few-shot examples come from; None: the problems themselves, of which they
            are set aside then.
        template_arguments: Of the chat template, where training asks with some.
        thinking: The template's thinking mode, where training switches it.
    """

    name: str
    title: str
    repository: str
    split: Split
    file: str
    source: str
    subset: str | None = None
    revision: str | None = None
    prompt: str = BOXED_PROMPT
    version: int = 1
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    lighteval: str | None = None
    problem: tuple[str, ...] = ("problem", "question")
    answer: tuple[str, ...] = ("answer",)
    identifier: tuple[str, ...] = ("id", "unique_id")
    choices: tuple[str, ...] = ()
    options: str | None = None
    scorer: str = MATH
    path: str | None = None
    examples: Split | None = None
    template_arguments: Mapping[str, Any] | None = None
    thinking: bool | None = None


@dataclass(frozen=True)
class Question:
    """One question of a task.

    Attributes:
        id: Name of the row in its data set, else its number from 0; no two questions of a task share one.
        text: What the user message says.
        gold: The answer, as the verifier takes it.
        row: The row as the data set holds it.
        choices: Of a question with choices their texts, in the order of their letters.
        prompt: What the model is asked where that is not one user message: chat messages, or plain text even if there
            is a chat template.
    """

    id: str
    text: str
    gold: str
    row: Mapping[str, Any]
    choices: tuple[str, ...] = ()
    prompt: str | tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True)
class Example:
    """A solved problem that stands before every question.

    Attributes:
        question: The problem.
        answer: What the assistant says to it.
    """

    question: Question
    answer: str


@dataclass(frozen=True)
class TaskData:
    """The questions of a task and where they were read.

    Attributes:
        task: The task.
        questions: In the order of the data set.
        source: Data set on the Hub, or name of the file; never a path.
        revision: Commit on the Hub; None for a file, and where only the cache was asked.
        sha256: Of ids, texts and golds.
        further: Questions beyond a limit, which are not asked; what a sample is named by and how long it may be depends
            on all of them, so that it is the same whatever the limit.
        examples: That stand before every question (few-shot).
    """

    task: Task
    questions: tuple[Question, ...]
    source: str
    revision: str | None
    sha256: str
    further: tuple[Question, ...] = ()
    examples: tuple[Example, ...] = ()


def questions_hash(questions: Iterable[Question]) -> str:
    """SHA-256 of ids, texts and golds: equal where a model was asked the same and judged by the same."""
    content = json.dumps([[question.id, question.text, question.gold] for question in questions])
    return hashlib.sha256(content.encode()).hexdigest()


def boxed(task: Task, title: str) -> Task:
    """The problems of one of lighteval's tasks, asked with one plain sentence; the length is left open.

    Args:
        task: Whose source ends in how lighteval asks.
        title: As tables print it.
    """
    return replace(
        task,
        name=f"{task.name}_boxed",
        title=title,
        source=task.source.replace(LIGHTEVAL_SOURCE, BOXED_SOURCE),
        prompt=BOXED_PROMPT,
        version=1,
        max_new_tokens=None,
        stop=(),
        lighteval=None,
    )


def all_tasks() -> dict[str, Task]:
    """Name -> task, of every module of ``eval/``."""
    modules = [load_module(path, f"perl_eval_{path.stem}") for path in evaluation_tasks().values()]
    return {task.name: task for module in modules for task in module.TASKS}


def find_tasks(names: Sequence[str], where: str = "--tasks") -> list[Task]:
    """The tasks of these names, in the order given.

    Args:
        names: Each once.
        where: What the user named them in.

    Raises:
        PerlError: With every name that is unknown.
    """
    known = all_tasks()
    problems = [
        Mistake(f"there is no task {name!r}", where, did_you_mean(name, known)) for name in names if name not in known
    ]
    if not names:
        problems.append(Mistake("none is named", where, did_you_mean("", known)))
    raise_all(PerlError, problems)
    return [known[name] for name in names]


def load_module(path: Path, name: str) -> ModuleType:
    """A module that is imported by its path, as those of ``eval``, which is a folder of files and no package.

    Args:
        path: Of the file.
        name: Of the module.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def titled(title: str, few_shot: int) -> str:
    """A task's title, with the number of its examples if there are any."""
    return f"{title}, {few_shot}-shot" if few_shot else title


def shown_fact(count: int, sha256: str | None) -> str | None:
    """What a protocol's hash has of the examples: how many, and which."""
    return f"{count}:{sha256}" if count else None


def shown_hash(examples: Sequence[Example]) -> str | None:
    """SHA-256 of what is shown, in its order; None: there are no examples."""
    content = "\0".join(part for one in examples for part in (one.question.text, one.answer))
    return hashlib.sha256(content.encode()).hexdigest() if examples else None
