"""A study as a person writes it: one recipe, what varies, which seeds choose and which score.

study.yaml -> StudyFile
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator, model_validator

from perl.errors import Mistake, RecipeError, raise_all
from perl.recipe.layers import Layer, layer_of_mapping, read_yaml
from perl.recipe.section import Section, SettingError
from perl.recipe.validation import mistakes_of

TUNED = "train.learning_rate"
"""What is chosen for each of the compared unless a study says otherwise."""

Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Seeds(Section):
    """Values of ``train.seed``: with some a setting is chosen, with others, never seen before, it is scored."""

    choose: list[Seed] = Field([], description="To choose the settings of `tune` with.")
    score: list[Seed] = Field(min_length=1, description="To score with what was chosen.")

    @model_validator(mode="after")
    def _check_apart(self) -> "Seeds":
        for key, seeds in (("choose", self.choose), ("score", self.score)):
            if len(set(seeds)) < len(seeds):
                raise SettingError(key, f"a seed stands twice: {seeds}")
        shared = sorted(set(self.choose) & set(self.score))
        if shared:
            raise SettingError("score", f"{shared} choose too; a score is worth nothing on the seed that chose it")
        return self


class Halving(Section):
    """Of the candidates among which a setting is chosen, only the better ones are trained to the end."""

    at: list[Annotated[float, Field(gt=0, lt=1)]] = Field(
        [0.25, 0.5], min_length=1, description="Shares of a training after which some are ended."
    )
    keep: float = Field(0.5, gt=0, lt=1, description="Share of the candidates that go on, at least one.")


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
    baseline: dict[str, Any] = Field(
        {}, description="Settings of the arm that others are held against; else the first."
    )
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
            if not isinstance(values, list) or not values:
                raise ValueError(f"{key} needs a list of values, as {key}: [{values}]")
        return blocks

    @model_validator(mode="after")
    def _check_keys(self) -> "StudyFile":
        for where, keys in (("grid", self.varying), ("overrides", set(self.overrides))):
            for key in sorted(keys):
                if "." not in key and key != "algorithm":
                    raise SettingError(where, f"{key} is no key of a recipe: section.key, as in peft.method")
                if key in ("train.seed", "train.output_dir"):
                    raise SettingError(where, f"{key} is the study's own: `seeds` has the seeds, --output the folder")
                if where == "grid" and key.startswith(("eval.", "data.eval")):
                    raise SettingError(where, f"{key}: what cells are scored by is the same for all: overrides has it")
                if where == "grid" and key in self.overrides:
                    raise SettingError("overrides", f"{key} varies too, in the grid")
        if self.chosen and not self.seeds.choose:
            raise SettingError("seeds", f"choose: {self.chosen[0]} is chosen, so some seeds are needed to choose it")
        if not self.chosen and (self.seeds.choose or self.halving is not None):
            where = "seeds" if self.seeds.choose else "halving"
            raise SettingError(where, "nothing is chosen: name a key of the grid in `tune`, or leave this out")
        return self

    @property
    def varying(self) -> set[str]:
        """The keys of the grid."""
        return {key for block in self.grid for key in block}

    @property
    def chosen(self) -> tuple[str, ...]:
        """The keys that are chosen."""
        usual = (TUNED,) if any(len(block.get(TUNED, [])) > 1 for block in self.grid) else ()
        return usual if self.tune is None else tuple(dict.fromkeys(self.tune))


def read_study(source: str | Path | Mapping[str, Any]) -> tuple[StudyFile, Layer]:
    """A study, and where each of its keys is written.

    Args:
        source: A file, or its content.

    Raises:
        RecipeError: With every mistake of the file; the recipe is not read yet.
    """
    if isinstance(source, Mapping):
        layer = layer_of_mapping(source)
    else:
        path, see = Path(source), "see `perl study --help`"
        if not path.is_file():
            what = "is a folder, not the file of a study" if path.is_dir() else "no such file"
            raise RecipeError(what, str(path), see)
        layer = read_yaml(path, Mistake("a study is a mapping of recipe, grid and seeds", hint=see))
    try:
        return StudyFile(**layer.values), layer
    except ValidationError as error:
        found = list(mistakes_of(error, StudyFile, layer.values, (), layer))
        if not isinstance(source, Mapping):  # a key that is absent has no line
            at = f"{source}:"
            found = [one if one.where.startswith(at) else replace(one, where=f"{at} {one.where}") for one in found]
        raise_all(RecipeError, found)
        raise
