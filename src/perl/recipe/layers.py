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

from perl.algorithms.named import KEY
from perl.errors import Mistake, RecipeError, did_you_mean, first_line, raise_all
from perl.recipe.algorithm_name import move_to_the_top, without_replaced
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
            _note_entries(value_node, (*path, key), origins, file)
        _expand_shorthand(values, key, path)
    return values


def _note_entries(node: yaml.Node, path: KeyPath, origins: dict[KeyPath, str], file: str) -> None:
    """The line of each entry of a list, and of each key of one that is a mapping."""
    for number, entry in enumerate(node.value if isinstance(node, yaml.SequenceNode) else ()):
        here = (*path, str(number))
        origins[here] = f"{file}:{entry.start_mark.line + 1}"
        for key, _ in entry.value if isinstance(entry, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                origins[(*here, key.value)] = f"{file}:{key.start_mark.line + 1}"


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
        if not equals or (len(path) < 2 and key != KEY and not _is_section(key, text)):
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


def _is_section(key: str, text: str) -> bool:
    """Whether an override is a section with its settings: ``rewards={my_rewards:score: 1}``."""
    return key in SECTION_NAMES and text.lstrip().startswith("{")


def _merged(parent: Layer, child: Layer) -> Layer:
    """The child's settings over the parent's, without those that the child replaces by a name or an adapter."""
    before = _without_shape(without_replaced(parent.values, child.values), child.values)
    before = _without_length(before, child.values)
    merged = _laid_over(Layer(before, parent.origins), child)
    merged.of_another_method = _of_another_method(parent, child)
    return merged


def _of_another_method(parent: Layer, child: Layer) -> frozenset[KeyPath]:
    """Which settings of the adapter an earlier recipe wrote for its own method: the later one may not have them."""
    before, after = parent.values.get("peft"), child.values.get("peft")
    before, after = (section if isinstance(section, Mapping) else {} for section in (before, after))
    chosen = any(key in after and after[key] != before.get(key) for key in ("method", "type"))
    earlier = {("peft", key) for key in _OF_A_NEW_ADAPTER if key in before} if chosen else set()
    return frozenset(path for path in {*parent.of_another_method, *earlier} if path[1] not in after)


def _without_shape(before: dict[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Earlier settings without those of a new adapter, where later ones continue a saved one, which brings its own."""
    peft, later = before.get("peft"), after.get("peft")
    if not isinstance(peft, Mapping) or not isinstance(later, Mapping) or later.get("adapter") is None:
        return before
    verbatim = peft.get("type") is not None  # all of it is the config of a new adapter
    return {**before, "peft": {} if verbatim else {key: peft[key] for key in peft if key not in _OF_A_NEW_ADAPTER}}


def _without_length(before: dict[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Earlier settings without the length of the training in steps, where later ones say it in epochs; or otherwise."""
    earlier, later = before.get("train"), after.get("train")
    if not isinstance(earlier, Mapping) or not isinstance(later, Mapping) or later.keys().isdisjoint(LENGTHS):
        return before
    return {**before, "train": {key: value for key, value in earlier.items() if key not in LENGTHS}}


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
        if isinstance(value, Mapping) and isinstance(before, Mapping) and not _another_source(here, before, value):
            target[key] = dict(before)
            _merge_into(merged, child, here, target[key], value)
        else:
            for origin in [o for o in merged.origins if o[: len(here)] == here]:
                del merged.origins[origin]
            target[key] = value


def _another_source(path: KeyPath, before: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Whether a data source is replaced: the columns and split of one data set mean nothing to another."""
    return _SHORTHANDS.get(path) == "name" and _as_file(value.get("name", before.get("name"))) != _as_file(
        before.get("name")
    )


def _as_file(name: Any) -> Any:  # noqa: ANN401 (whatever the YAML holds)
    """``./rows.csv`` is ``rows.csv``."""
    return os.path.normpath(name) if isinstance(name, str) and is_data_file(name) else name


def folders_beside(layer: Layer) -> list[str]:
    """The folders of the files that name the rewards, ``module:function``, each once."""
    rewards = layer.values.get("rewards")
    found = []
    for name in rewards if isinstance(rewards, dict) else ():
        file = Path(layer.origins.get(("rewards", name), "").rpartition(":")[0])
        if ":" in str(name) and file.is_file():
            found.append(os.path.dirname(os.path.abspath(file)))
    return list(dict.fromkeys(found))


def find_in(folders: Sequence[str]) -> None:
    """Lets modules be imported from folders.

    They come last: they hide no installed package, and what lies in the current folder is still taken first.
    """
    for folder in map(os.path.abspath, folders):
        if folder not in sys.path:
            sys.path.append(folder)
