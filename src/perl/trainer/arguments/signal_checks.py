"""What teaches a trainer: rewards, a critic beside them, chosen tokens, a teacher, or nothing, which is refused.

arguments, reward functions and their weights -> errors that name the argument
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from trl import GRPOConfig

from perl.algorithms.estimators import ADVANTAGES, generations_mistake
from perl.algorithms.named import ALGORITHMS, KEY
from perl.algorithms.overrides import FIELDS_OF_ADVANTAGES, counts, has_signal, nothing_teaches, without_rewards
from perl.algorithms.reading import sometimes_read
from perl.algorithms.registry import LOSSES
from perl.algorithms.train_fields import defaults_of, train_fields
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


def single_completion(args: Any, *, rewarded: bool) -> list[Mistake]:  # noqa: ANN401 (TRL's arguments or ours)
    """What is wrong with a single completion of each prompt.

    Args:
        args: Of the trainer.
        rewarded: Whether a reward counts.
    """
    signal = has_signal(vars(args), rewarded=rewarded)
    found = generations_mistake(getattr(args, "advantage_estimator", "group"), args.num_generations, signal=signal)
    return [] if found is None else [found]


def taught_alone(args: Any, *, rewarded: bool, continued: bool) -> bool:  # noqa: ANN401 (TRL's arguments or ours)
    """Whether a teacher alone gives the first step a gradient.

    A KL term gives none where the policy begins as its reference, as a new adapter does.

    Args:
        args: Of the trainer.
        rewarded: Whether a reward counts.
        continued: Whether an adapter is continued.
    """
    return not rewarded and not getattr(args, "entropy_weight", 0.0) and not (args.beta and continued)


def check_signal(args: GRPOConfig, weights: Sequence[float] | None, *, rewarded: bool) -> None:
    """Refuses a training that nothing teaches, and settings of advantages where only a teacher does.

    Args:
        args: Of the trainer.
        weights: Of its rewards; None: 1 each.
        rewarded: False: no reward was given, and a teacher stands for them.

    Raises:
        RecipeError: Names the argument.
    """
    if weights is not None and not weights:  # TRL says how many there must be
        return
    rewarded = rewarded and (weights is None or counts(weights))
    if not rewarded and not has_teacher(args):
        raise_all(RecipeError, nothing_teaches(weights or (), "reward_weights"))
    raise_all(RecipeError, single_completion(args, rewarded=rewarded))
    if rewarded:
        return
    names = sometimes_read().union(FIELDS_OF_ADVANTAGES, defaults_of("objective"), ("beta", "loss_type"))
    usual = {field.name: field.default for field in dataclasses.fields(args) if field.name in names}
    row = ALGORITHMS.get(getattr(args, KEY, None) or "")
    given = {name: getattr(args, name) for name in usual}
    raise_all(RecipeError, without_rewards(row, given, usual))


def critic_mistakes(args: Any) -> list[Mistake]:  # noqa: ANN401 (a PeftRLConfig, which imports this module)
    """Settings of a critic that is not trained, or that cannot be; an estimator that a single completion leaves empty.

    Args:
        args: Before TRL has looked at them.
    """
    row = ADVANTAGES.get(args.advantage_estimator)
    if row is None:  # said elsewhere
        return []
    found = single_completion(args, rewarded=not has_teacher(args))  # beside a teacher this is known later
    if row.critic:
        return found + _cannot_be_trained(args)
    with_critic = " or ".join(name for name, row in ADVANTAGES.items() if row.critic)
    for name, usual in defaults_of("critic").items():
        if getattr(args, name) != usual:
            what = f"belongs to a critic, and advantage_estimator {row.name} has none"
            found.append(Mistake(what, name, f"advantage_estimator: {with_critic}, or algorithm: ppo"))
    return found


def _cannot_be_trained(args: Any) -> list[Mistake]:  # noqa: ANN401
    """What a critic does not go with: it needs a frozen base, run layer by layer as it stands."""
    needed = f"advantage_estimator {args.advantage_estimator} trains a critic"
    found = []
    if 0 < args.max_steps <= args.critic_warmup_steps:
        what = f"the policy waits for {args.critic_warmup_steps} steps, and there are only {args.max_steps}"
        found.append(Mistake(what, "critic_warmup_steps", f"fewer than {args.max_steps}"))
    if args.peft_method == "full" and args.peft_type is None:
        what = f"{needed} on the frozen base, and full trains the base itself"
        found.append(Mistake(what, "peft_method", "any other method, or an algorithm without a critic"))
    if args.fp16:
        found.append(Mistake(f"{needed}, whose loss is not scaled", "fp16", "bf16: true"))
    for name in ("compile_layers", "torch_compile"):
        if getattr(args, name):
            found.append(Mistake(f"{needed} by hooks, which compiled layers may not run", name, "false"))
    return found


def selection_mistakes(args: Any) -> list[Mistake]:  # noqa: ANN401 (a PeftRLConfig, which imports this module)
    """Settings that the loss does not read, that contradict each other, or that leave no single tokens to select.

    Args:
        args: Before TRL has looked at them.
    """
    row = LOSSES.get(args.loss_type)
    if row is None:  # said elsewhere
        return []
    found = []
    for name in dict.fromkeys(name for other in LOSSES.values() for name in other.fields if train_fields()[name].ours):
        if name not in row.fields and getattr(args, name) != train_fields()[name].default:
            readers = " or ".join(other.name for other in LOSSES.values() if name in other.fields)
            what = f"belongs to {readers}, and loss_type {row.name} does not read it"
            found.append(Mistake(what, name, f"algorithm: {readers}"))
    if row.selection is None:
        return found
    if "cov_low" in row.fields and not args.cov_low < args.cov_high:
        found.append(Mistake(f"must be a number below cov_high {args.cov_high:g}, not {args.cov_low:g}", "cov_low"))
    if args.importance_sampling_level != "token":
        what = (
            f"{args.importance_sampling_level} gives a completion one ratio, and {row.name} treats single tokens apart"
        )
        found.append(Mistake(what, "importance_sampling_level", "token"))
    return found
