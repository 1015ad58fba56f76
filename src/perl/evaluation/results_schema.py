"""What a results file must hold, down to the last type: it may have been cut, edited or written by another version.

the part ``perl`` of results.json -> plain, checked values

Whatever is wrong is a ``ValueError`` of one line. Whether its numbers follow from its problems is not looked at here.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from perl.evaluation.metrics import Difference
from perl.evaluation.protocol import Protocol
from perl.evaluation.score import Score, pass_numbers
from perl.evaluation.task import MATH
from perl.policy.name import policy_name

_T = TypeVar("_T")
Who = Literal["base", "adapter"]

_TASK_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
_DIGEST = r"^[0-9a-f]{64}$"
_Digest = Annotated[str, Field(pattern=_DIGEST)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Subject(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    name: str
    base: str
    base_revision: str | None
    base_sha256: _Digest
    adapter_sha256: _Digest | None
    adapter_config_sha256: _Digest | None
    policy: _Digest


class _OtherScore(_Record):
    accuracy: float = Field(ge=0, le=1)
    stderr: float | None
    only_ours: int = Field(ge=0)
    only_lighteval: int = Field(ge=0)


class _Data(_Record):
    source: str
    revision: str | None
    sha256: str


class _Task(_Record):
    title: str
    protocol_hash: str
    max_new_tokens: int = Field(ge=1)
    data: _Data
    base: dict[str, Any] | None
    adapter: dict[str, Any] | None
    difference: dict[str, Any] | None
    problems: dict[str, dict[Who, Annotated[str, Field(pattern="^[01]+$")]]]
    lighteval: dict[Who, _OtherScore]
    samples: dict[Who, str]
    scorer: str = Field(MATH, min_length=1, max_length=400)
    few_shot: int = Field(0, ge=0)
    examples: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    asked_for: str | None = Field(None, min_length=1, max_length=400)

    @model_validator(mode="after")
    def _check_examples(self) -> "_Task":
        if bool(self.few_shot) != (self.examples is not None):
            raise ValueError("few_shot and examples do not belong together")
        return self


class _File(_Record):
    version: int
    subject: dict[str, str | None]
    protocol: dict[str, Any]
    engine: dict[str, str | float | None]
    versions: dict[str, str]
    verifier: str
    seconds: float = Field(ge=0)
    tasks: dict[str, _Task] = Field(min_length=1)


def checked(found: Any, *, scored: bool = True) -> dict[str, Any]:  # noqa: ANN401 (JSON)
    """The file's values, with protocol, scores and differences as records.

    Args:
        found: What stands under ``perl``.
        scored: False: tasks may have no score yet.

    Raises:
        ValueError: It is not what we write.
    """
    try:
        facts = _File.model_validate_json(json.dumps(found), strict=True).model_dump()
        subject = _Subject.model_validate(facts["subject"])
        facts["protocol"] = _record(Protocol, facts["protocol"], "protocol")
        for name, task in facts["tasks"].items():
            if _TASK_NAME.fullmatch(name) is None or ".." in name:
                raise ValueError(f"{name!r:.60} is not the name of a task")
            for who in ("base", "adapter"):
                task[who] = None if task[who] is None else _record(Score, task[who], f"{who} on {name}")
            task["difference"] = _difference(task["difference"], name)
            if scored or task["base"] is not None or task["adapter"] is not None:
                _check_fit(name, task)
    except ValidationError as error:
        raise ValueError(_reason(error)) from None
    if subject.policy != policy_name(subject.base_sha256, subject.adapter_sha256, subject.adapter_config_sha256):
        raise ValueError("its policy is not the one that its digests name")
    return facts


def _record(kind: type[_T], facts: Mapping[str, Any], what: str) -> _T:
    """A record of ours from exactly its fields."""
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if facts.keys() != fields:
        odd = sorted(fields ^ facts.keys())[0]
        raise ValueError(f"{what}: {odd!r:.60} {'is absent' if odd in fields else 'is unknown'}")
    try:
        return TypeAdapter(kind).validate_json(json.dumps(facts), strict=True)
    except ValidationError as error:
        raise ValueError(f"{what}: {_reason(error)}") from None


def _difference(facts: Mapping[str, Any] | None, name: str) -> Difference | None:
    """JSON has no NaN, which a single problem's interval is."""
    if facts is None:
        return None
    numbers = {field.name for field in dataclasses.fields(Difference) if field.type in (float, "float")}
    absent = [key for key, value in facts.items() if value is None and key in numbers]
    found = _record(Difference, {**facts, **dict.fromkeys(absent, 0.0)}, f"difference on {name}")
    return dataclasses.replace(found, **dict.fromkeys(absent, math.nan))


def _check_fit(name: str, task: Mapping[str, Any]) -> None:
    """Scores and problems are of the same policies, and there are as many of each as the scores say."""
    if task["base"] is None and task["adapter"] is None:
        raise ValueError(f"{name} was not scored")
    problems = task["problems"].values()
    for who in ("base", "adapter"):
        score, rows = task[who], [row[who] for row in problems if who in row]
        if score is None and rows:
            raise ValueError(f"{name}: there is no score of the {who}, though there are problems")
        if score is not None:
            _check_score(score, rows, len(problems), f"{name}: the score of the {who}")
    if task["difference"] is not None and None in (task["base"], task["adapter"]):
        raise ValueError(f"{name}: there is a difference, though one policy only was scored")


def _check_score(score: Score, rows: Sequence[str], problems: int, what: str) -> None:
    if not len(rows) == problems == score.n or any(len(row) != score.k for row in rows):
        raise ValueError(f"{what} is not of {score.n} problems with {score.k} completions each")
    if min(score.k, score.n) < 1 or not set(pass_numbers(score.k)) <= score.pass_at.keys():
        raise ValueError(f"{what} is of no problem, or lacks pass@{score.k} or one below it")


def _reason(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part)[:60] for part in first["loc"])
    return f"{place!r} is absent" if first["type"] == "missing" else f"{place}: {first['msg']}"
