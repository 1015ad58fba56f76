"""What is wrong with settings where no reward counts: nothing teaches, or a teacher does and settings act on nothing.

reward weights, whether there is a teacher, settings -> mistakes

It imports no torch.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from perl.algorithms.algorithm import Algorithm, in_words, shown_value
from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.named import KEY
from perl.algorithms.reading import OF_KL, penalised, sometimes_read, unread
from perl.algorithms.registry import LEVEL, LOSSES
from perl.errors import Mistake

FIELDS_OF_ADVANTAGES = ("advantage_estimator", "multi_objective_aggregation")
"""Fields that say how advantages are made, whichever rewards there are."""


def counts(weights: Iterable[float]) -> bool:
    """Whether any reward counts, by the weights of all."""
    return any(weight != 0 for weight in weights)


def has_signal(settings: Mapping[str, Any], *, rewarded: bool) -> bool:
    """Whether there is anything to make advantages of.

    Args:
        settings: Fields of ``train``.
        rewarded: Whether a reward counts; else a KL penalty may make them.
    """
    return rewarded or penalised(settings)


def nothing_teaches(weights: Iterable[float], where: str) -> list[Mistake]:
    """What is wrong where every reward has the weight 0 and there is no teacher.

    Args:
        weights: Of all rewards.
        where: The setting that holds them.
    """
    if counts(weights):
        return []
    return [Mistake("every reward has the weight 0, so nothing is taught", where, "a weight above 0, or a teacher")]


def without_rewards(row: Algorithm | None, given: Mapping[str, Any], usual: Mapping[str, Any]) -> list[Mistake]:
    """What is wrong with settings where a teacher alone teaches; their places are the fields' names.

    A critic would learn the value of nothing. Beside an algorithm's name a setting that only rewards make count is a
    mistake; without one such settings are taken, as TRL takes them.

    Args:
        row: The algorithm, if it has a name.
        given: Fields of ``train``; those that are absent are as usual.
        usual: Default of each field.
    """
    usual = {**usual, **(row.sets if row is not None else {})}
    settings = {**usual, **given}
    if has_signal(settings, rewarded=False):
        return []
    estimator = ADVANTAGES.get(settings.get("advantage_estimator", "group"))
    if estimator is not None and estimator.critic:
        what = f"{estimator.name} trains a critic, and without a reward it has nothing to learn"
        return [Mistake(what, "advantage_estimator", "a reward with a weight, or an algorithm without a critic")]
    if row is None:
        return []
    if not row.needs_teacher:
        what = f"{row.name} makes advantages of rewards, and none counts: the teacher alone teaches"
        return [Mistake(what, KEY, "algorithm: opd, or a reward with a weight")]
    idle = _idle(settings) - unread(settings).keys()  # which is refused already
    written = [name for name in given if name in idle and in_words(name, given[name]) != usual.get(name, ...)]
    what = "changes nothing: the teacher alone teaches, and no reward makes an advantage"
    return [Mistake(f"{shown_value(given[name])} {what}", name, "leave it out, or name a reward") for name in written]


def _idle(settings: Mapping[str, Any]) -> set[str]:
    """Fields that act on advantages alone, which all are 0."""
    idle = sometimes_read().union(FIELDS_OF_ADVANTAGES)
    if settings.get("beta"):
        level = {LEVEL} if settings.get("use_bias_correction_kl", True) else set()
        idle = idle.difference(OF_KL, level)
    loss = LOSSES.get(settings.get("loss_type", "dapo"))
    acts = loss is not None and loss.selection is not None and loss.selection.acts  # whatever the advantage
    return set(idle.difference(loss.fields if loss is not None and acts else ()))
