"""A study as a person writes it: one recipe, what varies, which seeds choose and which score.

study.yaml -> StudyFile
"""

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from perl.errors import Mistake, RecipeError, raise_all
from perl.recipe.layers import Layer, layer_of_mapping, read_yaml
from perl.recipe.section import Section, SettingError
from perl.recipe.validation import mistakes_of

TUNED = "train.learning_rate"
"""What is chosen for each of the compared unless a study says otherwise."""


class Seeds(Section):
    """Values of ``train.seed``: with some a setting is chosen, with others, never seen before, it is scored."""

    choose: list[int] = Field([], description="To choose the settings of `tune` with.")
    score: list[int] = Field(min_length=1, description="To score with what was chosen.")

    @model_validator(mode="after")
    def _check_apart(self) -> "Seeds":
        for key in ("choose", "score"):
            seeds = getattr(self, key)
            wrong = [seed for seed in seeds if not 0 <= seed < 2**32]
            if wrong:
                raise SettingError(key, f"a seed is 0 to 2^32 - 1, not {wrong[0]}")
            if len(set(seeds)) < len(seeds):
                raise SettingError(key, f"a seed stands twice: {sorted(s for s in set(seeds) if seeds.count(s) > 1)}")
        shared = sorted(set(self.choose) & set(self.score))
        if shared:
            raise SettingError("score", f"{shared} choose too; a score is worth nothing on the seed that chose it")
        return self


class Halving(Section):
    """Of the candidates among which a setting is chosen, only the better ones are trained to the end."""

    at: list[float] = Field([0.25, 0.5], min_length=1, description="Shares of a training after which some are ended.")
    keep: float = Field(0.5, gt=0, lt=1, description="Share of the candidates that go on, at least one.")

    @model_validator(mode="after")
    def _check_places(self) -> "Halving":
        if not all(0 < place < 1 for place in self.at) or sorted(set(self.at)) != self.at:
            raise SettingError("at", f"must be shares between 0 and 1 that grow, not {self.at}")
        return self


