"""What is wrong with the settings of a critic, and with a single completion of each prompt.

arguments -> mistakes under the names of the arguments
"""

from typing import Any

from perl.algorithms.critic_settings import SETTINGS
from perl.algorithms.estimators import ADVANTAGES
from perl.errors import Mistake
from perl.trainer.signal_checks import has_teacher, single_completion


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
    for name, usual in SETTINGS.items():
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
