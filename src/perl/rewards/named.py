"""The rewards that have a name in a recipe, those that are refused by name, and which of them can be negative.

name -> function, lowest and highest score, or why it is refused
"""

import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from perl.algorithms.estimators import ADVANTAGES
from perl.errors import Mistake
from perl.recipe.sections import RewardSetting
from perl.rewards.accuracy import accuracy_reward, partial_answer_reward, reasoning_accuracy_reward
from perl.rewards.countdown import countdown_reward
from perl.rewards.lengths import cosine_length_reward, length_penalty_reward, soft_overlong_reward
from perl.rewards.process.reward import process_reward
from perl.rewards.shaping import format_reward, repetition_penalty_reward, tag_count_reward

# Functions with TRL's signature; what a recipe may set are their keyword-only arguments, all others are columns.
NAMED_REWARDS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "accuracy": accuracy_reward,
        "reasoning_accuracy": reasoning_accuracy_reward,
        "format": format_reward,
        "tag_count": tag_count_reward,
        "length_penalty": length_penalty_reward,
        "cosine_length": cosine_length_reward,
        "soft_overlong": soft_overlong_reward,
        "repetition_penalty": repetition_penalty_reward,
        "countdown": countdown_reward,
        "partial_answer": partial_answer_reward,
    }
)

# Lowest and highest score of each; a word is the argument that says it.
SCORES: Mapping[str, tuple[float | str, float | str]] = MappingProxyType(
    {
        "accuracy": (0.0, 1.0),
        "reasoning_accuracy": (0.0, 1.0),
        "format": (0.0, 1.0),
        "tag_count": (0.0, 1.0),
        "length_penalty": (-0.5, 0.5),
        "cosine_length": ("min_value_wrong", "max_value_correct"),
        "soft_overlong": (-1.0, 0.0),
        "repetition_penalty": ("max_penalty", 0.0),
        "countdown": (0.0, 1.0),
        "partial_answer": (0.0, 1.0),
    }
)

# Made from a recipe's arguments, since they hold a model.
MADE_REWARDS: Mapping[str, Callable[..., Callable[..., Any]]] = MappingProxyType({"process_reward": process_reward})

REFUSED_REWARDS: Mapping[str, str] = MappingProxyType(
    {
        "code": "running generated programs needs a sandbox, which this package is not; call yours (a container, E2B, "
        "SandboxFusion) from a custom reward, package.module:function with workers: N",
    }
)

# Those that judge answers: their gold answers are checked before training, their verifier starts with the run.
JUDGES = (accuracy_reward, reasoning_accuracy_reward, length_penalty_reward, cosine_length_reward)

# Arguments that are the longest completion of the run unless a recipe sets them.
LENGTH_ARGUMENTS = ("max_len", "max_completion_len")


def lowest_score(name: str, setting: RewardSetting) -> float | None:
    """The lowest that a reward adds to a completion's, after weighting; None: not known.

    Args:
        name: Of the reward.
        setting: Its weight and arguments.
    """
    if name not in SCORES:
        return None
    defaults = inspect.signature(NAMED_REWARDS[name]).parameters
    bounds = []
    for bound in SCORES[name]:
        value = setting.args.get(bound, defaults[bound].default) if isinstance(bound, str) else bound
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None  # which is said elsewhere
        bounds.append(setting.weight * value)
    return min(bounds)


def sign_mistakes(sections: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Mistake]]:
    """Rewards that can make the sum negative where the advantages divide by its mean.

    Args:
        sections: The recipe's valid sections by name.

    Returns:
        Key path and mistake of each; nothing where one of the rewards is of the user's own, which may make up for it.
    """
    estimator = ADVANTAGES.get(sections.get("train", {}).get("advantage_estimator", "group"))
    if estimator is None or not estimator.not_negative:
        return []
    lowest = {name: lowest_score(name, setting) for name, setting in sections.get("rewards", {}).items()}
    known = [value for value in lowest.values() if value is not None]
    if len(known) < len(lowest) or sum(known) >= 0:
        return []
    why = f"{estimator.name} divides by the mean of a group's rewards, which must not be negative"
    hint = "leave it out, or an algorithm with another advantage: rloo"
    return [
        (("rewards", name), Mistake(f"adds {value:g} to some completions, and {why}", hint=hint))
        for name, value in lowest.items()
        if value is not None and value < 0
    ]
