"""What a plan says of its algorithm, its critic, its prompts and its rollouts, for a person to read.

Recipe, arguments -> lines
"""

from collections.abc import Iterator
from dataclasses import fields

from perl.algorithms.coinciding import same_on_policy
from perl.algorithms.critic_settings import critic_rate
from perl.algorithms.named import ALGORITHMS, shown_settings
from perl.algorithms.unrewarded import counts
from perl.methods.registry import Method
from perl.recipe import Recipe
from perl.trainer.config import PeftRLConfig
from perl.trainer.live import generation_interval
from perl.training.prompt_checks import most_completions


def algorithm_lines(recipe: Recipe, arguments: PeftRLConfig) -> Iterator[str]:
    """What the algorithm's name sets and what overrides it, and which names mean the same update in this setting."""
    row = ALGORITHMS.get(recipe.algorithm or "")
    if row is None:
        return
    given = {field.name: getattr(arguments, field.name) for field in fields(arguments)}
    own = row.overridden(given)
    overridden = f"; overridden: {shown_settings(own)}" if own else ""
    yield f"algorithm {row.name}: {shown_settings(row.settings)}{overridden}"
    window = generation_interval(arguments)
    rewarded = counts(setting.weight for setting in recipe.rewards.values())
    if rewarded and (arguments.gradient_accumulation_steps or 1) % window == 0 and recipe.rollout.prefetch == 0:
        engine = recipe.rollout.capabilities.log_probs
        may_be_vllm = not recipe.rollout.decided and arguments.device.type != "cpu"
        one_pass = arguments.gradient_accumulation_steps == 1 and recipe.batch.world_size == 1
        same = same_on_policy(row, given, corrected=engine or may_be_vllm, one_pass=one_pass)
        what = f"the same update as {', '.join(same)}" if same else "no other name means the same update"
        yield f"on-policy one update a batch, so the ratio is 1 and its bounds change nothing: {what}"


def critic_lines(arguments: PeftRLConfig, method: Method, parameters: int) -> Iterator[str]:
    """What a critic trains, and how fast; nothing where there is none."""
    if parameters:
        shape = f"rank {arguments.critic_rank}, and a value head"
        rate = critic_rate(arguments.critic_learning_rate, float(arguments.learning_rate or 0), method.rate)
        still = "" if rate else ": its values stay as they begin"
        yield f"critic   {parameters:,} parameters ({shape}), learning rate {rate:g}{still}"


def rollout_lines(recipe: Recipe, served_rank: int | None) -> Iterator[str]:
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


def prompt_lines(recipe: Recipe, arguments: PeftRLConfig) -> Iterator[str]:
    """How prompts are chosen, and what is sampled at most; nothing where they are taken as they come."""
    if recipe.prompts.acts:
        yield f"prompts  {recipe.prompts.shown}"
    if recipe.prompts.refill:
        usual, most = (
            arguments.generation_batch_size,
            most_completions(recipe.prompts, arguments, recipe.batch.world_size),
        )
        yield f"         up to {most:,} completions in the place of {usual:,} of a batch of rollouts"
