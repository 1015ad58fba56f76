"""A plan for a person to read.

Plan -> lines
"""

from collections.abc import Iterator
from dataclasses import fields

from perl.algorithms.critic_settings import critic_rate
from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.named import ALGORITHMS, shown_settings
from perl.methods.registry import Method
from perl.recipe import Recipe
from perl.recipe.quantisations import in_few_bits
from perl.trainer.config import PeftRLConfig
from perl.training.plan import Plan
from perl.training.plan_checks import most_completions


def plan_lines(plan: Plan) -> Iterator[str]:
    """The plan, a line a topic."""
    share = 100 * plan.trainable_parameters / plan.total_parameters
    heldout = len(plan.problems.heldout) if plan.problems.heldout is not None else 0
    settings = ", ".join(f"{name} {value}" for name, value in plan.settings.items())
    base = plan.total_parameters - (plan.trainable_parameters if plan.method.config else 0)
    quantization = plan.recipe.model.quantization
    in_bits = f", base{in_few_bits(quantization)}" if quantization else ""
    yield f"model    {plan.recipe.model.name}, {base:,} parameters{in_bits}"
    yield f"adapter  {plan.method.name} ({settings})" if plan.method.config else "adapter  none: the model itself"
    yield from _algorithm_lines(plan.recipe, plan.arguments)
    yield f"trained  {plan.trainable_parameters:,} parameters ({share:.2f} % of all)"
    yield from _critic_lines(plan.arguments, plan.method, plan.critic_parameters)
    yield f"data     {plan.recipe.data.train.name}: {len(plan.problems.train):,} problems, {heldout:,} held out"
    yield f"tokens   prompts up to {plan.longest_prompt}, completions up to {plan.arguments.max_completion_length}"
    yield from _prompt_lines(plan.recipe, plan.arguments)
    yield from _rollout_lines(plan.recipe, plan.served_rank)
    yield f"rewards  {', '.join(f'{r.name} x {r.weight:g}' for r in plan.rewards) or 'none: the teacher alone'}"
    greedy = ADVANTAGES[plan.arguments.advantage_estimator].writes_greedy
    more = f", and {plan.recipe.batch.prompts_per_step} greedy completions" if greedy else ""
    yield f"batch    {plan.recipe.batch}{more}"
    if plan.recipe.batch.world_size > 1:
        yield f"strategy {plan.recipe.engine.strategy}"
    completions = plan.steps * plan.recipe.batch.completions_per_step
    least = "at least " if plan.recipe.prompts.refill else ""
    yield f"steps    {plan.steps} ({least}{completions:,} completions in all)"
    yield f"output   {plan.recipe.output_dir}"


def _algorithm_lines(recipe: Recipe, arguments: PeftRLConfig) -> Iterator[str]:
    """What the algorithm's name sets, and what overrides it."""
    row = ALGORITHMS.get(recipe.algorithm or "")
    if row is None:
        return
    given = {field.name: getattr(arguments, field.name) for field in fields(arguments)}
    own = row.overridden(given)
    overridden = f"; overridden: {shown_settings(own)}" if own else ""
    yield f"algorithm {row.name}: {shown_settings(row.settings)}{overridden}"


def _critic_lines(arguments: PeftRLConfig, method: Method, parameters: int) -> Iterator[str]:
    """What a critic trains, and how fast; nothing where there is none."""
    if parameters:
        shape = f"rank {arguments.critic_rank}, and a value head"
        rate = critic_rate(arguments.critic_learning_rate, float(arguments.learning_rate or 0), method.rate)
        still = "" if rate else ": its values stay as they begin"
        yield f"critic   {parameters:,} parameters ({shape}), learning rate {rate:g}{still}"


def _rollout_lines(recipe: Recipe, served_rank: int | None) -> Iterator[str]:
    """What the engine is given after each step, and who teaches beside it.

    Args:
        recipe: Of the run.
        served_rank: Of the LoRA that is served; None: the changed weights are.
    """
    if recipe.rollout.capabilities.takes_updates:
        what = "the changed weights" if served_rank is None else f"a LoRA of rank {served_rank}"
        quantised = recipe.model.quantization is not None
        of_nf4 = "; its base must be quantised too, as `perl rollout command` starts it" if quantised else ""
        yield f"rollouts {recipe.rollout.backend}, which gets {what} after each step{of_nf4}"
    if recipe.teacher.acts:
        named = f" ({recipe.teacher.adapter})" if recipe.teacher.adapter else ""
        yield f"teacher  {recipe.teacher.shown}{named}"


def _prompt_lines(recipe: Recipe, arguments: PeftRLConfig) -> Iterator[str]:
    """How prompts are chosen, and what is sampled at most; nothing where they are taken as they come."""
    if recipe.prompts.acts:
        yield f"prompts  {recipe.prompts.shown}"
    if recipe.prompts.refill:
        usual, most = (
            arguments.generation_batch_size,
            most_completions(recipe.prompts, arguments, recipe.batch.world_size),
        )
        yield f"         up to {most:,} completions in the place of {usual:,} of a batch of rollouts"
