"""What the name of an algorithm sets of a script's arguments, and which of them override it.

fields that were given, name -> fields

A recipe has its name resolved before its arguments are made (``perl.recipe.algorithm_name``).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perl.algorithms.named import ALGORITHMS, KEY, find_algorithm
from perl.algorithms.overrides import contradictions
from perl.algorithms.reading import sometimes_read
from perl.errors import RecipeError, raise_all

APPLIED = "_algorithm_applied"
"""The field that holds the name whose settings are in the other fields already."""


def given_fields(kind: type[Any], positional: Sequence[Any], named: Mapping[str, Any]) -> frozenset[str]:
    """Names of the fields that a constructor's call gives.

    Args:
        kind: The dataclass.
        positional: Arguments without a name.
        named: Arguments with one.

    Returns:
        Empty if all are given: then it is a parser or ``dataclasses.replace`` that fills in every default.
    """
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    given = {*names[: len(positional)], *named}
    return frozenset() if given >= set(names) else frozenset(given)


def apply_algorithm(args: Any, given: frozenset[str]) -> None:  # noqa: ANN401 (PeftRLConfig, which imports this)
    """Sets the fields that ``args.algorithm`` names, but for those that were given or differ from their defaults.

    Where another name was applied before, fields that are as that one set them do not count as given.

    Args:
        args: Changed.
        given: See :func:`given_fields`.

    Raises:
        RecipeError: There is no such algorithm, or an argument leaves nothing of it, or nothing reads an argument.
    """
    applied, name = getattr(args, APPLIED), getattr(args, KEY)
    row = find_algorithm(name) if name is not None else None
    if row is not None and applied != name:
        usual = _defaults(args, row.sets)
        if applied in ALGORITHMS:
            usual |= _defaults(args, ALGORITHMS[applied].sets) | ALGORITHMS[applied].sets
        for key in [key for key, value in usual.items() if key not in given and getattr(args, key) == value]:
            setattr(args, key, {**_defaults(args, [key]), **row.sets}[key])
    if row is not None:
        keys = row.sets.keys() | sometimes_read()
        raise_all(RecipeError, contradictions(row, {key: getattr(args, key) for key in keys}, _defaults(args, keys)))
    setattr(args, APPLIED, name)


def check_applied(args: Any) -> None:  # noqa: ANN401 (TRL's arguments or ours)
    """Refuses a name that was written into the arguments after they were made, when it sets nothing any more.

    Raises:
        RecipeError: It was.
    """
    name = getattr(args, KEY, None)
    if name != getattr(args, APPLIED, None):
        what = f"{name!r} was set after the arguments were made, and sets nothing then"
        raise RecipeError(what, KEY, f"PeftRLConfig({KEY}={name!r}, ...)")


def _defaults(args: Any, names: Iterable[str]) -> dict[str, Any]:  # noqa: ANN401 (PeftRLConfig)
    fields = {field.name: field.default for field in dataclasses.fields(args)}
    return {name: fields[name] for name in names}
