"""The rewards that a trainer is given, and whether any of them counts.

reward functions, arguments -> reward functions and their weights, as TRL's constructor takes them
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trl import GRPOConfig, GRPOTrainer

from perl.rewards.named import JUDGES
from perl.rewards.process.reward import with_process_reward
from perl.rewards.verifier import start_workers
from perl.trainer.config import PeftRLConfig
from perl.trainer.overrides import MAY_NEED_NO_REWARD, is_replaced
from perl.trainer.signal_checks import check_signal


@dataclass(frozen=True)
class GivenRewards:
    """What TRL's constructor takes: reward functions, their processing classes, and their weights, None: 1 each."""

    functions: Any
    processing_classes: Any
    weights: list[float] | None


def given_rewards(
    trainer: GRPOTrainer,
    reward_funcs: Any,  # noqa: ANN401 (TRL's signature)
    processing_classes: Any,  # noqa: ANN401
    args: GRPOConfig,
) -> GivenRewards:
    """The rewards of a trainer, with the process reward of its arguments.

    Args:
        trainer: Not constructed yet; a subclass may make advantages of something else than rewards.
        reward_funcs: As TRL takes them.
        processing_classes: Likewise.
        args: Of the trainer.

    Raises:
        RecipeError: Nothing would be taught, or settings act on nothing without a reward.
    """
    if any(judge in (reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]) for judge in JUDGES):
        start_workers()  # they import while the weights are read
    if not isinstance(args, PeftRLConfig):
        found = GivenRewards(reward_funcs, processing_classes, args.reward_weights)
    elif not reward_funcs and args.teacher.acts and not args.process_reward_weight:  # of TRL's arguments one is needed
        found = GivenRewards([no_reward], None, args.reward_weights or None)
    else:
        made: Any = args.process_reward_kwargs  # text only until transformers has parsed it
        funcs, weights = with_process_reward(reward_funcs, args.reward_weights, args.process_reward_weight, made)
        if isinstance(processing_classes, list) and funcs is not reward_funcs:
            processing_classes = [*processing_classes, None]
        found = GivenRewards(funcs, processing_classes, weights)
    if not is_replaced(trainer, *MAY_NEED_NO_REWARD):
        check_signal(args, found.weights, rewarded=found.functions != [no_reward])
    return found


def is_rewarded(trainer: GRPOTrainer) -> bool:
    """Whether any reward of a trainer counts; a teacher may teach alone."""
    return bool(trainer.reward_weights.any()) and no_reward not in trainer.reward_funcs


def no_reward(completions: Sequence[Any], **_: Any) -> list[float]:  # noqa: ANN401 (TRL's signature)
    """0 for every completion: stands for rewards where a teacher alone teaches."""
    return [0.0] * len(completions)
