"""The cells of a study: which settings each trains with, and what its run folder is called.

StudyFile -> Candidate, Cell

An arm is one of what is compared; a candidate is an arm with a value for each setting that is chosen; a cell is a
candidate with a seed. A setting of the adapter that a method does not have is left out for that method.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from perl.methods.registry import METHODS
from perl.recipe.plain_yaml import PlainDumper
from perl.training.studies.study_file import StudyFile

METHOD = "peft.method"
_OF_A_METHOD = ("peft.rank", "peft.alpha", "peft.dropout", "peft.target_modules")
_LONGEST_NAME = 100

CHOOSES, SCORES = "choose", "score"
"""What a cell's seed is for, and the folder that it is in."""


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


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
        stage: :data:`CHOOSES` or :data:`SCORES`.
    """

    candidate: Candidate
    seed: int
    stage: str

    @property
    def name(self) -> str:
        """Of its run folder and its log, the same whatever else is in the study."""
        settings = self.candidate.settings
        parts = []
        for key, value in settings.items():
            text, (section, _, last) = value if isinstance(value, str) else _on_one_line(value), key.rpartition(".")
            short = last if section in ("peft", "train") else key
            parts.append(text if key == METHOD else f"{short}-{text}")
        name = "_".join(parts)
        plain = all(isinstance(value, str | int | float | bool | None) for value in settings.values())
        if not (plain and len(name) <= _LONGEST_NAME and re.fullmatch(r"[\w.,+-]*", name)):
            digest = hashlib.sha256(self.candidate.key.encode()).hexdigest()[:8]
            short = re.sub(r"[^\w.,+-]+", "-", name)[:_LONGEST_NAME]
            name = f"{short}_{digest}"
        return f"{name}_seed-{self.seed}" if name else f"seed-{self.seed}"

    @property
    def overrides(self) -> tuple[str, ...]:
        """As ``perl train`` takes them, without those of the whole study."""
        return (*as_overrides(self.candidate.settings), f"train.seed={self.seed}")


def candidates(study: StudyFile) -> list[Candidate]:
    """Every candidate of the grid once, in its order."""
    found: dict[str, Candidate] = {}
    order = list(dict.fromkeys(key for block in study.grid for key in block))
    for block in study.grid:
        for values in itertools.product(*block.values()):
            kept = without_absent(dict(zip(block, values, strict=True)), study.overrides)
            arm = {key: kept[key] for key in order if key in kept and key not in study.chosen}
            chosen = {key: kept[key] for key in order if key in kept and key in study.chosen}
            one = Candidate(arm, chosen)
            found.setdefault(one.key, one)
    return list(found.values())


def cells_of(some: Sequence[Candidate], seeds: Sequence[int], stage: str) -> list[Cell]:
    """A cell for each candidate and seed, seed by seed, so that all candidates have as many when a study is ended."""
    return [Cell(one, seed, stage) for seed in seeds for one in some]


def titled(settings: Mapping[str, Any]) -> str:
    """Settings for people: those that are names without their key."""
    words = []
    for key, value in settings.items():
        text = value if isinstance(value, str) else _on_one_line(value)
        is_name = isinstance(value, str) and key in (METHOD, "algorithm")
        words.append(text if is_name else f"{key.rpartition('.')[2].replace('_', ' ')} {text}")
    return ", ".join(words) or "the recipe"


def counted(number: int, of: str) -> str:
    """``1 cell``, ``2 cells``."""
    return f"{number} {of}{'' if number == 1 else 's'}"


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Settings as ``section.key=value``."""
    return [f"{key}={_on_one_line(value)}" for key, value in settings.items()]


def canonical(value: object) -> str:
    """A text that is the same for equal values."""
    return json.dumps(value, sort_keys=True, default=str)


def without_absent(asked: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those of the adapter that the cell's method does not have."""
    method = METHODS.get(str(asked.get(METHOD, overrides.get(METHOD, ""))))
    absent = () if method is None else [key for key in _OF_A_METHOD if key.partition(".")[2] not in method.settings]
    return {key: value for key, value in asked.items() if key not in absent}


def _on_one_line(value: object) -> str:
    text = yaml.dump(value, Dumper=PlainDumper, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
