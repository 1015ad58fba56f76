"""Settings of an algorithm that are refused: they leave nothing of it, nothing reads them, or no reward counts.

the algorithm, fields that are given, their defaults, reward weights -> mistakes

It imports no torch.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from perl.algorithms.algorithm import Algorithm, in_words, shown_value
from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.kl_place import KL_IN_REWARD, off_reward
from perl.algorithms.named import KEY
from perl.algorithms.reading import OF_KL, sometimes_read, unused_fields
from perl.algorithms.registry import LEVEL, LOSSES
from perl.errors import Mistake

_DECIDES_WHAT_IS_READ = ("loss_type", "advantage_estimator", "multi_objective_aggregation")
FIELDS_OF_ADVANTAGES = ("advantage_estimator", "multi_objective_aggregation")
"""Fields that say how advantages are made, whichever rewards there are."""


def contradictions(row: Algorithm, given: Mapping[str, Any], usual: Mapping[str, Any]) -> list[Mistake]:
    """Overrides that leave nothing of an algorithm, or that nothing reads; their places are the fields' names.

    Args:
        row: The algorithm.
        given: Fields of ``train``.
        usual: Default of each of them that the name does not set; a field that is as usual is not an override.
    """
    found, changed = [], row.changed(given)
    for name, value in changed.items():
        if name in row.essential:
            what = f"{value!r} leaves nothing of {row.name}, which is {row.settings[name]!r} there"
            found.append(Mistake(what, name, f"leave {name} or the algorithm out"))
        elif isinstance(value, float) and not math.isfinite(value):
            found.append(Mistake(f"must be a finite number beside an algorithm's name, not {value:g}", name))
        elif isinstance(value, int | float) and value < row.least.get(name, value):
            what = f"{value!r} is below {row.least[name]:g}: in {row.name} it bounds the ratio itself"
            found.append(Mistake(what, name, f"{row.settings[name]:g} is usual"))
        elif name == "kl_estimator" and value != "k1" and off_reward({**row.sets, **given}):
            what = f"{value} changes nothing: the penalty of a reward is k1, and no KL term is in the loss"
            found.append(Mistake(what, name, f"leave it out, or {KL_IN_REWARD}: false"))
    if found:
        return found
    # Settings that nothing reads: of those that make the algorithm, and of those that were written.
    usual, idle = {**usual, **row.sets}, unused_fields({**row.sets, **given})
    lost = [name for name in row.essential if name in idle]
    if lost:  # for another loss, or other advantages
        others = [name for name in _DECIDES_WHAT_IS_READ if name in given and given[name] != usual[name]]
        where = others[0] if others else lost[0]
        what = f"{given.get(where)!r} leaves nothing of {row.name}: {lost[0]} {row.settings[lost[0]]}: {idle[lost[0]]}"
        return [Mistake(what, where, f"leave {where} or the algorithm out")]
    written = [name for name in given if name in idle and in_words(name, given[name]) != usual.get(name, ...)]
    return [
        Mistake(f"{shown_value(given[name])} changes nothing: {idle[name]}", name, "leave it out") for name in written
    ]


def counts(weights: Iterable[float]) -> bool:
    """Whether any reward counts, by the weights of all."""
    return any(weight != 0 for weight in weights)


def has_signal(settings: Mapping[str, Any], *, rewarded: bool) -> bool:
    """Whether there is anything to make advantages of.

    Args:
        settings: Fields of ``train``.
        rewarded: Whether a reward counts; else a KL penalty may make them.
    """
    return rewarded or off_reward(settings)


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
    # Fields that act on advantages alone, which all are 0; what nothing reads is refused already.
    loss, acting = LOSSES.get(settings.get("loss_type", "dapo")), set[str]()
    if settings.get("beta"):
        acting = {*OF_KL, *([LEVEL] if settings.get("use_bias_correction_kl", True) else [])}
    if loss is not None and loss.selection is not None and loss.selection.acts:  # whatever the advantage
        acting |= set(loss.fields)
    idle = {*sometimes_read(), *FIELDS_OF_ADVANTAGES} - acting - unused_fields(settings).keys()
    written = [name for name in given if name in idle and in_words(name, given[name]) != usual.get(name, ...)]
    what = "changes nothing: the teacher alone teaches, and no reward makes an advantage"
    return [Mistake(f"{shown_value(given[name])} {what}", name, "leave it out, or name a reward") for name in written]
