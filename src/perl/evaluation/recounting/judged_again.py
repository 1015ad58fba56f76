"""Completions that are judged again from their texts, and whether a file says the same.

TaskResult, samples with texts, gold answers -> samples with the verdicts of now, what the file says otherwise

Every text is judged, whatever verdict stands beside it. Most verdicts are known at once or by a moment of algebra, and
must be the file's. A comparison that takes long may be over its limit on one day and not on another: such a verdict may
be undecided in the file, and how many are is reported. A decided one never stands where the text gives none.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perl.errors import Mistake
from perl.evaluation.scoring.protocol import Protocol, task_facts
from perl.evaluation.scoring.results import HELD_OUT, RESULTS, SAMPLES, TaskResult, Who
from perl.evaluation.scoring.samples import Place, Sample
from perl.evaluation.scoring.scorers import SCORERS
from perl.evaluation.scoring.task import MATH, Question, Task, all_tasks
from perl.evaluation.tasks.few_shot import shown_fact, titled
from perl.rewards.verifier import Judging, check_all
from perl.sandbox import is_sandbox
from perl.types import Verdict

UNDECIDED = frozenset({"timeout", "unjudged", "error"})
# Processor time for one comparison: more than an evaluation allows, so that a busy machine overturns no verdict.
_PATIENCE_SECONDS = 30.0
# What is decided so soon was not too long for an evaluation, which allows several times as much. What is not, would be
# undecided again after perl eval, and could never be pushed.
_SOON_SECONDS = 1.0
AGAIN = "perl eval writes it anew"
_TOLERANCE = 1e-9
_ABSENT = object()


def judge_again(
    task: TaskResult, groups: Mapping[Who, Sequence[Sequence[Sample]]], golds: Mapping[str, str | Question]
) -> tuple[dict[Who, Sequence[Sequence[Sample]]], int, list[Mistake]]:
    """Judges every completion.

    Args:
        task: Whose they are.
        groups: Who -> the samples of each problem, with their texts.
        golds: Problem -> gold answer, or all of it where another scorer than the verifier judges, which is the task's
            definition's then.

    Returns:
        Who -> the samples of each problem, with the verdicts that their texts get now; how many the verifier decides
        neither in the file nor, soon enough, now; what the file says otherwise.

    Raises:
        RewardError: The worker processes cannot be started.
    """
    again: dict[Who, Sequence[Sequence[Sample]]] = {}
    mistakes: list[Mistake] = []
    undecided = 0
    for who, rows in groups.items():
        then = [sample for row in rows for sample in row]
        now = [sample.judged(verdict) for sample, verdict in zip(then, _verdicts(then, golds), strict=True)]
        other = [(one, two) for one, two in zip(then, now, strict=True) if one != two]
        if other:
            mistakes.append(_mistake(task, who, other))
        undecided += sum(sample.status in UNDECIDED for sample in now)
        one_by_one = iter(now)
        again[who] = [[next(one_by_one) for _ in row] for row in rows]
    return again, undecided, mistakes


def _mistake(task: TaskResult, who: Who, other: Sequence[tuple[Sample, Sample]]) -> Mistake:
    then, now = other[0]
    first = f"{then.status} ({shown(then.extracted)}) in the file, {now.status} ({shown(now.extracted)}) now"
    message = f"{len(other)} verdicts are not those of the texts: {first}"
    hint = "perl eval judges them again"
    return replace(mistake_of_samples(task, who, [(then.problem, then.index)], message), hint=hint)


def _verdicts(samples: Sequence[Sample], problems: Mapping[str, str | Question]) -> list[Verdict]:
    """What the scorer says of texts; where neither the file nor the verifier decides, what the file says."""
    questions = [one for s in samples if isinstance(one := problems[s.problem], Question)]
    if questions:
        scorer = SCORERS[all_tasks()[samples[0].task].scorer]
        return scorer.verdicts(questions, [sample.text for sample in samples], Judging())

    def asked(some: Sequence[Sample], seconds: float) -> dict[Place, Verdict]:
        golds = [str(problems[sample.problem]) for sample in some]
        verdicts = check_all(golds, [sample.text for sample in some], timeout_seconds=seconds)
        return {sample.place: verdict for sample, verdict in zip(some, verdicts, strict=True)}

    found = asked([s for s in samples if s.status in UNDECIDED], _SOON_SECONDS)
    found |= asked([s for s in samples if s.status not in UNDECIDED], _PATIENCE_SECONDS)
    both_open = {s.place for s in samples if s.status in UNDECIDED and found[s.place].status in UNDECIDED}
    return [
        replace(found[s.place], status=s.status) if s.place in both_open else found[s.place]  # type: ignore[arg-type]
        for s in samples
    ]


def stated_mistakes(
    task: TaskResult, protocol: Protocol, held_out: str | None = None, asking: Mapping[str, str] | None = None
) -> tuple[list[Mistake], list[str]]:
    """What is wrong with a task's title, protocol hash and data, and what is not known.

    Args:
        task: As a file has it.
        protocol: Likewise.
        held_out: What the run's held-out problems are called (:func:`perl.data.heldout_name`); None: nobody knows.
        asking: What the file says of template and thinking, see :func:`perl.evaluation.scoring.protocol.asking_of`.
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
