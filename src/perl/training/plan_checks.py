"""What of a recipe's data, rewards, prompts and teacher can be refused before the base's weights are loaded.

Recipe, problems, rewards, tokenizer -> nothing, or an error; tokens of prompts, optimizer steps
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from datasets import Dataset
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from perl.data import OF_TRL, ProblemSet, prompt_text, render_prompts
from perl.data.overlap import near_copies, repeated
from perl.errors import DataError, Mistake, ModelError, RecipeError, raise_all, warn
from perl.evaluation.tasks.questions import PreparedTask
from perl.recipe import Recipe
from perl.recipe.recipe import is_first_process
from perl.recipe.sections import PromptsSection, TeacherSection
from perl.rewards import Reward
from perl.rewards.custom import unsendable
from perl.rewards.resolve import GOLD, by_own_names, judging_of
from perl.rewards.verifier import Judging, unreadable
from perl.run.progress import live_line
from perl.trainer.arguments.config import PeftRLConfig
from perl.trainer.live import generation_interval
from perl.trainer.prompts.chances import difficulties
from perl.trainer.prompts.refill import extra_prompts
from perl.trainer.prompts.selection import choice_mistakes
from perl.trainer.step.teaching import check_answers, check_context, check_differs, context_of, teacher_prompt
from perl.training.tasks import held_out_here

# A data set with more gold answers that cannot be read than this share is refused; fewer are logged, and masked out.
_MOST_UNREADABLE = 0.05
_ANSWERS_AT_A_TIME = 500

# What to do about an argument that no column can fill.
_HINTS = {"solution": "set data.train.columns.answer", "prompt": "it is called prompts, as in TRL"}


def check_rewards(rewards: list[Reward], asked: dict[str, Dataset], problems: ProblemSet, recipe: Recipe) -> None:
    """Refuses rewards that the data has no columns or answers for, and says which columns were taken."""
    for what, rows in asked.items():
        _check_rewards_fit(rewards, rows, what, problems.own_names)
    for line in (*problems.renamed, *_with_two_answers(rewards, problems, recipe)):
        warn("PRL314", "%s", line)
    _check_answers(rewards, problems, recipe)


def asked_problems(problems: ProblemSet, arguments: PeftRLConfig) -> dict[str, Dataset]:
    """What the policy is asked and rewarded for, in training and between its steps, by what it is called."""
    evaluated = problems.heldout if arguments.eval_strategy != "no" else None
    return {"data": problems.train, **({} if evaluated is None else {"held-out data": evaluated})}


def _check_rewards_fit(rewards: list[Reward], rows: Dataset, what: str, own_names: Mapping[str, str]) -> None:
    """Every argument that a reward function insists on must be a column of the data, in a form that reaches it."""
    found: list[Mistake] = []
    known = (OF_TRL | set(rows.column_names)) - {"prompt"}  # which TRL hands over as prompts
    for reward in rewards:
        where = f"rewards.{reward.name}"
        stored = dict.fromkeys(rows.column_names, "")
        own = by_own_names(stored, own_names) if reward.failures is not None else {}
        for name in reward.needs:
            if name not in known and name not in own:
                column = "an answer" if name == "solution" else f"the column {name!r}"
                hint = f"there are {', '.join(sorted(known & set(rows.column_names)))}; {where}.columns maps names"
                hint = _HINTS.get(name, hint)
                found.append(Mistake(f"needs {column}, which the {what} does not have", where, hint))
        if not reward.takes_all:
            hint = "TRL hands every column of the data to every reward"
            found.append(Mistake("the function must accept **kwargs", where, hint))
        unsent = unsendable(rows[0]) if reward.in_workers else None
        if unsent:
            found.append(Mistake(f"cannot be given to a worker process: {unsent}", where, "leave workers out"))
    raise_all(DataError, found)


def _with_two_answers(rewards: list[Reward], problems: ProblemSet, recipe: Recipe) -> Iterator[str]:
    """A line for each custom reward that asks for ``solution`` where that is not the gold answer."""
    if GOLD not in problems.own_names:
        return
    gold = recipe.data.train.columns.answer
    for reward in rewards:
        if reward.failures is not None and GOLD in reward.by_name:
            yield (
                f"rewards.{reward.name}: {GOLD} is the data set's column of that name; the gold answer, from {gold}, "
                f"is {'answer' if gold != 'answer' and 'answer' not in problems.train.column_names else gold}"
            )


def warn_of_data(problems: ProblemSet, recipe: Recipe, tasks: Sequence[PreparedTask]) -> None:
    """A line on each thing that data rarely is on purpose."""
    for line in _suspicious(problems, recipe, tasks) if is_first_process() else ():  # the others would find the same
        warn("PRL311", "%s", line)


def _suspicious(problems: ProblemSet, recipe: Recipe, tasks: Sequence[PreparedTask]) -> Iterator[str]:
    if problems.heldout is None and recipe.eval.enabled and not recipe.eval.tasks:
        yield "data.eval: nothing is held out, so neither base nor adapter is scored (data.eval: 10% holds some out)"
    texts = [prompt_text(prompt) for prompt in problems.train["prompt"]]
    golds = problems.train["solution"][:] if "solution" in problems.train.column_names else [None] * len(texts)
    again, other = repeated(texts, golds)
    if again:
        differ = f", {len(other)} of them with another gold answer" if other else ""
        what = f"{len(again)} of {len(texts)} problems repeat an earlier one{differ}"
        yield f"data.train: {what}, e.g. {texts[(other or again)[0]]!r:.60}"
    if golds[0] is not None and len(golds) > 1 and len(set(golds)) == 1:
        yield f"data.train: all {len(golds)} gold answers are {golds[0]!r:.60}"
    heldout = [] if problems.heldout is None else problems.heldout["prompt"]
    sets = {"data.eval": [prompt_text(prompt) for prompt in heldout]}
    others = [task.data for task in tasks if not held_out_here(task)]
    sets |= {f"eval.tasks: {data.task.name}": [question.text for question in data.questions] for data in others}
    for name, asked in sets.items():
        if near := near_copies(asked, texts):
            what = f"{len(near)} of {len(asked)} problems are training problems, or nearly"
            yield f"{name}: {what} (by runs of words), e.g. {asked[near[0]]!r:.60}"


def _check_answers(rewards: list[Reward], problems: ProblemSet, recipe: Recipe) -> None:
    """Gold answers that cannot be read are right only letter for letter: many of them are a mistake."""
    judging = judging_of(rewards)
    sets = [("train", problems.train)] if judging is not None else []
    if problems.heldout is not None and recipe.eval.enabled:
        sets.append(("eval", problems.heldout))
    judging = judging or Judging()
    found = []
    for role, rows in sets:
        if judging.solution not in rows.column_names:  # of the training data it is checked as any other column
            found.append(Mistake("held-out problems need answers", f"data.{role}", "or set eval.enabled: false"))
        elif is_first_process():  # the others would find the same
            found += _unreadable_answers(rows[judging.solution], role, judging.workers)
    raise_all(DataError, found)


def _unreadable_answers(golds: list[str | None], role: str, workers: int) -> list[Mistake]:
    """A mistake if there are many; a few are logged."""
    bad: list[int] = []
    with live_line(len(golds), "reading gold answers") as line:
        for start in range(0, len(golds), _ANSWERS_AT_A_TIME):
            part = golds[start : start + _ANSWERS_AT_A_TIME]
            bad += [start + position for position in unreadable(part, workers)]
            line.update(len(part))
    if not bad:
        return []
    what = f"{len(bad)} of {len(golds)} gold answers cannot be read, e.g. {str(golds[bad[0]])[:40]!r}"
    if len(bad) > _MOST_UNREADABLE * len(golds):
        hint = "`perl reward check RECIPE` lists them; drop those rows, or use a custom reward"
        return [Mistake(what, f"data.{role}", hint)]
    warn("PRL315", "data.%s: %s; right only letter for letter, else without a reward", role, what)
    return []


def prompt_tokens(
    problems: ProblemSet, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig, arguments: PeftRLConfig
) -> tuple[int, float]:
    """Of the longest prompt, and on average; refuses one that leaves no room for the completion in the context."""
    sets = [rows for rows in (problems.train, problems.heldout) if rows is not None]
    rendered = [render_prompts(list(rows), tokenizer, arguments.chat_template_kwargs) for rows in sets]
    lengths = [[len(prompt.token_ids) for prompt in prompts] for prompts in rendered]
    longest = max(max(of_set) for of_set in lengths)
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if context is not None and longest + arguments.max_completion_length > context:
        raise ModelError(
            f"the longest prompt has {longest} tokens, with {arguments.max_completion_length} of completion that is "
            f"more than the model's {context}",
            "rollout.max_completion_length",
            f"at most {context - longest}" if context > longest else "shorten or drop the long prompts",
        )
    return longest, sum(lengths[0]) / len(lengths[0])


def steps_of(train: Dataset, arguments: PeftRLConfig, recipe: Recipe) -> int:
    """Optimizer steps, as transformers counts them.

    Raises:
        DataError: There are too few problems for a step, or a curriculum's column is absent or holds no numbers.
        RecipeError: Prompts cannot be chosen so.
    """
    prompts_per_generation = arguments.generation_batch_size // arguments.num_generations
    batches = len(train) // prompts_per_generation
    if batches == 0:
        raise DataError(
            f"{len(train)} training problems are too few for a step of {prompts_per_generation} prompts",
            "data.train",
            f"set train.prompts_per_step to {len(train)} or less",
        )
    _check_choice(train, arguments, recipe.prompts, recipe.batch.world_size)
    if arguments.max_steps > 0:
        return int(arguments.max_steps)
    micro_batches = batches * generation_interval(arguments)
    steps_per_epoch = max(1, -(-micro_batches // recipe.batch.gradient_accumulation_steps))
    return int(-(-arguments.num_train_epochs * steps_per_epoch // 1))


def most_completions(section: PromptsSection, arguments: PeftRLConfig, processes: int) -> int:
    """Of a batch of rollouts, with all that a refill may sample."""
    groups = arguments.generation_batch_size // arguments.num_generations
    return int((groups + extra_prompts(section.refill, groups, processes)) * arguments.num_generations)


def _check_choice(train: Dataset, arguments: PeftRLConfig, section: PromptsSection, processes: int) -> None:
    """Refuses what the trainer would refuse, before a model is loaded."""
    if not section.acts:
        return
    raise_all(RecipeError, choice_mistakes(section, arguments, len(train), processes))
    if section.curriculum is not None:
        difficulties(train.column_names, section.curriculum, train.__getitem__, "prompts.curriculum")


def check_teacher_prompts(
    section: TeacherSection,
    sets: Mapping[str, Dataset],
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    arguments: PeftRLConfig,
    *,
    same: bool,
) -> None:
    """Makes each prompt as the teacher will see it, and refuses a teacher that is the policy.

    Args:
        section: Of the recipe.
        sets: The problems that the policy is asked, in training or between its steps.
        tokenizer: The base's.
        config: The base's.
        arguments: Of the trainer.
        same: As of :func:`perl.trainer.step.teaching.check_differs`.

    Raises:
        DataError: A prompt cannot be made.
        ModelError: One leaves no room for the completion.
        RecipeError: There is nothing to learn from it.
    """
    if not section.acts:
        return
    check_differs(itertools.chain(*sets.values()), section, same=same)
    if not section.changes_prompts:
        return
    for rows in sets.values():
        check_answers(rows.column_names, section)
        prompts = [{"prompt": teacher_prompt(row, section)} for row in rows]
        rendered = render_prompts(prompts, tokenizer, arguments.chat_template_kwargs)
        longest = max(len(prompt.token_ids) for prompt in rendered)
        check_context(longest, int(arguments.max_completion_length or 0), context_of(config))
