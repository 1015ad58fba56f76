"""A recipe, checked: what is trained, on what, how.

file or mapping, overrides -> Recipe

Nothing heavy is imported: a mistyped key is refused in a fraction of a second. Names that only a later stage knows
(methods, rewards) are checked by functions that stage hands in.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from perl.algorithms.estimators import generations_mistake
from perl.algorithms.named import ALGORITHMS, KEY
from perl.algorithms.overrides import counts, has_signal, nothing_teaches, without_rewards
from perl.algorithms.train_fields import train_fields, train_model
from perl.errors import Mistake, PerlError, RecipeError, did_you_mean, raise_all
from perl.recipe.agent_section import AgentSection
from perl.recipe.batch_plan import NUMBERS, BatchPlan, plan_batch
from perl.recipe.eval_section import EvalSection
from perl.recipe.layers import LENGTHS, KeyPath, Layer, find_in, folders_beside, key_path, read_layers, resolve
from perl.recipe.places import REFUSED, hint_for_section
from perl.recipe.plain_yaml import dump
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.sections import (
    FIELD_OF_SETTING,
    SECTION_NAMES,
    SECTIONS,
    THINKING_SWITCHES,
    AlarmsSection,
    DataSection,
    EngineSection,
    HubSection,
    ModelSection,
    PeftSection,
    PromptsSection,
    RewardSetting,
    TeacherSection,
)
from perl.recipe.server_address import without_credentials
from perl.recipe.validation import mistakes_of, read_section

DEFAULT_REWARDS: Mapping[str, RewardSetting] = MappingProxyType({"accuracy": RewardSetting()})


@dataclass(frozen=True)
class Recipe:
    """Everything a run needs to know, resolved: no ``extends``, no overrides, nothing to look up.

    Attributes:
        name: The file's name without suffix; the run folder's default name.
        rewards: Reward name or ``package.module:function`` -> weight and arguments; empty where the teacher alone
            teaches.
        train: The fields of ``PeftRLConfig`` that are set, by name; those that the algorithm's name sets too.
        batch: How the completions of one step are cut into forward passes.
        algorithm: Name of a row of :data:`perl.algorithms.named.ALGORITHMS`; None: only the fields of ``train`` count.
        written_at: Says where a key was written, for error messages.
    """

    name: str
    model: ModelSection = field(default_factory=ModelSection)
    peft: PeftSection = field(default_factory=PeftSection)
    data: DataSection = field(default_factory=DataSection)
    rewards: Mapping[str, RewardSetting] = field(default_factory=lambda: DEFAULT_REWARDS)
    train: Mapping[str, Any] = field(default_factory=dict)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    eval: EvalSection = field(default_factory=EvalSection)
    hub: HubSection = field(default_factory=HubSection)
    engine: EngineSection = field(default_factory=EngineSection)
    teacher: TeacherSection = field(default_factory=TeacherSection)
    alarms: AlarmsSection = field(default_factory=AlarmsSection)
    prompts: PromptsSection = field(default_factory=PromptsSection)
    agent: AgentSection = field(default_factory=AgentSection)
    batch: BatchPlan = field(default_factory=plan_batch)
    algorithm: str | None = None
    written_at: Layer = field(default_factory=Layer, compare=False, repr=False)

    @classmethod
    def load(cls, source: "str | Path | Mapping[str, Any] | Recipe", overrides: Sequence[str] = ()) -> "Recipe":
        """Reads a recipe file, a packaged recipe by name, or a mapping.

        Args:
            source: What to read.
            overrides: ``section.key=value`` or ``algorithm=name``, the value in YAML.

        Raises:
            RecipeError: With every mistake of the recipe.
        """
        return load_recipe(source, overrides)

    @classmethod
    def of_run(cls, source: str | Path) -> "Recipe":
        """The recipe of a run that was started already, by however many processes.

        How it divides its batches over the processes is not checked against those of now.

        Args:
            source: The ``recipe.yaml`` in a run folder.

        Raises:
            RecipeError: As :meth:`load`.
        """
        return load_recipe(source, starts=False)

    def located(self, error: PerlError) -> PerlError:
        """The error with the file and line of each key it names, for what is found after the recipe was read."""
        return error.moved(lambda where: self.written_at.where(key_path(_ENTRY.sub(r".\1", where))) if where else "")

    @contextmanager
    def locating(self) -> Iterator[None]:
        """What is found wrong inside names the file and line of the key."""
        try:
            yield
        except PerlError as error:
            raise self.located(error) from error

    def with_train(self, **changes: Any) -> "Recipe":  # noqa: ANN401 (of any field)
        """The recipe with other training arguments; None: without that one."""
        values = {**self.train, **changes}
        kept = {name: value for name, value in values.items() if name not in changes or value is not None}
        return replace(self, train=MappingProxyType(kept))

    @property
    def output_dir(self) -> Path:
        """The run folder: ``train.output_dir``, else ``runs/NAME``."""
        return Path(self.train.get("output_dir") or Path("runs") / self.name)

    def as_dict(self) -> dict[str, Any]:
        """The recipe as plain values, section by section; loading them gives this recipe again."""
        sections: dict[str, Any] = {name: getattr(self, name).model_dump() for name in SECTIONS}
        sections["rewards"] = {name: setting.model_dump() for name, setting in self.rewards.items()}
        sections["train"] = dict(self.train)
        sections |= {KEY: self.algorithm} if self.algorithm is not None else {}
        absent = {name for name in ("teacher", "alarms", "prompts", "agent") if not getattr(self, name).acts}
        return {name: sections[name] for name in _SAVED_ORDER if name in sections.keys() - absent}

    def to_yaml(self) -> str:
        """The recipe as YAML that can be trained as it is."""
        return dump(self.as_dict())


# Settings that may be paths; tasks of an evaluation are too.
_PLACES: tuple[tuple[Any, ...], ...] = (
    *(("model", "name"), ("peft", "adapter"), ("teacher", "adapter"), ("train", "critic_adapter")),
    *(("data", "train", "name"), ("data", "eval", "name"), ("eval", "data"), ("agent", "environment")),
)
_TASK_FILE = re.compile(r".*\.(py(:.*)?|jsonl|json|csv|parquet|ya?ml)")
_ENTRY = re.compile(r"\[(\d+)\](?=[.\[]|$)")
"""Of a list, ``eval.tasks[1]``."""
_SAVED_ORDER = (
    *(KEY, "teacher", "model", "peft", "data", "rewards", "train", "rollout", "eval", "hub", "engine"),
    *("alarms", "prompts", "agent"),
)

SectionCheck = Callable[[Mapping[str, Any]], list[tuple[KeyPath, Mistake]]]
"""Looks at the valid sections by name and returns mistakes with the key path each belongs to."""


def load_recipe(
    source: str | Path | Mapping[str, Any] | Recipe,
    overrides: Sequence[str] = (),
    checks: Sequence[SectionCheck] = (),
    *,
    starts: bool = True,
) -> Recipe:
    """Reads, merges and checks a recipe.

    Args:
        source: A file, a packaged recipe's name, a mapping, or a recipe (to apply overrides to).
        overrides: ``section.key=value`` or ``algorithm=name``, the value in YAML.
        checks: What later stages know about names; their mistakes are reported together with ours.
        starts: Whether a run may be started with it, so that its batches must fit the processes that there are.

    Raises:
        RecipeError: With every mistake found.
    """
    if isinstance(source, Recipe):
        name, layer = source.name, read_layers(source.as_dict(), overrides)[1]
        layer.origins = {**source.written_at.origins, **layer.origins}
    else:
        name, layer = read_layers(source, overrides)
    algorithm, wrong = resolve(layer.values, layer.origins)
    wrong = wrong if starts or algorithm is None else []  # a run that was started may have been by other rules
    mistakes = [replace(one, where=layer.where(one.where.split("."))) for one in wrong]
    mistakes += _in_their_sections(layer)
    _beside_recipe(layer)
    sections: dict[str, Any] = {}
    for section, model in SECTIONS.items():
        read = read_section(model, layer.values.get(section), (section,), layer, mistakes)
        sections |= {} if read is None else {section: read}
    named = algorithm is not None and ALGORITHMS[algorithm].needs_teacher
    taught = named or "teacher" not in sections or sections["teacher"].acts  # one with mistakes is told of already
    acting = "agent" not in sections or sections["agent"].environment is not None  # which may reward itself
    usual_rewards = {} if named or acting else DEFAULT_REWARDS
    sections |= _validated_rewards(layer, mistakes, usual=usual_rewards, taught=taught or acting or not starts)
    rewarded = "rewards" not in sections or counts(setting.weight for setting in sections["rewards"].values())
    rewarded |= acting
    sections |= _validated_train(layer, mistakes, sections.get("engine"), starts=starts, rewarded=rewarded)
    if taught and not rewarded and starts:
        usual = {name: known.default for name, known in train_fields().items()}
        for one in without_rewards(ALGORITHMS.get(algorithm or ""), sections["train"], usual):
            path = (KEY,) if one.where == KEY else ("train", one.where)
            mistakes.append(replace(one, where=layer.where(path)))
    mistakes += _two_switches(layer, sections)
    rollout, engine = sections.get("rollout"), sections.get("engine")
    if rollout is not None and rollout.started is not None and engine is not None and not engine.on_ray:
        what = f"servers are started on a Ray cluster only, and engine.name is {engine.name}"
        where = layer.where(("rollout", "servers"))
        mistakes.append(Mistake(what, where, "engine.name: ray, or a list of addresses"))
    find_in(folders_beside(layer))
    found = [one for check in checks for one in check(sections)]
    # A setting that the method has not, and an earlier recipe wrote for its own, is dropped.
    if dropped := {path for path, _ in found} & layer.of_another_method:
        usual = {key: PeftSection.model_fields[key].default for _, key in dropped}
        sections["peft"] = sections["peft"].model_copy(update=usual)
        found = [one for check in checks for one in check(sections)]
    mistakes += [replace(one, where=layer.where(path)) for path, one in found]
    raise_all(RecipeError, mistakes)
    return Recipe(name=name, algorithm=algorithm, written_at=layer, **sections)


def _two_switches(layer: Layer, sections: Mapping[str, Any]) -> Iterator[Mistake]:
    """A thinking mode that ``train.chat_template_kwargs`` switches the other way."""
    mode = sections["data"].thinking if "data" in sections else None
    given = sections["train"].get("chat_template_kwargs") or {}
    for name in THINKING_SWITCHES if mode is not None else ():
        if name in given and given[name] != mode:
            what = f"{name}: {given[name]!r} contradicts data.thinking: {str(mode).lower()}"
            yield Mistake(what, layer.where(("train", "chat_template_kwargs")), "write it once, as data.thinking")


def _beside_recipe(layer: Layer) -> None:
    """What is named by a relative path is looked for beside the file that names it, then where the command runs."""
    sections = {name: value for name, value in layer.values.items() if isinstance(value, dict)}
    listed = {way: sections.get(way[0], {}).get(way[1]) for way in (("eval", "tasks"), ("agent", "tools"))}
    entries = [(*way, n) for way, found in listed.items() if isinstance(found, list) for n in range(len(found))]
    several = sections.get("agent", {}).get("environment")
    entries += [("agent", "environment", name) for name in several] if isinstance(several, dict) else []
    for path in (*_PLACES, *entries, *((*entry, "name") for entry in entries if entry[0] == "eval")):
        inside: Any = layer.values
        for key in path[:-1]:
            inside = inside[key] if isinstance(inside, list) else inside.get(key) if isinstance(inside, dict) else None
        if not isinstance(inside, dict | list):
            continue
        value = inside[path[-1]] if isinstance(inside, list) else inside.get(path[-1])
        where = tuple(map(str, path))
        written = layer.origins.get(where) or layer.origins.get(where[:-1], "")
        folder = Path(written.rpartition(":")[0]).parent
        if not isinstance(value, str) or ({"tasks", "agent"} & {*path[:2]} and not _TASK_FILE.fullmatch(value)):
            continue
        if value and (folder / re.sub(r"(?<=\.py):.*", "", value)).exists():
            inside[path[-1]] = str(folder / value)


def launched() -> bool:
    """Whether a launcher (torchrun, accelerate, ``perl train --processes N``) started this process."""
    return "WORLD_SIZE" in os.environ


def world_size() -> int:
    """Number of processes that the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def processes_of_node() -> int:
    """Number of processes on this node; all of them where the launcher does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or world_size())


def rank() -> int:
    """This process's number among them."""
    return int(os.environ.get("RANK", "0"))


