"""What teaches a trainer: rewards, a teacher, or nothing, which is refused.

arguments, reward functions and their weights -> errors that name the argument
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from trl import GRPOConfig

from perl.algorithms.estimators import generations_mistake
from perl.algorithms.named import ALGORITHMS, KEY
from perl.algorithms.reading import sometimes_read
from perl.algorithms.unrewarded import OF_ADVANTAGES, counts, nothing_teaches, without_rewards
from perl.errors import Mistake, RecipeError, raise_all
from perl.policy.sharding import FSDP2


def has_teacher(args: Any) -> bool:  # noqa: ANN401 (TRL's arguments or ours)
    """Whether there is a teacher."""
    return any(getattr(args, f"teacher_{key}", None) is not None for key in ("adapter", "hint", "system_prompt"))


def check_teacher(args: Any) -> None:  # noqa: ANN401 (TRL's arguments or ours)
    """Refuses an algorithm without the teacher that it needs, and a teacher where none can be.

    Raises:
        RecipeError: Says what to set.
    """
    row = ALGORITHMS.get(getattr(args, KEY, None) or "")
    found = []
    if row is not None and row.needs_teacher and not has_teacher(args):
        what = f"{row.name} has nobody to learn from"
        found.append(Mistake(what, "teacher", "teacher: {adapter: RUN}, or {hint: TEXT} or {system_prompt: TEXT}"))
    if has_teacher(args) and getattr(args, "strategy", "") == FSDP2:
        found.append(Mistake("a base in shards (fsdp2) has no teacher", "teacher", "engine.strategy: ddp or zero2"))
    if has_teacher(args) and getattr(args, "peft_method", "") == "full":
        what = "the base itself is trained by peft.method full, and no teacher is left"
        found.append(Mistake(what, "teacher", "a method with an adapter, as lora"))
    raise_all(RecipeError, found)


def lonely(args: Any) -> list[Mistake]:  # noqa: ANN401 (TRL's arguments or ours)
    """What is wrong with a single completion of each prompt where rewards count."""
    alone = generations_mistake(getattr(args, "advantage_estimator", "group"), args.num_generations)
    return [] if alone is None else [alone]


def check_signal(args: GRPOConfig, weights: Sequence[float] | None, *, rewarded: bool) -> None:
    """Refuses a training that nothing teaches, and settings of advantages where only a teacher does.

    Args:
        args: Of the trainer.
        weights: Of its rewards; None: 1 each.
        rewarded: False: no reward was given, and a teacher stands for them.

    Raises:
        RecipeError: Names the argument.
    """
    if rewarded and (weights is None or counts(weights)):
        raise_all(RecipeError, lonely(args))
        return
    if not has_teacher(args):
        raise_all(RecipeError, nothing_teaches(weights or (), "reward_weights"))
        return
    names = sometimes_read().union(OF_ADVANTAGES, ("beta", "kl_in_reward", "loss_type"))
    usual = {field.name: field.default for field in dataclasses.fields(args) if field.name in names}
    row = ALGORITHMS.get(getattr(args, KEY, None) or "")
    given = {name: getattr(args, name) for name in usual}
    raise_all(RecipeError, without_rewards(row, given, usual))
