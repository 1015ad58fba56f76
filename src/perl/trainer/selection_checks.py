"""What is wrong with the settings of losses that select tokens by their covariance.

arguments -> mistakes under the names of the arguments
"""

from typing import Any

from perl.algorithms.registry import LOSSES
from perl.errors import Mistake

SETTINGS: dict[str, float] = {"cov_fraction": 2e-4, "cov_low": 1.0, "cov_high": 5.0, "cov_kl_weight": 1.0}
"""What only such losses read -> its default."""


def selection_mistakes(args: Any) -> list[Mistake]:  # noqa: ANN401 (a PeftRLConfig, which imports what imports this)
    """Settings that the loss does not read, that contradict each other, or that leave no single tokens to select.

    Args:
        args: Before TRL has looked at them.
    """
    row = LOSSES.get(args.loss_type)
    if row is None:  # said elsewhere
        return []
    found = []
    for name, usual in SETTINGS.items():
        if name not in row.fields and getattr(args, name) != usual:
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