def is_first_process() -> bool:
    """Whether this is the process of a distributed run that writes."""
    return rank() == 0


def _in_their_sections(layer: Layer) -> Iterator[Mistake]:
    """``train`` takes any field of PeftRLConfig: those that other sections hold move there; others there are none."""
    for name, value in layer.values.items():
        if name not in SECTION_NAMES:
            section = did_you_mean(name, (KEY, *SECTION_NAMES))
            near = section.startswith("did ") and name not in train_fields() and "." not in name
            hint = (section if near else hint_for_section(name, value)) or section
            yield Mistake("unknown section", layer.where((name,)), hint)
    train = layer.values.get("train")
    if not isinstance(train, Mapping):
        return
    layer.values["train"] = kept = dict(train)
    for (section, key), name in FIELD_OF_SETTING.items():
        if name not in kept:
            continue
        home = layer.values.get(section)
        if home is None:  # not there, or there without a setting
            home = layer.values[section] = {}
        if not isinstance(home, dict):
            continue
        if key in home and home[key] != kept[name]:
            yield Mistake(
                without_credentials(f"{kept[name]!r} contradicts {section}.{key}: {home[key]!r}"),
                layer.where(("train", name)),
                f"write it once, as {section}.{key}",
            )
        home[key] = kept.pop(name)
        layer.origins[(section, key)] = layer.origins.get(("train", name), "recipe")


