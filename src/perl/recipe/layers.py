"""Reads recipe files and overrides into one mapping that remembers where each value came from.

file, its ``extends`` chain, ``section.key=value`` overrides -> Layer; origins of its rewards -> ``sys.path``

Plain YAML 1.2 scalars (``1e-5`` is a number, ``no`` is text), no tags, no key twice. Knows the shape of YAML, not the
meaning of any setting, but for the name of an algorithm, which replaces what was set before it.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from perl.algorithms.algorithm import Algorithm
from perl.algorithms.named import ALGORITHMS, KEY, find_algorithm
from perl.algorithms.overrides import contradictions
from perl.algorithms.reading import unused_fields
from perl.algorithms.train_fields import train_fields
from perl.errors import Mistake, RecipeError, did_you_mean, first_line, raise_all
from perl.recipe.assets import packaged_recipes
from perl.recipe.places import place_hint
from perl.recipe.plain_yaml import PlainLoader, plain_value, refuse_tags
from perl.recipe.sections import SECTION_NAMES, is_data_file
from perl.recipe.server_address import without_credentials

KeyPath = tuple[str, ...]

# A bare value at these places is short for a mapping with this one key.
_SHORTHANDS: dict[KeyPath, str] = {("data", "train"): "name", ("data", "eval"): "name", ("rewards", "*"): "weight"}

_OF_A_NEW_ADAPTER = ("rank", "alpha", "dropout", "target_modules")
LENGTHS = ("max_steps", "num_train_epochs")
"""Fields of ``train`` of which one alone says how long it is trained."""


@dataclass
class Layer:
    """Settings and the place each of them was written at.

    Attributes:
        values: Nested mapping, sections first.
        origins: Key path -> ``recipe.yaml:4`` or ``command line``.
        of_another_method: Settings of the adapter that were written before the method was chosen.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    of_another_method: frozenset[KeyPath] = frozenset()

    def where(self, path: Sequence[str]) -> str:
        """The place of a key for an error message, as ``recipe.yaml:4: peft.rank`` or ``eval.tasks[1].limit``."""
        path = tuple(path)
        shown = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path).removeprefix(".")
        for level in (path[:end] for end in range(len(path), 0, -1)):
            inside = (other for other in self.origins if other[: len(level)] == level)
            known = level if level in self.origins else None
            if known is None and (level == path or len(level) > 1):  # beside it; a section says nothing of a key
                known = next(inside, None)
            if known is not None:
                return f"{self.origins[known]}: {shown}"
        return shown


