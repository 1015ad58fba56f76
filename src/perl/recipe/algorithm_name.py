"""The name of an algorithm in a recipe: where it may stand, which settings it replaces, what it sets.

settings of a file or of the command line, with a name -> settings without the name

A setting that stands beside the name, or is written later, overrides what the name sets; one that was there before is
replaced, since the name was chosen after it.
"""

from collections.abc import Mapping
from typing import Any

from perl.algorithms.algorithm import Algorithm
from perl.algorithms.named import ALGORITHMS, KEY, find_algorithm
from perl.algorithms.overrides import contradictions
from perl.algorithms.reading import unused_fields
from perl.algorithms.train_fields import train_fields
from perl.errors import Mistake, RecipeError

_TRAIN = "train"


def move_to_the_top(values: dict[str, Any], origins: dict[tuple[str, ...], str]) -> None:
    """Moves a name that stands in ``train`` to the top of the same file.

    Args:
        values: Of one file, one mapping or the command line; changed.
        origins: Key path -> where it was written; changed.

    Raises:
        RecipeError: There is another name at the top.
    """
    train = values.get(_TRAIN)
    if not isinstance(train, Mapping) or KEY not in train:
        return
    name = train[KEY]
    where = f"{origins[_TRAIN, KEY]}: {_TRAIN}.{KEY}" if (_TRAIN, KEY) in origins else f"{_TRAIN}.{KEY}"
    if values.get(KEY, name) != name:
        raise RecipeError(f"{name!r} contradicts {KEY}: {values[KEY]!r}", where, "write it once, at the top")
    values[_TRAIN] = {key: value for key, value in train.items() if key != KEY}
    values[KEY] = name
    if (_TRAIN, KEY) in origins:
        origins.setdefault((KEY,), origins.pop((_TRAIN, KEY)))


def without_replaced(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Earlier settings without those that a later name replaces.

    Args:
        before: Of the earlier file.
        after: Of the later one, which may have a name.
    """
    row, train = _row(after.get(KEY)), before.get(_TRAIN)
    if row is None or not isinstance(train, Mapping):
        return dict(before)
    later = after.get(_TRAIN)
    gone = {*row.sets, *unused_fields({**row.sets, **(later if isinstance(later, Mapping) else {})})}
    earlier = _row(before.get(KEY))
    if earlier is not None:  # a saved recipe has what its name set written out
        gone |= {key for key, value in earlier.sets.items() if train.get(key) == value}
    return {**before, _TRAIN: {key: value for key, value in train.items() if key not in gone}}


def resolve(values: dict[str, Any], origins: dict[tuple[str, ...], str]) -> tuple[str | None, list[Mistake]]:
    """Takes the name out of a recipe's settings and puts what it sets into ``train``.

    Args:
        values: All files merged; changed.
        origins: Likewise; what the name sets is written where the name is.

    Returns:
        The name, and what is wrong; the places are key paths.
    """
    name = values.pop(KEY, None)
    if name is None:
        return None, []
    try:
        row = find_algorithm(name)
    except RecipeError as error:
        return None, list(error.mistakes)
    train = values.get(_TRAIN)
    train = {} if train is None else train
    if not isinstance(train, Mapping):
        return name, []
    values[_TRAIN] = {**row.sets, **train}
    for key in row.sets.keys() - train.keys():
        origins[_TRAIN, key] = origins.get((KEY,), "recipe")
    found = contradictions(row, train, {key: field.default for key, field in train_fields().items()})
    return name, [Mistake(mistake.message, f"{_TRAIN}.{mistake.where}", mistake.hint) for mistake in found]


def _row(name: object) -> Algorithm | None:
    return ALGORITHMS.get(name) if isinstance(name, str) else None
