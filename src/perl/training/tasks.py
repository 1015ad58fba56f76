"""What a run's base and adapter are scored on: its held-out problems, and the tasks that the recipe names.

recipe, problems -> Protocol, PreparedTask

Loads no weights.
"""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from perl.data import ProblemSet, render_prompts
from perl.errors import RecipeError, did_you_mean
from perl.evaluation.drawing.request import end_tokens, generation_settings
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.results import is_held_out
from perl.evaluation.tasks.heldout import heldout_task
from perl.evaluation.tasks.own_tasks import chosen_tasks, in_keys
from perl.evaluation.tasks.questions import PreparedTask, prepare_task
from perl.evaluation.tasks.task_data import load_task_data
from perl.recipe import Recipe
from perl.recipe.eval_section import EvalSection


def run_protocol(recipe: Recipe) -> Protocol:
    """How the run's policies are scored; nothing comes from the base's generation settings, as in training."""
    settings = recipe.eval
    return Protocol(
        preset="recipe",
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_new_tokens=settings.max_completion_length or recipe.rollout.max_completion_length,
        k=settings.k,
        seed=settings.seed,
        system_prompt=recipe.data.system_prompt,
    )


def run_tasks(
    recipe: Recipe,
    problems: ProblemSet,
    solution: str,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    protocol: Protocol,
) -> tuple[PreparedTask, ...]:
    """The tasks of a run with their prompts; the held-out problems come first.

    Args:
        recipe: Its ``eval`` section names the tasks.
        problems: With those held out.
        solution: Column of their gold answers.
        tokenizer: The base's.
        config: The base's.
        protocol: How they will be sampled.

    Raises:
        PerlError: A task or its data is not there, or its prompts do not fit.
    """
    settings, found = recipe.eval, []
    if not settings.enabled:
        return ()
    chosen = chosen_tasks(settings, "eval.tasks") if settings.tasks else []
    template_arguments = recipe.train.get("chat_template_kwargs")
    ends = end_tokens(tokenizer, generation_settings(recipe.model))
    rows = problems.heldout
    if rows is not None and problems.heldout_name is not None and solution in rows.column_names:
        name = problems.heldout_name
        for one in chosen:
            if one.task.name == name:
                raise RecipeError(f"{name} is held out, hence scored already", one.place, "leave it out")
        examples = [{**row, "solution": row[solution]} for row in rows]
        prompts = render_prompts(examples, tokenizer, template_arguments)
        found.append(heldout_task(name, prompts, protocol, ends, settings.limit_of_heldout))
    context = config.get_text_config().max_position_embeddings
    for one in chosen:
        place = Path(settings.data).expanduser() if settings.data else None
        limit = settings.scorer_timeout
        with in_keys(one.place, "eval."):
            data = load_task_data(one.task, place, one.limit, one.few_shot, protocol.seed)
            made = prepare_task(data, tokenizer, protocol, ends, context, template_arguments, scorer_timeout=limit)
            found.append(made)
    check_best(settings, [one.task.name for one in chosen], "eval.best")
    return tuple(found)


def held_out_here(task: PreparedTask) -> bool:
    """Whether a run's task is what the run itself holds out, and none that its recipe names."""
    return is_held_out(task.data.task.title) and task.data.task.path is None


def check_best(settings: EvalSection, tasks: Sequence[str], where: str) -> None:
    """Refuses a name of the best score that no task has.

    Raises:
        RecipeError: Says the nearest.
    """
    known = [f"{task}/{what}@{settings.k}" for task in tasks for what in ("avg", "pass")]
    if settings.best is not None and settings.best not in known:
        raise RecipeError(f"there is no score {settings.best!r}", where, did_you_mean(settings.best, known))
