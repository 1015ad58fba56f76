"""The batch of a trainer's arguments: a person's numbers turned into TRL's.

prompts_per_step or TRL's own numbers -> micro-batches of completions
"""

from typing import Any

from trl import GRPOConfig

from perl.recipe.batch_plan import plan_batch
from perl.recipe.recipe import world_size


def derive_batch(args: Any, *, every_field_given: bool) -> None:  # noqa: ANN401 (a PeftRLConfig, which imports this)
    """Sets what was left open of the sizes of micro-batches.

    Args:
        args: Changed, before TRL completes them.
        every_field_given: Whether ``dataclasses.replace`` or a parser made them.

    Raises:
        RecipeError: The numbers contradict each other.
    """
    if args.prompts_per_step is not None:
        batch = plan_batch(
            prompts_per_step=args.prompts_per_step,
            num_generations=args.num_generations,
            per_device_train_batch_size=args.per_device_train_batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            world_size=world_size(),
        )
        args.per_device_train_batch_size = batch.per_device_train_batch_size
        args.gradient_accumulation_steps = batch.gradient_accumulation_steps
    if args.per_device_train_batch_size is None:
        args.per_device_train_batch_size = GRPOConfig.per_device_train_batch_size
    if args.gradient_accumulation_steps is None:
        args.gradient_accumulation_steps = GRPOConfig.gradient_accumulation_steps
    if every_field_given and args.generation_batch_size == _by_micro_batches(args):
        args.generation_batch_size = None  # dataclasses.replace gives both, of which TRL wants one


def completions_at_once(args: GRPOConfig) -> int:
    """Completions of a generation batch, as TRL will count them."""
    asked: int | None = args.generation_batch_size
    return _by_micro_batches(args) if asked is None else asked


def _by_micro_batches(args: GRPOConfig) -> int:
    steps: int = args.steps_per_generation or args.gradient_accumulation_steps or 1
    return (args.per_device_train_batch_size or 1) * steps * world_size()