class StudyFile(Section):
    """The keys of a study."""

    recipe: str = Field(min_length=1, description="A recipe file, beside the study, or the name of a packaged one.")
    overrides: dict[str, Any] = Field({}, description="section.key -> value, in every cell.")
    grid: list[dict[str, list[Any]]] = Field(
        min_length=1, description="section.key -> values; of a list of such mappings, the cells of all."
    )
    seeds: Seeds = Field(description="Values of train.seed: {choose: [...], score: [...]}.")
    tune: list[str] | None = Field(
        None, description=f"Keys of the grid that are chosen; [] none; None: {TUNED}, if it varies."
    )
    baseline: dict[str, Any] = Field({}, description="Which of the compared the others are held against.")
    score: Literal["final", "best"] = Field("final", description="Of the last adapter, or of the best of `eval.best`.")
    budget: float | None = Field(None, gt=0, allow_inf_nan=False, description="Core-seconds; then no cell is begun.")
    halving: Halving | None = Field(None, description="Who is trained to the end: {at: [0.25, 0.5], keep: 0.5}.")
    at_once: int = Field(1, ge=1, description="Cells that train at the same time.")
    threads: int = Field(1, ge=1, description="CPU threads of each.")

    @field_validator("grid", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        blocks = [value] if isinstance(value, Mapping) else value
        if not isinstance(blocks, list):
            return blocks
        for key, values in (one for block in blocks if isinstance(block, Mapping) for one in block.items()):
            if not isinstance(values, list):
                raise ValueError(f"{key} needs a list of values, as {key}: [{values}]")
        return blocks

    @field_validator("grid")
    @classmethod
    def _no_list_is_empty(cls, value: list[dict[str, list[Any]]]) -> list[dict[str, list[Any]]]:
        empty = [key for block in value for key, values in block.items() if not values]
        if empty or not all(value):
            raise ValueError(f"{empty[0]} has no value" if empty else "names no setting that varies")
        return value

    @model_validator(mode="after")
    def _check_keys(self) -> "StudyFile":
        known = self.varying
        bare = [key for key in known if "." not in key and key != "algorithm"]
        if bare:
            raise SettingError("grid", f"{bare[0]} is no key of a recipe: section.key, as in peft.method")
        scoring = [key for key in known if key.startswith(("eval.", "data.eval"))]
        if scoring:
            raise SettingError("grid", f"{scoring[0]}: what cells are scored by is the same for all: overrides has it")
        fixed_to = {f"{key}.{inner}" for key, one in self.overrides.items() if isinstance(one, dict) for inner in one}
        fixed_to |= set(self.overrides)
        both = sorted(known & fixed_to)
        if both:
            raise SettingError("overrides", f"{both[0]} varies too, in the grid")
        fixed = sorted({"train.seed", "train.output_dir"} & {*known, *fixed_to})
        if fixed:
            where = "grid" if fixed[0] in known else "overrides"
            raise SettingError(where, f"{fixed[0]} is the study's own: `seeds` has the seeds, --output the folder")
        if self.chosen and not self.seeds.choose:
            raise SettingError(
                "seeds", f"choose: {self.chosen[0]} is chosen, so some seeds are needed to choose it with"
            )
        if self.seeds.choose and not self.chosen:
            raise SettingError("seeds", "choose: nothing is chosen; name a key of the grid in `tune`, or leave it out")
        if self.halving is not None and not self.chosen:
            raise SettingError("halving", "ends candidates among which one is chosen, and nothing is chosen")
        return self

    @property
    def varying(self) -> set[str]:
        """The keys of the grid."""
        return {key for block in self.grid for key in block}

    @property
    def chosen(self) -> tuple[str, ...]:
        """The keys that are chosen."""
        usual = TUNED if any(TUNED in block and len(block[TUNED]) > 1 for block in self.grid) else None
        return tuple(dict.fromkeys(self.tune)) if self.tune is not None else ((usual,) if usual else ())


def read_study(source: str | Path | Mapping[str, Any]) -> tuple[StudyFile, Layer]:
    """A study, and where each of its keys is written.

    Args:
        source: A file, or its content.

    Raises:
        RecipeError: With every mistake of the file; the recipe is not read yet.
    """
    if not isinstance(source, str | PathLike | Mapping):
        raise RecipeError(f"must be a file or a mapping, not {source!r:.60}", "perl.study(source)")
    layer = layer_of_mapping(source) if isinstance(source, Mapping) else _read(Path(source))
    try:
        return StudyFile(**layer.values), layer
    except ValidationError as error:
        found = list(mistakes_of(error, StudyFile, layer.values, (), layer))
        if not isinstance(source, Mapping):  # a key that is absent has no line
            at = f"{source}:"
            found = [one if one.where.startswith(at) else replace(one, where=f"{at} {one.where}") for one in found]
        raise_all(RecipeError, found)
        raise


def _read(path: Path) -> Layer:
    if path.is_dir():
        what = "is a folder; give the file of the study, and its folder as --output"
        planned = (path / "plan.json").is_file()
        raise RecipeError(what if planned else "is a folder, not the file of a study", str(path), "perl study --help")
    if not path.is_file():
        near = sorted(one.name for one in path.parent.glob("*.y*ml") if _is_study(one))
        hint = f"beside it there is {', '.join(near[:3])}" if near else "see `perl study --help`"
        raise RecipeError("no such file", str(path), hint)
    return read_yaml(path, Mistake("a study is a mapping of recipe, grid and seeds", hint="see `perl study --help`"))


def _is_study(path: Path) -> bool:
    """Whether a file has what only a study has, to be named where another one was meant."""
    try:
        found = read_yaml(path, Mistake("no study")).values
    except (RecipeError, OSError):
        return False
    return "grid" in found and "seeds" in found
