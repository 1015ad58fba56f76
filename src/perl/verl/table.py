"""The rows of ``keys.toml``: what a setting is for verl, or why it cannot go.

Recipe -> what is refused, what means nothing there; settings -> verl's keys with their values
"""

import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perl.algorithms.named import ALGORITHMS
from perl.algorithms.train_fields import train_fields
from perl.errors import Mistake, RecipeError, raise_all
from perl.methods.registry import METHODS
from perl.recipe import Recipe
from perl.recipe.sections import SECTIONS

TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("keys.toml").read_text(encoding="utf-8"))
CANNOT: Mapping[str, Any] = TABLE["cannot"]
METHODS_THAT_GO = ("lora", "rslora")
"""As they are; rsLoRA as the plain LoRA with alpha sqrt(rank), which is the same adapter."""
# Of a key of train that stands nowhere in the table, as a new setting of ours does.
_UNNAMED = {"why": "verl has no such setting", "instead": "leave it out"}
# What Hydra reads as text without quotes and as nothing else.
_PLAIN = re.compile(r"[A-Za-z][\w./-]*")
_WORDS = {"true", "false", "null", "none", "yes", "no", "on", "off", "nan", "inf"}


def cannot_go(why: str, key: str, instead: str = "leave it out") -> Mistake:
    """The mistake of a setting that verl has not."""
    return Mistake(f"cannot go to verl: {why}", key, instead)


def refusals(recipe: Recipe) -> list[Mistake]:
    """What of a recipe cannot go at all, each with the reason and the nearest thing that works."""
    rows = {key: row for row in CANNOT["keys"] for key in row["keys"]}
    named, sets = named_keys(), ALGORITHMS[recipe.algorithm].settings if recipe.algorithm is not None else {}
    found = []
    for key, value in _written(recipe):
        if (row := rows.get(key, _UNNAMED if key.startswith("train.") and key not in named else None)) is not None:
            name = key.removeprefix("train.")
            by_name = name in sets and sets[name] == recipe.train.get(name)
            said = f" (algorithm: {recipe.algorithm} sets it)" if by_name else ""
            what = f"{_shown(value)} cannot go to verl: {row['why']}{said}"
            found.append(Mistake(what, key, row.get("instead", "leave it out")))
    method = recipe.peft.method
    if recipe.peft.type is None and method not in METHODS_THAT_GO:
        why, instead = method_refusal(method)
        found.append(Mistake(f"{method} cannot go to verl: {why}", "peft.method", instead))
    return found


def named_keys() -> set[str]:
    """The keys that the table has a word for; any other one is of this package alone."""
    keys = {key for rows in TABLE["told"].values() for _, cell in cells(rows) for key in made_from(cell)}
    keys |= {key for part in (TABLE["elsewhere"], TABLE["unread"]) for row in part.values() for key in row}
    whole = ("engine.parallel", "peft.kwargs")  # whose keys are none of the recipe's own
    return {next((one for one in whole if key.startswith(one)), key) for key in keys}


def method_refusal(name: str) -> tuple[str, str]:
    """Why a method cannot go, and the nearest one that does."""
    if METHODS[name].hooks:
        return "verl would not call what this method does between the steps", "lora"
    row = next((row for row in CANNOT["methods"] if name in row["names"]), None)
    return (row["why"], row["instead"]) if row else ("verl gives its engine PEFT's LoRA layers only", "lora or rslora")


def unused_keys(recipe: Recipe) -> list[str]:
    """A line for each key that is set and means nothing to verl."""
    reasons = {key: why for why, keys in TABLE["unread"].items() for key in keys}
    return [f"{key}: nothing reads it there: {reasons[key]}" for key, _ in _written(recipe) if key in reasons]


def told(
    setting: Callable[[str], Any], when: Collection[str], made: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Mistake]]:
    """What verl is told, in the table's order, and the values that it has no word for.

    Args:
        setting: Key of a recipe -> what it has for it.
        when: The conditions that hold.
        made: verl's key -> value, of those that take more than a row says.
    """
    values: dict[str, Any] = {}
    refused = []
    for row in CANNOT["values"]:
        if str(setting(row["key"])) in row["values"]:
            refused.append(cannot_go(f"{setting(row['key'])}: {row['why']}", row["key"], row["instead"]))
    for condition in when:
        for key, cell in cells(TABLE["told"][condition]):
            value = made.get(key, cell)
            if key not in made and isinstance(cell, Mapping):
                found = (setting(one) for one in made_from(cell) if "from" in cell)
                value = next((one for one in found if one is not None), cell.get("unset", cell.get("is")))
            words = cell.get("as") if isinstance(cell, Mapping) and key not in made else None
            if words is not None and str(value) not in words:
                refused.append(Mistake(f"{value} cannot go to verl", cell["from"], f"one of {', '.join(words)}"))
            elif value is not None or key in made:
                values[key] = words[str(value)] if words is not None else value
    return values, refused


