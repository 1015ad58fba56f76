"""Arguments of a script's evaluation: each of a type that it can have, before anything is looked for.

EvalSettings, arguments of ``perl.evaluate`` -> the same as plain values, or a line for each that is wrong
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, get_type_hints

from pydantic import ValidationError, create_model

from perl.errors import Mistake, PerlError, raise_all
from perl.recipe.layers import Layer
from perl.recipe.section import Section
from perl.recipe.validation import mistakes_of

_HINTS = {
    "limit": "as in 50, or {'aime24': 10}",
    "few_shot": "as in 3, or {'gsm8k': 8}",
    "columns": "as in {'prompt': 'question'}",
    "pass_at": "as in (3, 10)",
    "servers": "as in ('http://localhost:8000',)",
    "tasks": "as in 'my.jsonl', or ['aime24', 'math_500']",
}
_MODELS: dict[type[Any], type[Section]] = {}
_YAML = re.compile(r"(?<=, not )(true|false|null)$")
_PYTHON = {"true": "True", "false": "False", "null": "None"}


class _Call(Section):
    """Arguments of ``perl.evaluate``."""

    adapter: str | tuple[str, ...] | None
    base: str | None
    tasks: str | tuple[str, ...]
    k: int | None
    data: str | None
    output: str | None


@dataclass(frozen=True)
class Call:
    """The same, checked; see :func:`perl.evaluate`.

    Attributes:
        adapters: Names; none where a base is evaluated alone.
        several: They were given as a list.
    """

    adapters: list[str]
    several: bool
    base: str | None
    tasks: list[str]
    k: int | None
    data: str | None
    output: str | None


def checked_call(function: str, **arguments: object) -> Call:
    """Arguments of a function that evaluates.

    Args:
        function: Its name, for errors.
        arguments: By their names. A single task may be given without a list.

    Raises:
        PerlError: With every argument that is of another type than it can have.
    """
    given: dict[str, Any] = _checked(function, _Call, arguments)
    adapter, tasks = given.pop("adapter"), given.pop("tasks")
    several = not isinstance(adapter, str | None)
    names = list(adapter) if several else [] if adapter is None else [adapter]
    return Call(adapters=names, several=several, tasks=names_of(tasks), **given)


def names_of(given: object) -> list[str]:
    """One name, or several, as a list."""
    return [plain] if isinstance(plain := _plain(given), str) else list(plain)


def check_fields(settings: Any, other_types: Mapping[str, Any]) -> None:  # noqa: ANN401 (any dataclass)
    """Holds a frozen dataclass to the types of its fields, and makes lists tuples and paths texts.

    Args:
        settings: Its fields are changed in place.
        other_types: Of fields that are checked later, by name.

    Raises:
        PerlError: With every field that is of another type than it can have.
    """
    kind: type[Any] = type(settings)
    if kind not in _MODELS:
        _MODELS[kind] = _model(kind, other_types)
    given = {field.name: getattr(settings, field.name) for field in fields(settings)}
    for name, value in _checked(kind.__name__, _MODELS[kind], given).items():
        object.__setattr__(settings, name, value)


def _model(kind: type[Any], other_types: Mapping[str, Any]) -> type[Section]:
    hints = get_type_hints(kind) | dict(other_types)
    required: dict[str, Any] = {field.name: (hints[field.name], ...) for field in fields(kind)}
    return create_model(kind.__name__, __base__=Section, **required)


def _checked(whose: str, model: type[Section], given: Mapping[str, object]) -> dict[str, Any]:
    values = {name: _plain(value) for name, value in given.items()}
    try:
        model.model_validate(values)
    except ValidationError as error:
        found = mistakes_of(error, model, values, (), Layer())
        raise_all(PerlError, list(_of_arguments(found, whose)))
    return values


def _of_arguments(mistakes: Iterable[Mistake], whose: str) -> Iterable[Mistake]:
    for mistake in mistakes:
        argument = mistake.where.partition("[")[0].partition(".")[0]
        message = _YAML.sub(lambda found: _PYTHON[found[1]], mistake.message)
        yield Mistake(message, f"{whose}({mistake.where})", _HINTS.get(argument, "") or mistake.hint)


def _plain(value: object) -> Any:  # noqa: ANN401 (whatever a script gives)
    """Lists as tuples, paths as texts, whole numbers of NumPy as Python's."""
    if isinstance(value, list | tuple):
        return tuple(_plain(one) for one in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
