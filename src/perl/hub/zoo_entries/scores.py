"""Whose scores were counted again, and what an entry of the zoo takes from them.

Recount -> scores of an entry, or what is wrong with them

A results file in which any figure is not what was counted is refused.
"""

from dataclasses import replace
from typing import Any

from perl.errors import PerlError, raise_all
from perl.evaluation.protocol import Protocol, asking_of
from perl.evaluation.recounting.recount import Recount
from perl.evaluation.results import Results, TaskResult
from perl.hub.card.policy_check import policy_mistakes
from perl.zoo.entry import TaskScore


def checked_scores(found: Recount, adapter_sha256: str, config: str | bytes, where: str) -> list[TaskScore]:
    """The scores of a results file, as an entry has them.

    Args:
        found: Results, counted again.
        adapter_sha256: Of the weights that they must belong to.
        config: The text of the ``adapter_config.json`` beside them.
        where: Names them in an error.

    Raises:
        PerlError: They are another policy's, or a figure of the file is not what was counted.
    """
    text = config.encode() if isinstance(config, str) else config
    wrong = policy_mistakes(found.results, text, adapter_sha256, where)
    raise_all(PerlError, [replace(mistake, hint=f"perl eval --adapter {where}") for mistake in wrong])
    raise_all(PerlError, found.mistakes_at(where))
    return [_score(task, where) for task in found.results.tasks]


def protocol_facts(results: Results) -> dict[str, Any]:
    """How an entry says it was evaluated: the protocol, the chat template and the engine."""
    engine = {name: results.engine.get(name) for name in ("backend", "dtype")}
    return {
        **{name: getattr(results.protocol, name) for name in Protocol.__dataclass_fields__},
        "chat_template": results.subject.get("chat_template"),
        **asking_of(results.subject),
        **engine,
    }


def _score(task: TaskResult, where: str) -> TaskScore:
    if task.adapter is None:
        raise PerlError(f"its results have no score of the adapter on {task.name}", where, "perl eval scores it")
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
        few_shot=task.few_shot,
    )