def cells(rows: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a part of the table, each with what is told."""
    for name, cell in rows.items():
        if isinstance(cell, Mapping) and not cell.keys() & {"from", "made_from", "is"}:
            yield from cells(cell, f"{above}{name}.")
        else:
            yield above + name, cell


def _written(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """The keys that are not at their defaults, with their values."""
    for section, model in SECTIONS.items():
        values = getattr(recipe, section)
        for name, field in model.model_fields.items():
            if getattr(values, name) != field.get_default(call_default_factory=True):
                yield f"{section}.{name}", getattr(values, name)
    fields = train_fields()
    for name, value in recipe.train.items():
        if name in fields and (fields[name].computed or value != fields[name].default):
            yield f"train.{name}", value


def further_overrides(recipe: Recipe) -> dict[str, Any]:
    """The recipe's ``engine.overrides``, which must not be of what the table tells or refuses.

    Raises:
        RecipeError: Some are.
    """
    known = {key.lstrip("+"): cell for rows in TABLE["told"].values() for key, cell in cells(rows)}
    mistakes = []
    for key in recipe.engine.overrides or {}:
        plain = key.lstrip("+~").rpartition("@")[2]  # GROUP@KEY chooses a file for all that is below KEY
        row = next((row for row in CANNOT["overrides"] if any(_within(plain, one) for one in row["keys"])), None)
        one = next((one for one in known if _within(plain, one)), None)
        if one is not None:
            (what, instead), named = said_by(known[one]), key if plain == one else f"{key}: {one}"
            mistakes.append(Mistake(f"{named} is {what}", "engine.overrides", instead or "leave it out"))
        elif row is not None:
            mistakes.append(Mistake(f"{key}: {row['why']}", "engine.overrides", row.get("instead", "leave it out")))
    raise_all(RecipeError, mistakes)
    return dict(recipe.engine.overrides or {})


def said_by(cell: Any) -> tuple[str, str]:  # noqa: ANN401 (of the table)
    """How a told key comes to its value, and what of a recipe says it; nothing where no key of a recipe does."""
    if not isinstance(cell, Mapping):
        return f"{_shown(cell)} in every job", ""
    if "is" in cell:
        return f"{_shown(cell['is'])} in every job: {cell['why']}", ""
    ours = [key for key in made_from(cell) if not key.startswith("job.")]
    return ("made of the recipe", f"say {' or '.join(ours)}") if ours else ("made of the data and rewards", "")


def made_from(cell: Any) -> list[str]:  # noqa: ANN401 (of the table)
    """Our keys that a told key is made of."""
    keys = cell.get("from", cell.get("made_from", [])) if isinstance(cell, Mapping) else []
    return [keys] if isinstance(keys, str) else list(keys)


def _within(one: str, other: str) -> bool:
    """Whether a key is another one, is below it, or has it below itself."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def override(key: str, value: Any) -> str:  # noqa: ANN401
    """One override as Hydra's command line takes it, ``key=value``.

    Args:
        key: As verl's files name it; ``+key`` where they do not have it.
        value: Text, number, truth, None, or lists and mappings of these.

    Raises:
        RecipeError: It is of more than one line, which neither a job's file nor Hydra can hold.
    """
    line = f"{key}={_shown(value)}"
    if len(line.splitlines()) > 1:
        raise RecipeError("a value of several lines cannot go to verl", key.lstrip("+~"), "write it in one line")
    return line


def _shown(value: Any) -> str:  # noqa: ANN401
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_shown(str(key))}:{_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
            return value
        # In quotes backslashes count before a quote only, and a reference to another key would be resolved.
        escaped = re.sub(r"(\\*)'", lambda found: found.group(1) * 2 + "\\'", value)
        escaped = re.sub(r"(\\+)$", lambda found: found.group(1) * 2, escaped)
        return "'" + escaped.replace("${", "\\${") + "'"
    if isinstance(value, Sequence):
        return f"[{','.join(map(_shown, value))}]"
    return repr(value)
