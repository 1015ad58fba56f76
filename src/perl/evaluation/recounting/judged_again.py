"""Completions that are judged again from their texts, and whether a file says the same.

TaskResult, samples with texts, gold answers -> samples with the verdicts of now, what the file says otherwise

Every text is judged, whatever verdict stands beside it. Most verdicts are known at once or by a moment of algebra, and
must be the file's. A comparison that takes long may be over its limit on one day and not on another: such a verdict may
be undecided in the file, and how many are is reported. A decided one never stands where the text gives none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from perl.errors import Mistake
from perl.evaluation.recounting.stated import mistake_of_samples, shown
from perl.evaluation.results import TaskResult, Who
from perl.evaluation.samples import Place, Sample
from perl.evaluation.scorers import SCORERS
from perl.evaluation.task import Question, all_tasks
from perl.rewards.verifier import Judging, check_all
from perl.types import Verdict

UNDECIDED = frozenset({"timeout", "error"})
# Wall time for one comparison: more than an evaluation allows, so that a busy machine overturns no verdict.
_PATIENCE_SECONDS = 30.0
# What is decided so soon was not too long for an evaluation, which allows several times as much. What is not, would be
# undecided again after perl eval, and could never be pushed.
_SOON_SECONDS = 1.0


@dataclass(frozen=True)
class SecondVerdicts:
    """Samples of a task with the verdicts that their texts get now.

    Attributes:
        groups: Who -> the samples of each problem.
        undecided: How many completions the verifier decides neither in the file nor, soon enough, now.
        mistakes: What the file says otherwise.
    """

    groups: Mapping[Who, Sequence[Sequence[Sample]]]
    undecided: int
    mistakes: Sequence[Mistake]


def judge_again(
    task: TaskResult, groups: Mapping[Who, Sequence[Sequence[Sample]]], golds: Mapping[str, str | Question]
) -> SecondVerdicts:
    """Judges every completion.

    Args:
        task: Whose they are.
        groups: Who -> the samples of each problem, with their texts.
        golds: Problem -> gold answer, or all of it where another scorer than the verifier judges, which is the task's
            definition's then.

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
    return SecondVerdicts(again, undecided, mistakes)


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
