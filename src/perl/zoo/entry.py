"""An entry of the zoo: one adapter, where it lies, how it was made, and what it scores.

JSON file <-> Entry

Every field that is unknown is null or empty; nothing is guessed.
"""

import json
import statistics
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from perl.errors import PerlError

Provenance = Literal["trained-here", "reported"]

NAME = r"^[a-z0-9][a-z0-9._-]*$"
POLICY = r"^[0-9a-f]{64}$"


class _EntryPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Location(_EntryPart):
    """Where an adapter's files lie, and what they are."""

    shipped: bool = Field(False, description="In the zoo's own folder, beside the entries.")
    repo: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$", description="user/name on the Hub.")
    revision: str | None = Field(None, description="Commit on the Hub.")
    subfolder: str | None = Field(None, description="Folder within the repository.")
    sha256: dict[str, str] = Field({}, description="File name -> SHA-256; empty: nobody here has seen the files.")
    size: int | None = Field(None, ge=0, description="Bytes of these files.")


class TaskScore(_EntryPart):
    """A score on one task, as a fraction, beside the base's under the same protocol."""

    task: str
    metric: str = Field(description="As avg@4.")
    k: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, description="Problems.")
    adapter: float = Field(ge=0, le=1)
    stderr: float | None = Field(None, ge=0)
    base: float | None = Field(None, ge=0, le=1)
    base_stderr: float | None = Field(None, ge=0)
    protocol_hash: str | None = Field(None, description="Of our protocol; null: somebody else's.")
    few_shot: int = Field(0, ge=0, description="Solved examples before every question.")

    @property
    def gain(self) -> float | None:
        """Adapter less base, without the noise of the subtraction."""
        return None if self.base is None else round(self.adapter - self.base, 12)


class SeedScores(_EntryPart):
    """The same recipe with another seed."""

    seed: int
    adapter_sha256: str
    policy: str | None = Field(None, pattern=POLICY)
    scores: dict[str, float] = Field(description="Task -> score.")


class Entry(_EntryPart):
    """One adapter.

    Attributes:
        name: Its name in the zoo, that of its file.
        provenance: ``trained-here``; ``reported``: numbers of others.
        adapter: Where it lies.
        base: Hub id or sandbox name.
        base_revision: Commit.
        base_sha256: Fingerprint of the base's weights.
        base_quantization: What the base was quantised to as it was loaded, for the training and the scores.
        policy: The one name of base, weights and config (see :mod:`perl.policy.name`).
        method: As in ``peft.method``, or what its authors call it.
        settings: Of the adapter and the training, name -> value, for people.
        algorithm: The loss, as ``dapo``.
        recipe: The recipe, section by section, that gives it again; empty if there is none.
        protocol: How it was evaluated; empty for scores of others.
        scores: By task.
        seeds: The same recipe's other seeds.
        tokens: That the policy was trained on, prompts included.
        seconds: Wall time.
        hardware: As ``1 x NVIDIA H100``.
        licence: SPDX identifier.
        source: Where reported numbers come from.
        notes: What one must know: defects, caveats.
        curve: Mean reward, as pairs of step and reward.
        versions: Of packages.
        created: Date, as 2026-01-31.
    """

    name: str = Field(pattern=NAME)
    provenance: Provenance
    adapter: Location = Location()
    base: str
    base_revision: str | None = None
    base_sha256: str | None = None
    base_quantization: str | None = Field(None, pattern=r"^[\w-]{1,40}$")
    policy: str | None = Field(None, pattern=POLICY)
    method: str
    settings: dict[str, Any] = {}
    algorithm: str | None = None
    seed: int | None = None
    recipe: dict[str, Any] = {}
    protocol: dict[str, Any] = {}
    scores: list[TaskScore] = []
    seeds: list[SeedScores] = []
    steps: int | None = Field(None, ge=0)
    tokens: int | None = Field(None, ge=0)
    seconds: float | None = Field(None, ge=0)
    hardware: str | None = None
    trainable_parameters: int | None = Field(None, ge=0)
    licence: str | None = None
    source: str | None = None
    notes: list[str] = []
    curve: list[tuple[int, float]] = []
    versions: dict[str, str] = {}
    created: str | None = Field(None, pattern=r"^\d{4}-\d\d-\d\d$")

    @model_validator(mode="after")
    def _is_what_it_says(self) -> "Entry":
        tasks = [score.task for score in self.scores]
        if len(set(tasks)) < len(tasks):
            raise ValueError(f"it has two scores on {max(tasks, key=tasks.count)}")
        if self.provenance == "reported":
            if not self.source:
                raise ValueError("a reported entry names its source")
            if any(score.protocol_hash for score in self.scores):
                raise ValueError("a reported score has no protocol hash: it was not measured by ours")
        elif not self.adapter.sha256 or not all(score.protocol_hash for score in self.scores):
            raise ValueError("an entry that was measured names the adapter's files and the protocol of each score")
        return self

    @property
    def on_base(self) -> str:
        """The base as it was scored: quantised it is another one than its name says."""
        return f"{self.base} ({self.base_quantization})" if self.base_quantization else self.base

    def score(self, task: str) -> TaskScore | None:
        """The score on a task, if there is one."""
        return next((score for score in self.scores if score.task == task), None)

    def seed_scores(self, score: TaskScore) -> tuple[float, ...]:
        """A score, and those of the same recipe with other seeds."""
        return (score.adapter, *(other.scores[score.task] for other in self.seeds if score.task in other.scores))

    def error(self, score: TaskScore) -> float | None:
        """How sure a score is: its standard error, or the standard deviation over seeds if that is larger."""
        seeds = self.seed_scores(score)
        spread = statistics.stdev(seeds) if len(seeds) > 1 else None
        return max((error for error in (score.stderr, spread) if error is not None), default=None)

    def comparable_as(self, score: TaskScore) -> str:
        """Two scores on a task may be compared if this is the same: one protocol, or one metric of one source."""
        return score.protocol_hash or f"{score.metric} reported by {self.source}"

    def to_json(self) -> str:
        """The entry as its file holds it."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read_entry(path: Path) -> Entry:
    """Reads an entry.

    Raises:
        PerlError: The file is malformed, or its name is not the entry's.
    """
    try:
        entry = parse_entry(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError) as error:
        raise PerlError(f"is not an entry of a zoo: {error}", str(path)) from None
    if entry.name != path.stem:
        raise PerlError(f"holds the entry {entry.name!r}", str(path), f"name the file {entry.name}.json")
    return entry


def parse_entry(text: str, where: str) -> Entry:
    """An entry from its JSON.

    Args:
        text: The JSON.
        where: Its place, for the error.

    Raises:
        PerlError: It is malformed.
    """
    try:
        return Entry.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise PerlError(f"is not an entry of a zoo: {key}: {first['msg']}".replace(": :", ":"), where) from None