def _validated_rewards(
    layer: Layer, mistakes: list[Mistake], *, usual: Mapping[str, RewardSetting], taught: bool
) -> dict[str, Any]:
    """The rewards: the usual ones where none are written; beside a teacher none are needed."""
    values = layer.values.get("rewards")
    if values is None:
        return {"rewards": MappingProxyType(usual)}
    if not isinstance(values, Mapping):
        mistakes.append(Mistake("must map names to weights", layer.where(("rewards",)), "rewards: {accuracy: 1.0}"))
        return {}
    rewards: dict[str, RewardSetting] = {}
    for name, value in values.items():
        if value is None:  # how a recipe drops a reward of the one it extends
            continue
        read = read_section(RewardSetting, value, ("rewards", name), layer, mistakes)
        rewards |= {} if read is None else {name: read}
    written = sum(value is not None for value in values.values())
    if taught and not written:
        return {"rewards": MappingProxyType({})}
    if rewards and not taught and len(rewards) == written:
        where = layer.where(("rewards", next(iter(rewards)), "weight"))
        mistakes += nothing_teaches([setting.weight for setting in rewards.values()], where)
    if not written:
        mistakes.append(Mistake("no reward is left", layer.where(("rewards",)), "rewards: {accuracy: 1.0}"))
    return {"rewards": MappingProxyType(rewards)} if rewards else {}


