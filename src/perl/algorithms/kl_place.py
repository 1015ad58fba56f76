"""Where the KL divergence to the reference acts: in the loss, off the reward, or nowhere.

fields of ``train`` -> place, mistakes

It imports no torch.
"""

from collections.abc import Mapping
from typing import Any

from perl.algorithms.estimators import ADVANTAGES
from perl.errors import Mistake

KL_IN_REWARD = "kl_in_reward"
"""The field that takes beta times the divergence off the reward."""


def off_reward(settings: Mapping[str, Any]) -> bool:
    """Whether the divergence is taken off the rewards.

    Args:
        settings: Fields of ``train``; those that are absent are as by default.
    """
    return bool(settings.get(KL_IN_REWARD) and settings.get("beta"))


def in_loss(settings: Mapping[str, Any]) -> bool:
    """Whether the loss has a KL term; likewise."""
    return bool(settings.get("beta")) and not settings.get(KL_IN_REWARD)


def kl_mistakes(settings: Mapping[str, Any]) -> list[Mistake]:
    """What is wrong with a divergence that is to be taken off the rewards.

    Args:
        settings: All fields of ``train``.
    """
    found: list[Mistake] = []
    if not settings[KL_IN_REWARD]:
        return found
    with_penalty = [name for name, row in ADVANTAGES.items() if row.penalty]
    if settings["advantage_estimator"] not in with_penalty:
        what = f"has no meaning with advantage_estimator {settings['advantage_estimator']}"
        found.append(Mistake(what, KL_IN_REWARD, f"advantage_estimator: {' or '.join(with_penalty)}"))
    if settings["beta"] == 0.0:
        hint = "false, which no KL penalty needs, or a beta above 0"
        found.append(Mistake("takes off the divergence times beta, which is 0", KL_IN_REWARD, hint))
    if (estimator := settings["kl_estimator"]) not in ("k1", "k3"):  # the default says nothing
        what = f"the penalty of a reward is k1, and {estimator} is a term of the loss"
        found.append(Mistake(what, "kl_estimator", f"k1, or {KL_IN_REWARD}: false"))
    return found
