"""What an entry of the zoo is made of: an adapter's files, its results, its recipe, its log.

log, results -> fields of an entry

Where they were found makes no difference here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from perl.evaluation.results import Results
from perl.hub.push.package import evenly
from perl.policy.model import public_name
from perl.recipe import Recipe
from perl.zoo.entry import TaskScore

_CURVE_POINTS = 64


@dataclass(frozen=True)
class Material:
    """What is known of an adapter.

    Attributes:
        origin: Where it was found.
        where: What the user named, for errors.
        name: What it may be called.
        files: Name -> bytes of the adapter's files, of those that are on this machine.
        sha256: Name -> SHA-256 of both.
        size: Bytes of both.
        results: Of exactly this adapter.
        scores: What they say, checked.
        repo: On the Hub, if it is there.
        revision: Its commit.
        recipe: How it was trained, if that is known.
        known: Further fields of an entry.
    """

    origin: Literal["run", "hub"]
    where: str
    name: str
    files: Mapping[str, bytes]
    sha256: Mapping[str, str]
    size: int
    results: Results
    scores: Sequence[TaskScore]
    repo: str | None = None
    revision: str | None = None
    recipe: Recipe | None = None
    known: Mapping[str, Any] = field(default_factory=dict)


def steps_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a log that name their step."""
    return [row for row in rows if _is_number(row.get("step"))]


def of_log(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens and learning curve."""
    tokens = [row["num_tokens"] for row in rows if _is_number(row.get("num_tokens"))]
    points = [(int(row["step"]), float(row["reward"])) for row in rows if _is_number(row.get("reward"))]
    return {"tokens": int(tokens[-1]) if tokens else None, "curve": evenly(points, _CURVE_POINTS)}


def of_policy(results: Results) -> dict[str, Any]:
    """The name of what was evaluated, and on which base."""
    subject = results.subject
    base, revision = public_name(str(subject.get("base")), subject.get("base_revision"))
    known = {"base_sha256": subject.get("base_sha256"), "policy": subject.get("policy")}
    known["base_quantization"] = subject.get("base_quantization")
    return {"base": base, "base_revision": revision, **known}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