def _validated_train(
    layer: Layer, mistakes: list[Mistake], engine: EngineSection | None, *, starts: bool, rewarded: bool
) -> dict[str, Any]:
    """The fields of ``train`` and the batch."""
    processes = world_size() if launched() or engine is None else engine.processes or 1
    values = {} if layer.values.get("train") is None else layer.values["train"]
    names = tuple(values) if isinstance(values, Mapping) else ()
    if refused := [name for name in names if name in REFUSED]:
        what = "has no place in a recipe"
        mistakes += [Mistake(what, layer.where(("train", name)), REFUSED[name]) for name in refused]
        values = {name: value for name, value in values.items() if name not in REFUSED}
    model = train_model(names)
    try:
        validated = model.model_validate(values)
    except ValidationError as error:
        mistakes += mistakes_of(error, model, values, ("train",), layer)
        wrong = {detail["loc"][0] for detail in error.errors(include_url=False) if detail["loc"]}
        # What is right goes on to the later stages' checks, so that all mistakes are found at once.
        right = {name: value for name, value in values.items() if name not in wrong} if names else {}
        return {"train": MappingProxyType(right)}
    train = validated.model_dump(exclude_unset=True)
    if starts and all(train.get(name) is not None for name in LENGTHS):
        what = f"has no effect beside train.max_steps: {train['max_steps']}"
        mistakes.append(Mistake(what, layer.where(("train", "num_train_epochs")), "leave one of the two out"))
    signal = has_signal(train, rewarded=rewarded)
    single = generations_mistake(train.get("advantage_estimator", "group"), train.get("num_generations"), signal=signal)
    if single is not None:
        mistakes.append(replace(single, where=layer.where(("train", single.where))))
    try:
        batch = plan_batch(**{name: train.get(name) for name in NUMBERS}, world_size=processes)
    except PerlError as error:
        mistakes += [replace(one, where=layer.where(one.where.split("."))) for one in error.mistakes if starts]
        return {"train": MappingProxyType(train)}
    return {"train": MappingProxyType(train), "batch": batch}
