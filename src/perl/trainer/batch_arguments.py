"""The batch of a trainer's arguments: a person's numbers turned into TRL's.

prompts_per_step or TRL's own numbers -> micro-batches of completions
"""

from collections.abc import Mapping
from typing import Any

from trl import GRPOConfig

from perl.recipe.batch_plan import plan_batch
from perl.recipe.recipe import world_size

GENERATION = ("steps_per_generation", "generation_batch_size")
"""Of these TRL derives the one that is not given, or both."""
DERIVED = "_batch_derived"
"""The field that holds which."""


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
    if every_field_given:
        _forget_derived(args)


def note_derived(args: Any, asked: Mapping[str, int | None]) -> None:  # noqa: ANN401 (a PeftRLConfig)
    """Notes which numbers of a generation batch TRL has derived, for a copy that has another batch.

    Args:
        args: Completed by TRL.
        asked: What these numbers were before.
    """
    derived = {name: getattr(args, name) for name in GENERATION if asked[name] is None}
    setattr(args, DERIVED, " ".join(f"{name}={value}" for name, value in derived.items()) or None)


def _forget_derived(args: Any) -> None:  # noqa: ANN401
    """Takes back what was derived and not changed since; TRL refuses both numbers, and would keep one that is old."""
    for note in (getattr(args, DERIVED) or "").split():
        name, _, value = note.partition("=")
        if str(getattr(args, name)) == value:
            setattr(args, name, None)


def completions_at_once(args: GRPOConfig) -> int:
    """Completions of a generation batch, as TRL will count them."""
    asked: int | None = args.generation_batch_size
    return _by_micro_batches(args) if asked is None else asked


def _by_micro_batches(args: GRPOConfig) -> int:
    steps: int = args.steps_per_generation or args.gradient_accumulation_steps or 1
    return (args.per_device_train_batch_size or 1) * steps * world_size()
