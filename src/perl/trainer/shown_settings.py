"""What a run and its card say of a critic and of a KL penalty, beside the settings that every run has.

arguments -> names and words
"""

from typing import Any

from perl.algorithms.critic_settings import (
    CRITIC,
    CRITIC_ADAPTER,
    IN_REWARD,
    PENALTY,
    SETTINGS,
    critic_rate,
    shown_critic,
)
from perl.algorithms.estimators import ADVANTAGES
from perl.methods.registry import Method
from perl.policy.saved.adapter import public_adapter
from perl.trainer.config import own_setting


def shown_algorithm(args: Any, method: Method) -> dict[str, str]:  # noqa: ANN401 (TRL's arguments or ours)
    """Words under the names that cards know.

    Args:
        args: Of the trainer.
        method: Of the policy.
    """
    found = {}
    if own_setting(args, "kl_in_reward") and args.beta:
        found[PENALTY] = IN_REWARD
    if ADVANTAGES[own_setting(args, "advantage_estimator")].critic:
        fields = {name: own_setting(args, name) for name in SETTINGS}
        rate = critic_rate(fields["critic_learning_rate"], args.learning_rate, method.rate)
        found[CRITIC] = shown_critic(fields, rate)
        if fields["critic_adapter"] is not None:
            found[CRITIC_ADAPTER] = public_adapter(fields["critic_adapter"])
    return found
