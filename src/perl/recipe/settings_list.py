"""Every setting of a recipe with its default, the values that it takes and what it means, for a person to read.

sections, training arguments -> Setting

Each is read from where it is defined; nothing is written here a second time.
"""

import textwrap
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from perl.algorithms.named import KEY
from perl.algorithms.train_fields import train_annotation, train_fields
from perl.errors import RecipeError, did_you_mean
from perl.recipe.eval_section import EvalTask
from perl.recipe.places import REFUSED, places_of
from perl.recipe.plain_yaml import PlainDumper
from perl.recipe.section import Section
from perl.recipe.sections import FIELD_OF_SETTING, SECTIONS, Columns, DataSource, RewardSetting

REQUIRED, COMPUTED = "required", "computed"
"""In the place of a default: there is none, or the sources compute it from other settings."""

_PLAIN = {int: "whole number", float: "number", bool: "true or false", str: "text", NoneType: "null"}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_LONGEST_DEFAULT = 30


@dataclass(frozen=True)
class Setting:
    """One key.

    Attributes:
        name: ``section.key``.
        default: As a recipe would say it.
        values: What it takes, in words; empty where anything.
        text: What it means, whole.
    """

    name: str
    default: str
    values: str
    text: str

    def line(self, width: int, column: int) -> str:
        """Name, default and the beginning of the text.

        Args:
            width: Characters of the line at most.
            column: Where the text begins, unless name and default are longer.
        """
        begin = f"{self.name}: {self.default}".ljust(column)
        room = max(width - len(begin) - 2, 0)
        return f"{begin}  {textwrap.shorten(self.text, room, placeholder=' ...') if room > 4 else ''}".rstrip()[:width]

    def page(self, width: int) -> list[str]:
        """Everything, in lines of so many characters at most."""
        lines = [f"{self.name}: {self.default}"]
        for text in (*([f"values: {self.values}"] if self.values else []), self.text):
            lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ")
        return lines


@cache
def settings() -> tuple[Setting, ...]:
    """All of them, in the order of a recipe's sections."""
    fields = train_fields()
    found = [
        Setting("extends", "null", "text", "A recipe file or a packaged recipe whose settings this one changes."),
        Setting(KEY, "null", "text", " ".join(fields[KEY].help.split())),
    ]
    models: dict[str, type[Section]] = {**SECTIONS, "data.train": DataSource, "data.train.columns": Columns}
    models |= {"rewards.NAME": RewardSetting, "eval.tasks.N": EvalTask}
    for section, model in models.items():
        for key, field in model.model_fields.items():
            default = REQUIRED if field.is_required() else shown_value(field.default)
            kind = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            found.append(Setting(f"{section}.{key}", default, values_of(kind), field.description or ""))
    elsewhere = {KEY, *FIELD_OF_SETTING.values(), *REFUSED}
    for name, known in ((name, known) for name, known in fields.items() if name not in elsewhere):
        default = COMPUTED if known.computed else shown_value(known.default)
        text = " ".join(known.help.replace("%%", "%").split())
        found.append(Setting(f"train.{name}", default, values_of(train_annotation(name)), text))
    return tuple(found)


def chosen_settings(key: str) -> list[Setting]:
    """Those of a section, one by its whole name, or each that has a name or is called so elsewhere.

    Args:
        key: ``train``, ``train.beta``, ``beta`` or ``lr``.

    Raises:
        RecipeError: There is none; says the nearest.
    """
    found = [one for one in settings() if one.name == key or one.name.startswith(f"{key}.")]
    if not found and "." not in key:
        found = [one for one in settings() if one.name.rpartition(".")[2] == key]
    if not found:
        places = places_of(key.rpartition(".")[2])
        found = [one for one in settings() if one.name in places]
    if not found:
        raise RecipeError(f"no setting {key!r}", hint=did_you_mean(key, [one.name for one in settings()]))
    exact = [one for one in found if one.name == key]
    return exact if exact and not any(one.name.startswith(f"{key}.") for one in found) else found


def shown_value(value: object) -> str:
    """A value in a line, as a recipe would say it; of a section that is long, that it is one."""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True, exclude_defaults=True)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}" if value != int(value) else repr(value)
    if isinstance(value, str):
        text = yaml.dump(value, Dumper=PlainDumper, allow_unicode=False, width=float("inf"))  # in one line
        return text.removesuffix("...\n").strip()
    text = " ".join(str(value).replace("'", "").split())
    return text if len(text) <= _LONGEST_DEFAULT else f"{text[: _LONGEST_DEFAULT - 3]}..."


def values_of(annotation: Any) -> str:  # noqa: ANN401 (a type)
    """What a type takes, in words: ``whole number >= 1 or null``; empty for anything."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is Literal:
        return "one of " + ", ".join(shown_value(part) for part in parts)
    if origin is Annotated:
        inner, *rules = parts
        metadata = [one for rule in rules for one in getattr(rule, "metadata", [rule])]
        known = [(one, name, sign) for one in metadata for name, sign in _BOUNDS.items() if hasattr(one, name)]
        bounds = " ".join(f"{sign} {getattr(one, name):g}" for one, name, sign in known)
        said = values_of(inner)
        return said.replace("number", f"number {bounds}", 1) if bounds and "number" in said else said
    if origin in (Union, UnionType):
        words = [values_of(part) for part in parts]
        return " or ".join(dict.fromkeys(words)) if all(words) else ""
    if origin is list or annotation is list:
        of = values_of(parts[0]) if parts else ""
        return f"list of {of}" if of else "list"
    if origin is dict or annotation is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "mapping"
    return ""
