"""The batch of a trainer's arguments: a person's numbers turned into TRL's.

prompts_per_step or TRL's own numbers -> micro-batches of completions
"""

from collections.abc import Mapping
from typing import Any

from trl import GRPOConfig

from perl.recipe.batch_plan import plan_batch
from perl.recipe.recipe import world_size

NUMBERS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
    *("steps_per_generation", "generation_batch_size"),
)
"""Of these those that are not given are derived, the last two by TRL."""
DERIVED = "_batch_derived"
"""The field that holds which."""


def derive_batch(args: Any) -> None:  # noqa: ANN401 (a PeftRLConfig, which imports this module)
    """Sets what was left open of the sizes of micro-batches.

    Args:
        args: Changed, before TRL completes them.

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


def note_derived(args: Any, asked: Mapping[str, int | None]) -> None:  # noqa: ANN401 (a PeftRLConfig)
    """Notes which numbers of the batch were derived, for a copy that has another one.

    Args:
        args: Completed by TRL.
        asked: What these numbers were before.
    """
    derived = {name: getattr(args, name) for name in NUMBERS if asked[name] is None}
    setattr(args, DERIVED, " ".join(f"{name}={value}" for name, value in derived.items()) or None)


def forget_derived(args: Any) -> None:  # noqa: ANN401
    """Takes back what was derived and not changed since, which may not fit the copy's other numbers."""
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
