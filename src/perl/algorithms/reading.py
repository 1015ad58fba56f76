"""Which fields of ``train`` an update reads: those that its loss, its advantages and its KL term are made of.

settings -> fields that nothing reads, and why

Rows of losses and estimators say what they read; a field that no row names is read by every update. No torch here.
"""

from collections.abc import Mapping
from typing import Any

from perl.algorithms.estimators import ADVANTAGES, Estimator
from perl.algorithms.kl_place import KL_IN_REWARD, in_loss
from perl.algorithms.registry import LEVEL, LOSSES, Loss

_CORRECTED = "use_bias_correction_kl"
OF_KL = ("kl_estimator", _CORRECTED)
"""Fields that only a KL term reads."""


def sometimes_read() -> frozenset[str]:
    """The fields that some settings read and others do not."""
    rows: list[Loss | Estimator] = [*LOSSES.values(), *ADVANTAGES.values()]
    return frozenset(OF_KL).union(*(row.fields for row in rows))


def unused_fields(settings: Mapping[str, Any]) -> dict[str, str]:
    """The fields that are read under other settings, but not under these.

    Args:
        settings: Fields of ``train``; those that are absent are as by default.

    Returns:
        Field -> what does not read it, and who does, in a few words; empty where the loss or the estimator is unknown,
        which is somebody else's mistake.
    """
    loss = LOSSES.get(settings.get("loss_type", "dapo"))
    estimator = ADVANTAGES.get(settings.get("advantage_estimator", "group"))
    if loss is None or estimator is None:
        return {}
    of_loss = set(loss.fields)
    if "epsilon_high" in of_loss and settings.get("epsilon_high") is None:  # which then is epsilon
        of_loss.add("epsilon")
    if in_loss(settings) and settings.get("use_bias_correction_kl", True):  # by which the KL estimate is multiplied
        of_loss.add(LEVEL)
    found = {
        name: f"loss_type {loss.name} does not read it ({_readers(LOSSES, name)} would)"
        for name in _all_fields(LOSSES) - of_loss
    }
    if LEVEL in found:
        found[LEVEL] = f"loss_type {loss.name} does not read it (its ratio: {loss.level})"
    if "epsilon" in found and "epsilon_high" in of_loss:
        found["epsilon"] = f"loss_type {loss.name} bounds by epsilon_high alone and does not read it"
    of_estimator: tuple[str, ...] = estimator.fields
    who = f"advantage_estimator {estimator.name}"
    if settings.get("multi_objective_aggregation") == "normalize_then_sum":
        of_estimator, who = (), "multi_objective_aggregation normalize_then_sum"
    for name in _all_fields(ADVANTAGES).difference(of_estimator):
        found[name] = f"{who} does not read it ({_readers(ADVANTAGES, name)} would)"
    if not settings.get("beta"):
        found |= {name: "there is no KL term to read it: beta is 0" for name in OF_KL}
    elif not in_loss(settings):
        found[_CORRECTED] = f"{KL_IN_REWARD} takes the divergence off the reward, and no KL term reads it"
    return found


def _all_fields(table: Mapping[str, Loss] | Mapping[str, Estimator]) -> set[str]:
    return {field for row in table.values() for field in row.fields}


def _readers(table: Mapping[str, Loss] | Mapping[str, Estimator], field: str) -> str:
    names = [name for name, row in table.items() if field in row.fields]
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
