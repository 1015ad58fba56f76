"""Overrides of an algorithm's settings that are refused: those that leave nothing of it, and those that nothing reads.

the algorithm, fields that are given, their defaults -> mistakes

It imports no torch.
"""

import math
from collections.abc import Mapping
from typing import Any

from perl.algorithms.algorithm import Algorithm, in_words, shown_value
from perl.algorithms.reading import penalised, unread
from perl.errors import Mistake

_DECIDES_WHAT_IS_READ = ("loss_type", "advantage_estimator", "multi_objective_aggregation")


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
        elif name == "kl_estimator" and value != "k1" and penalised({**row.sets, **given}):
            what = f"{value} changes nothing: the penalty of a reward is k1, and no KL term is in the loss"
            found.append(Mistake(what, name, "leave it out, or kl_in_reward: false"))
    return found or _idle(row, given, {**usual, **row.sets})


def _idle(row: Algorithm, given: Mapping[str, Any], usual: Mapping[str, Any]) -> list[Mistake]:
    """Settings that nothing reads: of those that make the algorithm, and of those that were written."""
    idle = unread({**row.sets, **given})
    lost = [name for name in row.essential if name in idle]
    if lost:  # for another loss, or other advantages
        changed = [name for name in _DECIDES_WHAT_IS_READ if name in given and given[name] != usual[name]]
        where = changed[0] if changed else lost[0]
        what = f"{given.get(where)!r} leaves nothing of {row.name}: {lost[0]} {row.settings[lost[0]]}: {idle[lost[0]]}"
        return [Mistake(what, where, f"leave {where} or the algorithm out")]
    written = [name for name in given if name in idle and in_words(name, given[name]) != usual.get(name, ...)]
    return [
        Mistake(f"{shown_value(given[name])} changes nothing: {idle[name]}", name, "leave it out") for name in written
    ]
