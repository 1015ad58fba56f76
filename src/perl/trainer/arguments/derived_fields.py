"""Fields of a script's arguments that others set: by the name of an algorithm, and the batch in TRL's numbers.

fields that were given, name -> fields; prompts_per_step or TRL's own numbers -> micro-batches of completions

A recipe has its name resolved before its arguments are made (``perl.recipe.layers``).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trl import GRPOConfig

from perl.algorithms.named import ALGORITHMS, KEY, find_algorithm
from perl.algorithms.overrides import contradictions
from perl.algorithms.reading import sometimes_read
from perl.errors import RecipeError, raise_all
from perl.recipe.batch_plan import plan_batch
from perl.recipe.recipe import world_size

APPLIED = "_algorithm_applied"
"""The field that holds the name whose settings are in the other fields already."""


def given_fields(kind: type[Any], positional: Sequence[Any], named: Mapping[str, Any]) -> frozenset[str]:
    """Names of the fields that a constructor's call gives.

    Args:
        kind: The dataclass.
        positional: Arguments without a name.
        named: Arguments with one.

    Returns:
        Empty if all are given: then it is a parser or ``dataclasses.replace`` that fills in every default.
    """
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    given = {*names[: len(positional)], *named}
    return frozenset() if given >= set(names) else frozenset(given)


def apply_algorithm(args: Any, given: frozenset[str]) -> None:  # noqa: ANN401 (PeftRLConfig, which imports this)
    """Sets the fields that ``args.algorithm`` names, but for those that were given or differ from their defaults.

    Where another name was applied before, fields that are as that one set them do not count as given.

    Args:
        args: Changed.
        given: See :func:`given_fields`.

    Raises:
        RecipeError: There is no such algorithm, or an argument leaves nothing of it, or nothing reads an argument.
    """
    applied, name = getattr(args, APPLIED), getattr(args, KEY)
    row = find_algorithm(name) if name is not None else None
    if row is not None and applied != name:
        usual = _defaults(args, row.sets)
        if applied in ALGORITHMS:
            usual |= _defaults(args, ALGORITHMS[applied].sets) | ALGORITHMS[applied].sets
        for key in [key for key, value in usual.items() if key not in given and getattr(args, key) == value]:
            setattr(args, key, {**_defaults(args, [key]), **row.sets}[key])
    if row is not None:
        keys = row.sets.keys() | sometimes_read()
        raise_all(RecipeError, contradictions(row, {key: getattr(args, key) for key in keys}, _defaults(args, keys)))
    setattr(args, APPLIED, name)


def check_applied(args: Any) -> None:  # noqa: ANN401 (TRL's arguments or ours)
    """Refuses a name that was written into the arguments after they were made, when it sets nothing any more.

    Raises:
        RecipeError: It was.
    """
    name = getattr(args, KEY, None)
    if name != getattr(args, APPLIED, None):
        what = f"{name!r} was set after the arguments were made, and sets nothing then"
        raise RecipeError(what, KEY, f"PeftRLConfig({KEY}={name!r}, ...)")


def _defaults(args: Any, names: Iterable[str]) -> dict[str, Any]:  # noqa: ANN401 (PeftRLConfig)
    fields = {field.name: field.default for field in dataclasses.fields(args)}
    return {name: fields[name] for name in names}


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
    steps: int = args.steps_per_generation or args.gradient_accumulation_steps or 1
    return (args.per_device_train_batch_size or 1) * steps * world_size() if asked is None else asked
