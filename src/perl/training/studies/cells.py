"""The cells of a study: which settings each trains with, and what its run folder is called.

StudyFile -> Arm, Candidate, Cell

An arm is one of what is compared; a candidate is an arm with a value for each setting that is chosen; a cell is a
candidate with a seed. A setting of the adapter that a method does not have is left out for that method.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from perl.errors import Mistake, RecipeError, raise_all
from perl.methods.registry import METHODS
from perl.recipe.layers import Layer
from perl.recipe.plain_yaml import PlainDumper
from perl.training.studies.study_file import StudyFile

METHOD = "peft.method"
_OF_A_METHOD = ("peft.rank", "peft.alpha", "peft.dropout", "peft.target_modules")
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Candidate:
    """Settings that are trained with several seeds.

    Attributes:
        arm: The compared settings, by key.
        chosen: Those that are chosen, by key.
    """

    arm: Mapping[str, Any]
    chosen: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """All that varies."""
        return {**self.arm, **self.chosen}

    @property
    def key(self) -> str:
        """By which two are the same."""
        return canonical(self.settings)

    @property
    def title(self) -> str:
        """For people: ``lora, rank 4``; of the compared settings alone."""
        return titled(self.arm)


CHOOSES, SCORES = "choose", "score"
"""What a cell's seed is for, and the folder that it is in."""


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
        stage: :data:`CHOOSES` or :data:`SCORES`.
        name: Of its run folder, and of its log.
    """

    candidate: Candidate
    seed: int
    stage: str
    name: str

    @property
    def overrides(self) -> tuple[str, ...]:
        """As ``perl train`` takes them, without those of the whole study."""
        return (*as_overrides(self.candidate.settings), f"train.seed={self.seed}")


def candidates(study: StudyFile, layer: Layer | None = None) -> list[Candidate]:
    """Every candidate of the grid, in its order.

    Raises:
        RecipeError: Two cells of the grid are equal as they are written.
    """
    found: dict[str, Candidate] = {}
    mistakes: list[Mistake] = []
    written: set[str] = set()
    order = list(dict.fromkeys(key for block in study.grid for key in block))
    for block in study.grid:
        for values in itertools.product(*block.values()):
            asked = dict(zip(block, values, strict=True))
            same = canonical(asked)
            if same in written:
                where = layer.where(("grid",)) if layer is not None else "grid"
                mistakes.append(Mistake(f"two cells are equal: {titled(asked)}", where, "write each value once"))
            written.add(same)
            kept = without_absent(asked, study.overrides)
            arm = {key: kept[key] for key in order if key in kept and key not in study.chosen}
            chosen = {key: kept[key] for key in order if key in kept and key in study.chosen}
            one = Candidate(arm, chosen)
            found.setdefault(one.key, one)
    raise_all(RecipeError, list(dict.fromkeys(mistakes)))
    return list(found.values())


def cells_of(some: Sequence[Candidate], seeds: Sequence[int], stage: str) -> list[Cell]:
    """A cell for each candidate and seed, seed by seed, so that all candidates have as many when a study is ended."""
    return [Cell(one, seed, stage, cell_name(one, seed)) for seed in seeds for one in some]


def at_baseline(arm: Candidate, chosen: Mapping[str, Any], overrides: Mapping[str, Any]) -> Candidate:
    """An arm with what was chosen for the baseline, as far as its method has such settings.

    Args:
        arm: One of its candidates.
        chosen: Settings that were chosen for the baseline.
        overrides: Of every cell.
    """
    kept = without_absent({**arm.arm, **chosen}, overrides)
    return Candidate(arm.arm, {key: value for key, value in chosen.items() if key in kept})


def cell_name(candidate: Candidate, seed: int) -> str:
    """Name of a cell's run folder, the same whatever else is in the study."""
    parts = [_slug(key, value) for key, value in candidate.settings.items()]
    name = "_".join([*parts, f"seed-{seed}"])
    plain = all(isinstance(value, str | int | float | bool | None) for value in candidate.settings.values())
    if plain and len(name) <= _LONGEST_NAME and re.fullmatch(r"[\w.,+-]+", name):
        return name
    digest = hashlib.sha256(candidate.key.encode()).hexdigest()[:8]
    short = re.sub(r"[^\w.,+-]+", "-", name)[:_LONGEST_NAME]
    return f"{short}_{digest}"


def titled(settings: Mapping[str, Any]) -> str:
    """Settings for people: those that are names without their key."""
    return ", ".join(_titled(key, value) for key, value in settings.items()) or "the recipe"


def counted(number: int, of: str) -> str:
    """``1 cell``, ``2 cells``."""
    return f"{number} {of}{'' if number == 1 else 's'}"


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Settings as ``section.key=value``."""
    return [f"{key}={_flow(value)}" for key, value in flat(settings)]


def canonical(value: object) -> str:
    """A text that is the same for equal values."""
    return json.dumps(value, sort_keys=True, default=str)


def without_absent(asked: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those of the adapter that the cell's method does not have."""
    method = METHODS.get(str(asked.get(METHOD, overrides.get(METHOD, ""))))
    absent = () if method is None else [key for key in _OF_A_METHOD if key.partition(".")[2] not in method.settings]
    return {key: value for key, value in asked.items() if key not in absent}


def flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """``train: {max_steps: 4}`` as ``train.max_steps``; what stands under a whole key stays as it is."""
    for key, value in settings.items():
        if "." not in key and isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", one) for inner, one in value.items())
        else:
            yield key, value


def _flow(value: object) -> str:
    """A value as YAML on one line."""
    text = yaml.dump(value, Dumper=PlainDumper, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _slug(key: str, value: object) -> str:
    text = value if isinstance(value, str) else _flow(value)
    section, _, last = key.rpartition(".")
    return text if key == METHOD else f"{last if section in ('peft', 'train') else key}-{text}"


def _titled(key: str, value: object) -> str:
    last = key.rpartition(".")[2].replace("_", " ")
    if isinstance(value, str) and key in (METHOD, "algorithm"):
        return value
    return f"{last} {value if isinstance(value, str) else _flow(value)}"
