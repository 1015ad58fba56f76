"""Turns what pydantic says into one line a mistake: where, what, and the nearest valid name.

ValidationError -> Mistake
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from perl.errors import Mistake, RecipeError, did_you_mean
from perl.recipe.layers import KeyPath, Layer
from perl.recipe.places import hint_for_key
from perl.recipe.rollout_section import STARTED, StartedServers
from perl.recipe.section import Section, SettingError
from perl.recipe.sections import FIELD_OF_SETTING, SECTION_NAMES
from perl.recipe.server_address import without_credentials

SectionKind = TypeVar("SectionKind", bound=Section)
_PLAIN = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "none_required": "null",
}
# What others call the settings of started servers.
_MEANT_OF_SERVERS = {
    **dict.fromkeys(("number", "n", "num", "num_servers", "replicas", "size", "processes"), "count"),
    **dict.fromkeys(("gpus", "gpu", "num_gpus", "gpus_per_server", "tp", "tensor_parallel_size"), "gpus_each"),
    **dict.fromkeys(("interpreter", "venv", "env", "executable"), "python"),
}
# The key of a section that is meant by a value without one.
_MAIN_KEYS = {"model": "name", "peft": "method", "data": "train", "rollout": "backend"}


def checked(kind: type[SectionKind], values: Mapping[str, Any]) -> SectionKind:
    """A section that is not read from a recipe.

    Args:
        kind: Its model.
        values: By the names of its settings.

    Raises:
        RecipeError: A value is impossible or contradicts another; its place is the setting's name.
    """
    mistakes: list[Mistake] = []
    section = read_section(kind, values, (), Layer(), mistakes)
    if section is None:
        first, *others = mistakes
        raise RecipeError(first.message, first.where, first.hint, others)
    return section


def read_section(
    kind: type[SectionKind], values: object, path: KeyPath, layer: Layer, mistakes: list[Mistake]
) -> SectionKind | None:
    """A section, or nothing where it has mistakes.

    Args:
        kind: Its model.
        values: As written; None: nothing is.
        path: Of its key.
        layer: Knows the file and line of each key.
        mistakes: Those that are found are added.
    """
    try:
        return kind.model_validate({} if values is None else values)
    except ValidationError as error:
        mistakes += mistakes_of(error, kind, values, path, layer)
        return None


def mistakes_of(
    error: ValidationError, model: type[BaseModel], values: object, path: KeyPath, layer: Layer
) -> Iterator[Mistake]:
    """One problem for each key that is wrong, however many alternatives of its type it failed.

    Args:
        error: What the section's model raised.
        model: The section's model; its field names are the valid ones.
        values: What was validated.
        path: Key path of the section.
        layer: Knows the file and line of each key.
    """
    by_key: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        key, inside = list[str](), values  # the part of pydantic's location that is keys, without tags of union members
        for part in detail["loc"]:
            of_list = isinstance(inside, list) and isinstance(part, int)
            if of_list or (isinstance(inside, Mapping) and part in inside):
                key.append(str(part))
                inside = inside[part]  # type: ignore[index]
            elif part != STARTED:
                key += [str(part)] if detail["type"] == "missing" else []
                break
        contradiction = detail.get("ctx", {}).get("error")  # of a whole section
        key += [contradiction.key] if isinstance(contradiction, SettingError) else []
        by_key.setdefault(tuple(key), []).append(detail)
    for place, details in by_key.items():
        message, hint = _message(details, place, model, path[0] if path else "")
        yield Mistake(message, layer.where((*path, *place)), hint)


def _message(details: list[ErrorDetails], key: KeyPath, model: type[BaseModel], section: str) -> tuple[str, str]:
    """What to say, and the hint."""
    first = details[0]
    kind, given = first["type"], first["input"]
    if kind == "extra_forbidden":
        return "unknown key", _hint_for_unknown(key, model, section)
    if kind == "missing":
        return "is required", ""
    if kind == "too_short":
        least = first["ctx"]["min_length"]
        return f"needs {least} value{'s' if least > 1 else ''} or more, not {_shown(given)}", ""
    if kind == "value_error":
        error = first["ctx"]["error"]
        return error.message if isinstance(error, SettingError) else str(error), ""
    if all(detail["type"] in _PLAIN for detail in details):
        wanted = " or ".join(dict.fromkeys(_PLAIN[detail["type"]] for detail in details))
        braces = isinstance(given, Mapping) and any(detail["type"] == "string_type" for detail in details)
        hint = "text with a brace at its begin or a colon needs quotes" if braces else ""
        if not key and section in _MAIN_KEYS and isinstance(given, str):
            hint = f"{section}: {{{_MAIN_KEYS[section]}: {given}}}"
        return f"must be {wanted}, not {_shown(given)}", hint
    if kind == "literal_error":
        choice = first["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        one_of = "one of " if len(choice) > 1 else ""
        return f"must be {one_of}{', '.join(choice)}, not {_shown(given)}", (
            did_you_mean(given, choice) if isinstance(given, str) and len(choice) > 1 else ""
        )
    return f"{first['msg'].replace('Input should', 'must').replace('String should', 'must')}, not {_shown(given)}", ""


def _hint_for_unknown(key: KeyPath, model: type[BaseModel], section: str) -> str:
    """The place of a key that another section has, else the nearest of this one."""
    if section in SECTION_NAMES and section != "rewards" and key[:-1] != ("servers",):
        elsewhere = hint_for_key(".".join((section, *key[:-1])), key[-1])
        if elsewhere:
            return elsewhere
    moved = set(FIELD_OF_SETTING.values()) if section == "train" else set()
    inner = model
    for part in (one for one in key[:-1] if not one.isdigit()):
        for candidate in _models_in(inner.model_fields[part].annotation):
            inner = candidate
    if inner is StartedServers:
        return did_you_mean(_MEANT_OF_SERVERS.get(key[-1], key[-1]), inner.model_fields)
    for name, field in inner.model_fields.items():
        if any(key[-1] in below.model_fields for below in _models_in(field.annotation)):
            return f"did you mean {name}: {{{key[-1]}: ...}}?"
    return did_you_mean(key[-1], set(inner.model_fields) - moved)


def _models_in(annotation: object) -> list[type[BaseModel]]:
    parts = [annotation, *getattr(annotation, "__args__", ())]
    parts += [inner for part in parts[1:] for inner in getattr(part, "__args__", ())]  # of one with a tag
    return [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]


def _shown(value: object) -> str:
    """A value as the recipe would show it, short."""
    text = {True: "true", False: "false", None: "null"}.get(value) if isinstance(value, bool | None) else repr(value)
    text = without_credentials(text or repr(value))
    return text if len(text) <= 60 else text[:57] + "..."
