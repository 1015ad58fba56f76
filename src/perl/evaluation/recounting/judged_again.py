"""Completions that are judged again from their texts, and whether a file says the same.

TaskResult, samples with texts, gold answers -> samples with the verdicts of now, what the file says otherwise

Every text is judged, whatever verdict stands beside it. Most verdicts are known at once or by a moment of algebra, and
must be the file's. A comparison that takes long may be over its limit on one day and not on another: such a verdict may
be undecided in the file, and how many are is reported. A decided one never stands where the text gives none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from perl.errors import Mistake
from perl.evaluation.recounting.differing import mistake_of_samples, shown
from perl.evaluation.results import TaskResult, Who
from perl.evaluation.samples import Place, Sample
from perl.evaluation.scorers import SCORERS
from perl.evaluation.task import Question, all_tasks
from perl.rewards.answers import extract_answer, gold_answer
from perl.rewards.verifier import Judging, check_all
from perl.rewards.verifier.verdicts import told_at_once
from perl.types import Verdict, VerdictStatus

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
    """What the scorer says of texts; where the file leaves open what would take long, what the file says."""
    questions = [one for s in samples if isinstance(one := problems[s.problem], Question)]
    if questions:
        scorer = SCORERS[all_tasks()[samples[0].task].scorer]
        return scorer.verdicts(questions, [sample.text for sample in samples], Judging())
    golds = {problem: str(gold) for problem, gold in problems.items()}
    answers = [extract_answer(sample.text) for sample in samples]
    at_once = [told_at_once(gold_answer(golds[s.problem]), a) for s, a in zip(samples, answers, strict=True)]
    asked = [s for s, known in zip(samples, at_once, strict=True) if known is None]
    by_place = _asked([s for s in asked if s.status in UNDECIDED], golds, _SOON_SECONDS)
    by_place |= _asked([s for s in asked if s.status not in UNDECIDED], golds, _PATIENCE_SECONDS)
    found = []
    for sample, answer, known in zip(samples, answers, at_once, strict=True):
        status = known or by_place[sample.place]
        both_open = status in UNDECIDED and sample.status in UNDECIDED
        found.append(Verdict(sample.status if both_open else status, answer))  # type: ignore[arg-type]  # one of UNDECIDED
    return found


def _asked(samples: Sequence[Sample], golds: Mapping[str, str], seconds: float) -> dict[Place, VerdictStatus]:
    verdicts = check_all([golds[s.problem] for s in samples], [s.text for s in samples], timeout_seconds=seconds)
    return {sample.place: verdict.status for sample, verdict in zip(samples, verdicts, strict=True)}