def read_layers(source: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> tuple[str, Layer]:
    """Merges a recipe, what it extends, and the overrides.

    Args:
        source: A file, the name of a packaged recipe, or the mapping itself.
        overrides: ``section.key=value`` or ``algorithm=name``, the value in YAML.

    Returns:
        The recipe's name and its settings.

    Raises:
        RecipeError: A file is absent or not plain YAML, or the chain of ``extends`` comes back to itself.
    """
    if isinstance(source, Mapping):
        parent, layer = source.get("extends"), layer_of_mapping(source)
        layer.values.pop("extends", None)
        move_to_the_top(layer.values, {})
        if parent is not None:
            layer = _merged(_read_chain(_parent_of(str(parent), Path("recipe"), "extends"), ()), layer)
        name = "recipe"
    else:
        path = locate(str(source))
        packaged = str(source) in packaged_recipes()
        name = str(source).replace("/", "-") if packaged else path.stem  # one run folder for each packaged recipe
        layer = _read_chain(path, ())
    return name, _merged(layer, _layer_of_overrides(overrides))


def locate(reference: str, beside: Path | None = None) -> Path:
    """The file of a recipe: a path if it looks like one (``.yaml`` or a slash), else a packaged name.

    Args:
        reference: As written by the user.
        beside: Folder that relative paths start from; None: the current one.

    Raises:
        RecipeError: There is no such file or name.
    """
    packaged = packaged_recipes()
    if reference in packaged:
        return packaged[reference]
    path = (beside or Path()) / Path(reference).expanduser()
    if path.suffix in {".yaml", ".yml"} or path.is_file():
        if path.is_file():
            return path
        raise RecipeError("no such file", str(path), "`perl recipes` lists those that are packaged")
    if (path / "recipe.yaml").is_file():
        raise RecipeError("is a folder", reference, f"the recipe in it is {path / 'recipe.yaml'}")
    raise no_such_recipe(reference)


def no_such_recipe(reference: str) -> RecipeError:
    """Why no packaged recipe is meant by it: it is a folder of them, or a slip."""
    packaged = packaged_recipes()
    folder = f"{reference.rstrip('/')}/"
    inside = [name for name in packaged if name.startswith(folder)]
    if inside:
        hint = f"name one of them, as {inside[0]}; `perl recipes {folder[:-1]}` lists them"
        return RecipeError(f"{folder} is a folder of {len(inside)} recipes", hint=hint)
    return RecipeError(f"no recipe named {reference!r}", hint=did_you_mean(reference, packaged))


def key_path(key: str) -> KeyPath:
    """``a.b.c`` as a path; a reward's ``package.module:function`` stays one name."""
    if key.startswith("rewards.") and ":" in key:
        module, _, rest = key.removeprefix("rewards.").partition(":")
        function, *settings = rest.split(".")
        return ("rewards", f"{module}:{function}", *settings)
    return tuple(key.split("."))


def _read_chain(path: Path, children: tuple[Path, ...]) -> Layer:
    """The file merged over what it extends."""
    layer = read_yaml(path, Mistake("a recipe is a mapping of sections", hint="see `perl recipes quickstart`"))
    move_to_the_top(layer.values, layer.origins)
    parent = layer.values.pop("extends", None)
    if parent is None:
        return layer
    where = layer.where(("extends",))
    if not isinstance(parent, str):
        raise RecipeError(f"must be the name or path of one recipe, not {parent!r}", where)
    parent_path = _parent_of(parent, path, where)
    chain = (*children, path)
    if any(parent_path.samefile(link) for link in chain):
        links = " -> ".join(link.name for link in (*chain, parent_path))
        raise RecipeError(f"the recipe extends itself: {links}", where)
    return _merged(_read_chain(parent_path, chain), layer)


def _parent_of(reference: str, child: Path, where: str) -> Path:
    try:
        return locate(reference, child.parent)
    except RecipeError as error:
        message = str(Mistake(error.mistakes[0].message, error.mistakes[0].where))
        raise RecipeError(message, where, error.mistakes[0].hint) from None


def read_yaml(path: Path, no_mapping: Mistake) -> Layer:
    """A file of plain YAML, as it is.

    Args:
        path: The file.
        no_mapping: What is said of one that is no mapping.

    Raises:
        RecipeError: It cannot be read, or is not plain YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot be read: {error}", str(path)) from None
    file, layer = str(path), Layer()
    try:
        refuse_tags(text, file)
        loader = PlainLoader(text)
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise RecipeError(no_mapping.message, file, no_mapping.hint)
        layer.values = _construct(loader, root, (), layer.origins, file)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RecipeError(f"not plain YAML: {error.problem}", f"{file}:{line}") from None
    except yaml.YAMLError as error:  # a character that YAML forbids
        raise RecipeError(f"not plain YAML: {first_line(error)}", file) from None
    return layer


def _construct(
    loader: PlainLoader, node: yaml.MappingNode, path: KeyPath, origins: dict[KeyPath, str], file: str
) -> dict[str, Any]:
    """A mapping node as a dict, noting the line of each key and refusing a key that stands twice."""
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        here = f"{file}:{key_node.start_mark.line + 1}"
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if key is None or key == "<<":
            raise RecipeError("a key must be plain text (to share settings use `extends`)", here)
        if key in values:
            raise RecipeError("this key stands twice", f"{here}: {'.'.join((*path, key))}")
        origins[(*path, key)] = here
        if isinstance(value_node, yaml.MappingNode):
            values[key] = _construct(loader, value_node, (*path, key), origins, file)
        else:
            values[key] = loader.construct_object(value_node, deep=True)
            for number, entry in enumerate(value_node.value if isinstance(value_node, yaml.SequenceNode) else ()):
                within = (*path, key, str(number))
                origins[within] = f"{file}:{entry.start_mark.line + 1}"
                for inner, _ in entry.value if isinstance(entry, yaml.MappingNode) else ():
                    if isinstance(inner, yaml.ScalarNode):
                        origins[(*within, inner.value)] = f"{file}:{inner.start_mark.line + 1}"
        _expand_shorthand(values, key, path)
    return values


def _expand_shorthand(values: dict[str, Any], key: str, path: KeyPath) -> None:
    short = _SHORTHANDS.get((*path, key)) or _SHORTHANDS.get((*path, "*"))
    if short and values[key] is not None and not isinstance(values[key], Mapping):
        values[key] = {short: values[key]}


def layer_of_mapping(source: Mapping[str, Any]) -> Layer:
    """The values of a mapping, copied, written nowhere."""

    def copied(values: Mapping[str, Any], path: KeyPath) -> dict[str, Any]:
        copy: dict[str, Any] = {}
        for key, value in values.items():
            copy[key] = copied(value, (*path, key)) if isinstance(value, Mapping) else value
            _expand_shorthand(copy, key, path)
        return copy

    return Layer(copied(source, ()))


def _layer_of_overrides(overrides: Sequence[str]) -> Layer:
    if not isinstance(overrides, list | tuple):  # of a script
        raise RecipeError(f"{overrides!r} is no list of overrides", "overrides", '["train.max_steps=20"]')
    layer, mistakes = Layer(), []
    for override in overrides:
        key, equals, text = override.partition("=")
        path = key_path(key)
        whole = key in SECTION_NAMES and text.lstrip().startswith("{")  # rewards={my_rewards:score: 1}
        if not equals or (len(path) < 2 and key != KEY and not whole):
            near = did_you_mean(key, (KEY,)) if equals else ""
            near = near if near.startswith("did ") or not equals else place_hint(key)
            hint = near or "they look like train.max_steps=20"
            message = f"{without_credentials(override)!r} is not an override"
            mistakes.append(Mistake(message, "command line", hint))
            continue
        one = Layer(origins={path: "command line"})
        target = one.values
        for part in path[:-1]:
            target = target.setdefault(part, {})
        try:
            target[path[-1]] = plain_value(text)
        except yaml.YAMLError:
            mistakes.append(Mistake(f"{without_credentials(text)!r} is not a YAML value", f"command line: {key}"))
            continue
        _expand_shorthand(target, path[-1], path[:-1])
        if isinstance(target[path[-1]], Mapping):  # whose keys have lines of their own
            one.values = layer_of_mapping(one.values).values
        layer = _laid_over(layer, one)
    raise_all(RecipeError, mistakes)
    move_to_the_top(layer.values, layer.origins)
    return layer


def _merged(parent: Layer, child: Layer) -> Layer:
    """The child's settings over the parent's, without those that it replaces by a name, an adapter or a length."""
    before = without_replaced(parent.values, child.values)
    sections = [layer.get(name) for layer in (before, child.values) for name in ("peft", "train")]
    peft, train, own_peft, own_train = (one if isinstance(one, Mapping) else {} for one in sections)
    if (
        peft and own_peft.get("adapter") is not None
    ):  # a saved one brings its own shape; with a type all is of a new one
        kept = [key for key in peft if peft.get("type") is None and key not in _OF_A_NEW_ADAPTER]
        before["peft"] = {key: peft[key] for key in kept}
    if train and not own_train.keys().isdisjoint(LENGTHS):
        before["train"] = {key: value for key, value in train.items() if key not in LENGTHS}
    merged = _laid_over(Layer(before, parent.origins), child)
    chosen = any(key in own_peft and own_peft[key] != peft.get(key) for key in ("method", "type"))
    earlier = {("peft", key) for key in _OF_A_NEW_ADAPTER if key in peft} if chosen else set()
    of_another = {*parent.of_another_method, *earlier}
    merged.of_another_method = frozenset(path for path in of_another if path[1] not in own_peft)
    return merged


def _laid_over(parent: Layer, child: Layer) -> Layer:
    """The child's settings over the parent's, mapping by mapping."""
    merged = Layer(dict(parent.values), dict(parent.origins))
    _merge_into(merged, child, (), merged.values, child.values)
    merged.origins.update(child.origins)
    return merged


def _merge_into(merged: Layer, child: Layer, path: KeyPath, target: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        here = (*path, key)
        before = target.get(key)
        inside = before if isinstance(value, Mapping) and isinstance(before, Mapping) else None
        if inside is not None and _SHORTHANDS.get(here) == "name":
            one, other = (_as_file(source.get("name", inside.get("name"))) for source in (inside, value))
            inside = inside if one == other else None  # columns and split of one mean nothing to another
        if inside is not None:
            target[key] = dict(inside)
            _merge_into(merged, child, here, target[key], value)
        else:
            for origin in [o for o in merged.origins if o[: len(here)] == here]:
                del merged.origins[origin]
            target[key] = value


def _as_file(name: Any) -> Any:  # noqa: ANN401 (whatever the YAML holds)
    """``./rows.csv`` is ``rows.csv``."""
    return os.path.normpath(name) if isinstance(name, str) and is_data_file(name) else name


def folders_beside(layer: Layer) -> list[str]:
    """The folders of the files that name the rewards, ``module:function``, and tools, each once."""
    rewards = layer.values.get("rewards")
    own = [("rewards", name) for name in rewards if ":" in str(name)] if isinstance(rewards, dict) else []
    tools = [key for key in layer.origins if key[0] == "agent"]
    files = [Path(layer.origins.get(key, "").rpartition(":")[0]) for key in (*own, *tools)]
    packaged = {os.path.dirname(os.path.abspath(file)) for file in packaged_recipes().values()}
    found = dict.fromkeys(os.path.dirname(os.path.abspath(file)) for file in files if file.is_file())
    return [folder for folder in found if folder not in packaged]  # these hold folders and no modules


def find_in(folders: Sequence[str]) -> None:
    """Lets modules be imported from folders.

    They come last: they hide no installed package, and what lies in the current folder is still taken first.
    """
    for folder in map(os.path.abspath, folders):
        if folder not in sys.path:
            sys.path.append(folder)


def move_to_the_top(values: dict[str, Any], origins: dict[tuple[str, ...], str]) -> None:
    """Moves a name that stands in ``train`` to the top of the same file.

    Args:
        values: Of one file, one mapping or the command line; changed.
        origins: Key path -> where it was written; changed.

    Raises:
        RecipeError: There is another name at the top.
    """
    train = values.get("train")
    if not isinstance(train, Mapping) or KEY not in train:
        return
    name = train[KEY]
    where = f"{origins['train', KEY]}: train.{KEY}" if ("train", KEY) in origins else f"train.{KEY}"
    if values.get(KEY, name) != name:
        raise RecipeError(f"{name!r} contradicts {KEY}: {values[KEY]!r}", where, "write it once, at the top")
    values["train"] = {key: value for key, value in train.items() if key != KEY}
    values[KEY] = name
    if ("train", KEY) in origins:
        origins.setdefault((KEY,), origins.pop(("train", KEY)))


def without_replaced(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Earlier settings without those that a later name replaces.

    Args:
        before: Of the earlier file.
        after: Of the later one, which may have a name.
    """
    row, train = _row(after.get(KEY)), before.get("train")
    if row is None or not isinstance(train, Mapping):
        return dict(before)
    later = after.get("train")
    gone = {*row.sets, *unused_fields({**row.sets, **(later if isinstance(later, Mapping) else {})})}
    earlier = _row(before.get(KEY))
    if earlier is not None:  # a saved recipe has what its name set written out
        gone |= {key for key, value in earlier.sets.items() if train.get(key) == value}
    return {**before, "train": {key: value for key, value in train.items() if key not in gone}}


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
    train = values.get("train")
    train = {} if train is None else train
    if not isinstance(train, Mapping):
        return name, []
    values["train"] = {**row.sets, **train}
    for key in row.sets.keys() - train.keys():
        origins["train", key] = origins.get((KEY,), "recipe")
    found = contradictions(row, train, {key: field.default for key, field in train_fields().items()})
    return name, [Mistake(mistake.message, f"train.{mistake.where}", mistake.hint) for mistake in found]


def _row(name: object) -> Algorithm | None:
    return ALGORITHMS.get(name) if isinstance(name, str) else None
