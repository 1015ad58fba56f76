"""Whether a completion's reward can be negative, of rewards that have a name.

weights and arguments of a recipe -> lowest score of each, mistakes of an estimator that takes no negative rewards

What a function of the user's gives is not known before it is called; the trainer looks at it then.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Any

from perl.algorithms.estimators import ADVANTAGES
from perl.errors import Mistake
from perl.recipe.sections import RewardSetting
from perl.rewards.named import NAMED_REWARDS, SCORES


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
