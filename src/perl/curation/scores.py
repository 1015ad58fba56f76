"""Whether a results file adds up, and what an entry of the zoo takes from it.

Results -> scores of an entry, or what is wrong with them

Scores are computed again from the problems, and the protocol's hash from the settings: a number that does not follow
from the file it stands in is refused. Knows nothing of runs or of the Hub.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from perl.errors import PerlError
from perl.evaluation.metrics import average_at_k, standard_error
from perl.evaluation.protocol import Protocol
from perl.evaluation.results import Results, TaskResult
from perl.evaluation.score import Score
from perl.evaluation.task import all_tasks
from perl.policy_name import adapter_policy_name
from perl.saved_adapter import CONFIG
from perl.zoo.entry import TaskScore

_ROUNDING = 1e-9
_SHA_DIGITS = 64
_PROTOCOL = TypeAdapter(Protocol)


def checked_scores(results: Results, adapter_sha256: str, config: str | bytes, where: str) -> list[TaskScore]:
    """The scores of a results file, as an entry has them.

    Args:
        results: Read from a file, which may hold anything.
        adapter_sha256: Of the weights that they must belong to.
        config: The text of the ``adapter_config.json`` beside them.
        where: Names them in an error.

    Raises:
        PerlError: They are another adapter's, of no task, or do not follow from their problems and protocol.
    """
    named = results.subject.get("adapter_sha256")
    if named != adapter_sha256:
        whose = "a base alone" if named is None else f"the adapter {str(named)[:12]}, not {adapter_sha256[:12]}"
        raise PerlError(f"its results belong to {whose}", where, f"perl eval --adapter {where}")
    try:
        policy = adapter_policy_name(config, adapter_sha256, str(results.subject.get("base_sha256")))
    except ValueError as error:
        raise PerlError(f"its {CONFIG} cannot be read: {error}", where) from None
    if results.subject.get("policy") != policy:
        message = f"its results belong to the same weights with another {CONFIG}: the two give another policy"
        raise PerlError(message, where, f"perl eval --adapter {where}")
    if not results.tasks:
        raise PerlError("its results have no task", where, f"perl eval --adapter {where}")
    try:
        _PROTOCOL.validate_json(json.dumps(vars(results.protocol)), strict=True)
        return [_checked(task, results.protocol, where) for task in results.tasks]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise PerlError(f"its results do not add up: {place}: {first['msg']}", where) from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PerlError(f"its results do not add up: {error}", where) from None


def protocol_facts(results: Results) -> dict[str, Any]:
    """How an entry says it was evaluated: the protocol, the chat template and the engine."""
    engine = {name: results.engine.get(name) for name in ("backend", "dtype")}
    return {
        **{name: getattr(results.protocol, name) for name in Protocol.__dataclass_fields__},
        "chat_template": results.subject.get("chat_template"),
        **engine,
    }


def protocol_of(facts: dict[str, Any]) -> Protocol:
    """The protocol in an entry's facts.

    Raises:
        TypeError: They hold none.
    """
    return Protocol(**{name: value for name, value in facts.items() if name in Protocol.__dataclass_fields__})


def _checked(task: TaskResult, protocol: Protocol, where: str) -> TaskScore:
    if task.adapter is None:
        raise PerlError(f"its results have no score of the adapter on {task.name}", where, "perl eval scores it")
    expected = _protocol_hash(task, protocol)
    if task.protocol_hash != expected:
        message = f"the protocol of {task.name} is not the one its hash says ({task.protocol_hash}, not {expected})"
        raise PerlError(message, where, "perl eval scores it with the task as it is now")
    for who, score in (("adapter", task.adapter), ("base", task.base)):
        if score is not None:
            rows = [getattr(problem, who) for problem in task.problems]
            _check_score(score, rows, protocol.k, f"{who} on {task.name}", where)
    base = task.base
    return TaskScore(
        task=task.name,
        metric=f"avg@{task.adapter.k}",
        k=task.adapter.k,
        n=task.adapter.n,
        adapter=task.adapter.accuracy,
        stderr=task.adapter.stderr,
        base=base.accuracy if base else None,
        base_stderr=base.stderr if base else None,
        protocol_hash=task.protocol_hash,
    )


def _protocol_hash(task: TaskResult, protocol: Protocol) -> str:
    """The hash of a task that is ours as it is now; of any other as of problems that a run held out."""
    sha256 = task.data["sha256"]
    if not isinstance(sha256, str) or len(sha256) != _SHA_DIGITS:
        raise ValueError(f"the data of {task.name} has no SHA-256")
    known = all_tasks().get(task.name)
    facts = {
        "task": task.name,
        "task_version": known.version if known else 1,
        "prompt": known.prompt if known else "{problem}",
        "data": sha256,
        "max_new_tokens": task.max_new_tokens,
    }
    return protocol.hash(facts)


def _check_score(score: Score, rows: Sequence[Sequence[bool] | None], k: int, whose: str, where: str) -> None:
    present = [row for row in rows if row is not None]
    if len(present) != len(rows) or len(rows) != score.n or any(len(row) != k for row in present) or score.k != k:
        raise PerlError(f"the score of the {whose} is not of {score.n} problems with {k} completions each", where)
    again, error = average_at_k(present), standard_error(present)
    stderr = None if math.isnan(error) else error
    same_error = stderr == score.stderr if None in (stderr, score.stderr) else _same(stderr, score.stderr)
    if not _same(again, score.accuracy) or not same_error:
        raise PerlError(f"the {whose} scores {score.accuracy}, its problems give {again:g}", where)


def _same(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and abs(one - other) <= _ROUNDING
