"""The settings of PPO's critic: the learning rate where none is set, and how a card says them.

fields of ``train`` -> rate, words

It imports no torch.
"""

import re
from collections.abc import Mapping
from typing import Any

from perl.algorithms.train_fields import defaults_of

FASTER = 10.0
"""The critic's learning rate over that of a LoRA as policy, where none is set."""
CRITIC, CRITIC_ADAPTER, PENALTY = "critic", "critic adapter", "KL penalty"
"""What a run and its card call a critic, the one that it started from, a KL divergence in the reward."""
IN_REWARD = "taken off the reward, estimator k1"
"""What they say of the latter."""
_NUMBER = r"[\d.e+-]+"
WORDS = re.compile(
    rf"LoRA of rank \d+ and a value head, learning rate {_NUMBER}, (?:\d+ steps before the policy's, )?"
    rf"gamma {_NUMBER}, lambda {_NUMBER}, (?:no value clip|value clip {_NUMBER})"
)
"""The form of :func:`shown_critic`."""


def critic_rate(asked: float | None, policys: float, of_lora: float) -> float:
    """The learning rate of a critic.

    Args:
        asked: ``critic_learning_rate``.
        policys: ``learning_rate``.
        of_lora: The usual rate of the policy's method over a LoRA's. What its adapter wants more or less than a LoRA
            does is not the critic's, which is one.
    """
    return float(FASTER * policys / of_lora if asked is None else asked)


def shown_critic(fields: Mapping[str, Any], rate: float) -> str:
    """A critic in one line.

    Args:
        fields: Of ``train``; those that are absent are as by default.
        rate: From :func:`critic_rate`.
    """
    found = {name: fields.get(name, usual) for name, usual in defaults_of("critic").items()}
    waits = f"{found['critic_warmup_steps']} steps before the policy's, " if found["critic_warmup_steps"] else ""
    clip = "no value clip" if found["value_clip"] is None else f"value clip {found['value_clip']:g}"
    return (
        f"LoRA of rank {found['critic_rank']} and a value head, learning rate {rate:g}, {waits}"
        f"gamma {found['gae_gamma']:g}, lambda {found['gae_lambda']:g}, {clip}"
    )
