"""Problems that a run or a recipe holds out, as a task that any adapter can be asked, as training asks them.

recipe.yaml -> Task -> questions; prompts with solutions -> PreparedTask; model, PreparedTask -> Score
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from perl.data import heldout_name, load_problem_set, prompt_text
from perl.errors import PerlError
from perl.evaluation.scoring.agent_scorer import agent_scorer
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.results import HELD_OUT
from perl.evaluation.scoring.score import Score, score_samples
from perl.evaluation.scoring.task import Question, Task, TaskData, questions_hash
from perl.evaluation.tasks.draw import TaskRequest, draw
from perl.evaluation.tasks.questions import PreparedTask, protocol_hash, rendered
from perl.policy.model import eos_token_ids
from perl.recipe import Recipe
from perl.rollouts.agents.asked import Asking, asking_of
from perl.rollouts.hf_engine import TransformersEngine
from perl.run.facts import RECIPE, is_run, run_above
from perl.types import Prompt

HELDOUT = "heldout"
"""The command line's name for the problems that the run of an adapter held out."""
RECIPE_SUFFIXES = (".yaml", ".yml")


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
    task, arguments = held_out_by_run(name, str(file)), recipe.train.get("chat_template_kwargs")
    return replace(task, template_arguments=arguments, thinking=recipe.data.thinking)


def recipe_of_run(adapter: str | None, where: str) -> str:
    """The recipe of the run that an adapter lies in.

    Raises:
        PerlError: It lies in none.
    """
    path = None if adapter is None else Path(adapter).expanduser()
    if path is not None and path.is_dir():  # a name on the Hub lies nowhere here
        run = path if is_run(path) else run_above(path, 3)  # RUN/checkpoints/checkpoint-10/adapter
        if run is not None:
            return str(run / RECIPE)
    what = f"{HELDOUT} are the problems that an adapter's run held out, and {adapter or 'a base alone'} is in no run"
    raise PerlError(what, where, "name the recipe instead, as in --tasks my.yaml")


def holds_problems_out(task: Task) -> bool:
    """Whether a task is asked from a recipe."""
    return task.path is not None and task.path.endswith(RECIPE_SUFFIXES)


def heldout_questions(recipe: Recipe, *, chat: bool = True) -> tuple[Question, ...]:
    """The held-out problems, named and asked as :func:`perl.evaluation.tasks.heldout.heldout_task` does.

    Those without answers are none.

    Args:
        recipe: Holds them out.
        chat: Whether questions become chat messages, as for a base with a chat template; ``data.chat`` overrides it.

    Raises:
        DataError: The data cannot be read.
    """
    rows = load_problem_set(recipe.data, chat=chat).heldout
    if rows is None or ("solution" not in rows.column_names and not recipe.agent.environment):
        return ()
    prompts = [own if isinstance(own, str) else tuple(own) for own in rows["prompt"]]
    return tuple(
        Question(str(number), prompt_text(row["prompt"]), row.get("solution", ""), row, prompt=prompt)
        for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
    )


def asked_with_tools(
    prepared: PreparedTask,
    tokenizer: PreTrainedTokenizerBase,
    protocol: Protocol,
    context: int | None,
    template_arguments: Mapping[str, Any],
    asking: Mapping[str, str],
) -> PreparedTask:
    """A task as its recipe asks it, where that has tools; any other as it is.

    Args:
        prepared: The task.
        tokenizer: The base's; its templates may be replaced.
        protocol: How it is asked.
        context: Tokens that the base can read; None: any number.
        template_arguments: Of the chat template.
        asking: As of :func:`perl.evaluation.tasks.questions.prepare_task`.

    Raises:
        PerlError: The tools cannot be found, or the base cannot be shown them.
    """
    task, request = prepared.data.task, prepared.request
    if not holds_problems_out(task):
        return prepared
    recipe = Recipe.of_run(str(task.path))
    if not recipe.agent.acts:
        return prepared
    names = load_problem_set(recipe.data, chat=True).own_names
    conversations = asking_of(recipe.agent, names, tokenizer, template_arguments, context)
    scorer = agent_scorer(conversations)
    every = [*request.asked, *request.further]
    shown = conversations.rendered([one.as_question.row for one in every])
    again = tuple(replace(one, prompt_ids=prompt.token_ids) for one, prompt in zip(every, shown, strict=True))
    count, longest = len(request.asked), request.max_new_tokens
    made = replace(request, asked=again[:count], further=again[count:], asking=conversations, scorer=scorer)
    return PreparedTask(prepared.data, made, protocol_hash(protocol, prepared.data, longest, scorer.label, asking))


def heldout_task(
    name: str,
    prompts: Sequence[Prompt],
    protocol: Protocol,
    end_token_ids: tuple[int, ...],
    limit: int | None = None,
    asking: Mapping[str, str] | None = None,
    conversations: Asking | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
) -> PreparedTask:
    """Held-out problems as a task.

    Args:
        name: What they are called in results.
        prompts: Rendered as training renders them.
        protocol: How they will be asked; says how long a completion may be.
        end_token_ids: Tokens that end one.
        limit: Only the first so many are asked; None: all.
        asking: As of :func:`perl.evaluation.tasks.questions.prepare_task`.
        conversations: How problems become conversations with tools; None: they are answered in one turn.
        rows: Of conversations the rows of the data, which environments are reset with.

    Raises:
        ValueError: There is no problem, or one has no solution, or the protocol sets no length.
    """
    if not prompts or protocol.max_new_tokens is None:
        raise ValueError("there must be at least one problem, and a length that no completion exceeds")
    texts = [prompt_text(p.content if isinstance(p.content, str) else list(p.content)) for p in prompts]
    golds = [p.solution for p in prompts if p.solution is not None]
    given = rows or [{}] * len(texts)
    asked = enumerate(zip(texts, golds, given, strict=True))
    questions = tuple(Question(str(i), text, gold, row) for i, (text, gold, row) in asked)
    task = held_out_by_run(name)
    some = questions[:limit]
    data = TaskData(task, some, name, None, questions_hash(some), questions[len(some) :])
    every = tuple(rendered(question, p.token_ids) for question, p in zip(questions, prompts, strict=True))
    longest = protocol.max_new_tokens
    request = TaskRequest(name, every[: len(some)], longest, end_token_ids, further=every[len(some) :])
    if conversations is not None:
        request = replace(request, asking=conversations, scorer=agent_scorer(conversations))
    return PreparedTask(data, request, protocol_hash(protocol, data, longest, request.scorer.label, asking))


def evaluate_policy(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    protocol: Protocol,
) -> Score:
    """The score of a model in memory, with whatever adapter is active, on problems with solutions.

    Args:
        model: The policy.
        tokenizer: The base's.
        prompts: As in :func:`heldout_task`.
        protocol: How completions are drawn, and how many of each problem.

    Raises:
        ValueError: There is no problem, or one has no solution.
    """
    task = heldout_task("heldout", prompts, protocol, eos_token_ids(model, tokenizer))
    engine = TransformersEngine(model, tokenizer)
    return score_samples(draw(engine, tokenizer, task.request, protocol, {}, lambda _: None))
