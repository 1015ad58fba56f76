"""What is wrong with the settings of a critic, and with a single completion of each prompt.

arguments -> mistakes under the names of the arguments
"""

import math
from typing import Any

from perl.algorithms.estimators import ADVANTAGES, generations_mistake
from perl.errors import Mistake
from perl.methods.registry import Method

SETTINGS: dict[str, Any] = {
    "gae_gamma": 1.0,
    "gae_lambda": 0.95,
    "value_clip": 0.2,
    "critic_learning_rate": None,
    "critic_rank": 16,
    "critic_warmup_steps": 0,
    "critic_adapter": None,
}
"""What only a critic reads -> its default."""
FASTER = 10.0
"""The critic's learning rate over that of a LoRA as policy, where none is set."""


def critic_rate(args: Any, method: Method) -> float:  # noqa: ANN401 (TRL's arguments or ours)
    """The learning rate of a critic.

    Args:
        args: Of the trainer.
        method: Of the policy. What its adapter wants more or less than a LoRA does is not the critic's, which is one.
    """
    asked = getattr(args, "critic_learning_rate", None)
    return float(FASTER * args.learning_rate / method.rate if asked is None else asked)


def critic_mistakes(args: Any) -> list[Mistake]:  # noqa: ANN401 (a PeftRLConfig, which imports this module)
    """Settings of a critic that is not trained, or that cannot be; an estimator that a single completion leaves empty.

    Args:
        args: Before TRL has looked at them.
    """
    row = ADVANTAGES.get(args.advantage_estimator)
    if row is None:  # said elsewhere
        return []
    alone = generations_mistake(row.name, args.num_generations)
    found = [] if alone is None else [alone]
    if row.critic:
        return found + _impossible(args) + _cannot_be_trained(args)
    with_critic = " or ".join(name for name, row in ADVANTAGES.items() if row.critic)
    for name, usual in SETTINGS.items():
        if getattr(args, name) != usual:
            what = f"belongs to a critic, and advantage_estimator {row.name} has none"
            found.append(Mistake(what, name, f"advantage_estimator: {with_critic}, or algorithm: ppo"))
    return found


def _impossible(args: Any) -> list[Mistake]:  # noqa: ANN401
    """Numbers out of bounds."""
    bounds = {
        "gae_gamma": ("from 0 to 1", 0 <= args.gae_gamma <= 1),
        "gae_lambda": ("from 0 to 1", 0 <= args.gae_lambda <= 1),
        "value_clip": ("greater than 0, or null for no bound", args.value_clip is None or args.value_clip > 0),
        "critic_learning_rate": (
            "a finite number of 0 or more",
            args.critic_learning_rate is None or 0 <= args.critic_learning_rate < math.inf,
        ),
        "critic_rank": ("1 or more", args.critic_rank >= 1),
        "critic_warmup_steps": ("0 or more", args.critic_warmup_steps >= 0),
    }
    found = [
        Mistake(f"must be {what}, not {getattr(args, name)}", name) for name, (what, ok) in bounds.items() if not ok
    ]
    if 0 < args.max_steps <= args.critic_warmup_steps:
        what = f"the policy waits for {args.critic_warmup_steps} steps, and there are only {args.max_steps}"
        found.append(Mistake(what, "critic_warmup_steps", f"fewer than {args.max_steps}"))
    return found


def _cannot_be_trained(args: Any) -> list[Mistake]:  # noqa: ANN401
    """What a critic does not go with: it needs a frozen base, run layer by layer as it stands."""
    needed = f"advantage_estimator {args.advantage_estimator} trains a critic"
    found = []
    if args.peft_method == "full" and args.peft_type is None:
        what = f"{needed} on the frozen base, and full trains the base itself"
        found.append(Mistake(what, "peft_method", "any other method, or an algorithm without a critic"))
    if args.fp16:
        found.append(Mistake(f"{needed}, whose loss is not scaled", "fp16", "bf16: true"))
    for name in ("compile_layers", "torch_compile"):
        if getattr(args, name):
            found.append(Mistake(f"{needed} by hooks, which compiled layers may not run", name, "false"))
    return found
