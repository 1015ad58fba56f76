"""What a results file states of a task beside its figures: title, protocol hash, where the problems come from.

TaskResult, Protocol -> what is wrong with it, and what is not known; expected, found -> leaves that differ

A benchmark is known by the definition that is here, whatever a file says.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perl.errors import Mistake
from perl.evaluation.few_shot import shown_fact, titled
from perl.evaluation.protocol import Protocol, task_facts
from perl.evaluation.results import HELD_OUT, RESULTS, SAMPLES, TaskResult, Who
from perl.evaluation.task import MATH, Task, all_tasks
from perl.sandbox import is_sandbox

AGAIN = "perl eval writes it anew"
_TOLERANCE = 1e-9
_ABSENT = object()


def stated_mistakes(
    task: TaskResult, protocol: Protocol, held_out: str | None = None, asking: Mapping[str, str] | None = None
) -> tuple[list[Mistake], list[str]]:
    """What is wrong with a task's title, protocol hash and data, and what is not known.

    Args:
        task: As a file has it.
        protocol: Likewise.
        held_out: What the run's held-out problems are called (:func:`perl.data.heldout_name`); None: nobody knows.
        asking: What the file says of template and thinking, see :func:`perl.evaluation.protocol.asking_of`.
    """
    known, own = all_tasks().get(task.name), task.title == task.name + HELD_OUT
    mistakes = []
    if len(set(task.samples.values())) < len(task.samples):
        mistakes.append(mistake_of(task, "base and adapter name the same samples"))
    judge = MATH if own or known is None else known.scorer
    if (own or known is not None) and task.scorer != judge:
        message = f"its scorer is {shown(task.scorer)}, the task's is {shown(judge)}"
        mistakes.append(mistake_of(task, message, "perl eval judges it by that"))
    if known is None and not own:
        return mistakes, [f"the title and the protocol of {task.name}, which is not a task of perl eval"]
    if known is not None and not own:
        title = titled(known.title, task.few_shot)
        if task.title != title:
            mistakes.append(mistake_of(task, f"its title is {shown(task.title)}, the task's is {shown(title)}"))
    if own and task.few_shot:
        mistakes.append(mistake_of(task, "it shows examples, and held-out problems are asked without"))
    reported = []
    if own and held_out not in (None, task.name):
        message = f"its title is {shown(task.title)}, the run held out {shown(held_out)}"
        mistakes.append(mistake_of(task, message))
    elif own and known is not None and not is_sandbox(task.name) and held_out is None:
        reported.append(f"that the problems of {task.title!r} are those of a run, and not the benchmark's")
    mistakes += _hash_mistakes(task, protocol, None if own else known, asking)
    return mistakes, reported


def _hash_mistakes(
    task: TaskResult, protocol: Protocol, known: Task | None, asking: Mapping[str, str] | None
) -> Iterator[Mistake]:
    version, prompt = (known.version, known.prompt) if known else (1, "{problem}")
    judge = known.scorer if known and known.scorer != MATH else None
    about = (task.name, version, prompt, task.data["sha256"])
    examples = shown_fact(task.few_shot, task.examples)
    expected = protocol.hash(task_facts(*about, task.max_new_tokens, judge, examples, asking))
    if task.protocol_hash != expected:
        # Not the right one: who edits results would only have to copy it.
        message = f"its protocol_hash is {shown(task.protocol_hash)}, which protocol, task and data do not give"
        yield mistake_of(task, message, "perl eval scores it with the task as it is now")


def unequal(expected: object, found: object, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Leaves that are not equal: where, what is expected, what is there."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in [*expected, *(key for key in found if key not in expected)]:
            yield from unequal(expected.get(key, _ABSENT), found.get(key, _ABSENT), (*place, str(key)))
    elif not _same(expected, found):
        yield place, expected, found


def _same(one: object, other: object) -> bool:
    numbers = [isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other)]
    if not all(numbers):
        return type(one) is type(other) and one == other
    if math.isnan(float(one)) or math.isnan(float(other)):  # type: ignore[arg-type]
        return math.isnan(float(one)) and math.isnan(float(other))  # type: ignore[arg-type]
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)  # type: ignore[arg-type]


def mistake_of(task: TaskResult, message: str, hint: str = AGAIN) -> Mistake:
    """What is wrong with a task's results."""
    return Mistake(message, f"{RESULTS}: {task.name}", hint)


def mistake_of_samples(task: TaskResult, who: Who, places: Sequence[tuple[str, int]], message: str) -> Mistake:
    """What is wrong with some samples of a policy on a task."""
    problem, index = places[0]
    return Mistake(f"{message}; the first is number {index} of problem {problem!r}", f"{SAMPLES}: {task.name}, {who}")


def path_of(place: Sequence[str]) -> str:
    """A leaf's place, with dots."""
    return ".".join(place)[:100]


def shown(value: object) -> str:
    """A value as a line may hold it."""
    if value is _ABSENT:
        return "absent"
    return f"{value:.10g}" if isinstance(value, float) else repr(value)[:80]
