"""Every figure of an evaluation, counted from its samples, and whether a file of figures says the same.

samples -> TaskResult with every figure; Results, samples -> Recount

``perl eval`` counts by :func:`with_figures`, and whoever is to believe a file counts again by the same function. Where
samples are missing, what follows from each problem's rights and wrongs is counted from those, and the rest is only
reported.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from perl.errors import Mistake
from perl.evaluation.metrics import paired_difference
from perl.evaluation.protocol import Protocol, asking_of
from perl.evaluation.recounting.differing import AGAIN, marks, mistake_of, mistake_of_samples, path_of, shown, unequal
from perl.evaluation.recounting.judged_again import judge_again
from perl.evaluation.recounting.stated import stated_mistakes
from perl.evaluation.results import RESULTS, SAMPLES, ProblemResult, Results, TaskResult, Who
from perl.evaluation.samples import Sample
from perl.evaluation.score import NOT_FROM_RIGHTS, OF_MAJORITY, Score, TooManyAnswersError, rights, score_samples
from perl.evaluation.task import Question

Groups = Sequence[Sequence[Sample]]
Golds = Mapping[str, Mapping[str, str | Question]]
"""Task -> problem -> its gold answer, or all of it where another scorer than the verifier judges."""
Basis = Literal["texts", "verdicts", "rights"]
"""What figures were counted from: completions that were judged again, verdicts as they stand beside the lengths and
answers of completions, or each problem's rights and wrongs alone."""

WHO: tuple[Who, ...] = ("base", "adapter")
# Answers may be made to take long. Honest ones of 16,000 completions take half a minute on two busy cores.
_UNTRUSTED_SECONDS = 120.0


@dataclass(frozen=True)
class KeptSamples:
    """Samples as a file holds them.

    Attributes:
        lines: What names the policy, and the sample; a line each, those that stand twice included.
        texts: They have the completions' texts, which published ones lack.
        exact: The file holds the samples that its results stand on, and no others.
    """

    lines: Sequence[tuple[str, Sample]]
    texts: bool = True
    exact: bool = False


@dataclass(frozen=True)
class Recount:
    """Results, counted again.

    Attributes:
        results: With every figure that could be counted, as it was counted; the others as the file says them.
        basis: Task -> what its figures were counted from.
        reported: Figures that could not be counted, in words.
        mistakes: Where the file says something else, or samples are not what they should be; a line each.
    """

    results: Results
    basis: Mapping[str, Basis]
    reported: tuple[str, ...]
    mistakes: tuple[Mistake, ...]

    def mistakes_at(self, where: str) -> list[Mistake]:
        """The mistakes, each with a folder or repository as its place."""
        return [replace(mistake, where=f"{where}: {mistake.where}") for mistake in self.mistakes]

    @property
    def reported_sentence(self) -> str:
        """What could not be counted again, as a sentence; empty where everything was."""
        return f"reported, not counted again: {'; '.join(self.reported)}" if self.reported else ""


def with_figures(
    task: TaskResult,
    groups: Mapping[Who, Groups],
    pass_at: Sequence[int] = (),
    until: float | None = None,
) -> TaskResult:
    """A task's result with every figure counted from samples.

    Args:
        task: Says what was asked; its figures, and which completions are right, do not count.
        groups: Who -> the samples of each problem, problems in the same order.
        pass_at: Further numbers for pass@k, beside the powers of two up to k.
        until: When answers are compared no more, of :func:`time.monotonic`; None: never.

    Raises:
        TooManyAnswersError: Time is over.
        ValueError: There is no problem, or fewer completions than pass@k needs.
    """
    names = [samples[0].problem for samples in next(iter(groups.values()))]
    rows = {who: rights(group) for who, group in groups.items()}
    scores = {who: score_samples(group, pass_at, until, task.scorer) for who, group in groups.items()}
    paired = "base" in rows and "adapter" in rows and len(names) > 1
    problems = tuple(
        ProblemResult(name, *(tuple(rows[who][i]) if who in rows else None for who in WHO))
        for i, name in enumerate(names)
    )
    return replace(
        task,
        base=scores.get("base"),
        adapter=scores.get("adapter"),
        difference=paired_difference(rows["base"], rows["adapter"]) if paired else None,
        problems=problems,
    )


def recount(
    results: Results, samples: KeptSamples | None = None, golds: Golds | None = None, held_out: str | None = None
) -> Recount:
    """Counts every figure again that can be counted, and compares.

    Args:
        results: Read from a file, which may hold anything.
        samples: Of the policies that it names; None: there are none, and each problem's rights and wrongs must do.
        golds: By which completions are judged again, where samples have their texts.
        held_out: What the run's held-out problems are called; None: nobody knows.
    """
    found: list[TaskResult] = []
    basis: dict[str, Basis] = {}
    reported: list[str] = []
    mistakes: list[Mistake] = []
    kept = _SampleIndex(samples) if samples is not None else None
    asking = asking_of(results.subject)
    for task in results.tasks:
        try:
            one = _recount_task(task, results.protocol, kept, (golds or {}).get(task.name), held_out, asking)
        except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError) as error:
            mistakes.append(mistake_of(task, f"its figures cannot be counted: {str(error)[:100]}"))
            continue
        found.append(one.task)
        basis[task.name] = one.basis
        reported += [what for what in one.reported if what not in reported]
        mistakes += one.mistakes
    if kept is not None and kept.exact:
        mistakes += kept.unused()
    return Recount(replace(results, tasks=tuple(found)), basis, tuple(reported), tuple(mistakes))


def layout_mistakes(written: Mapping[str, Any], counted: Results) -> list[Mistake]:
    """Where the part of a results file that lighteval's readers find is not what was counted.

    Args:
        written: The file.
        counted: Its results, counted again.
    """
    own = json.loads(json.dumps(counted.as_dict()))
    expected, found = ({key: value for key, value in part.items() if key != "perl"} for part in (own, written))
    return [
        Mistake(f"{path_of(place)} is {shown(there)} in the file, counted is {shown(right)}", RESULTS, AGAIN)
        for place, right, there in unequal(expected, found)
    ]


@dataclass(frozen=True)
class _TaskRecount:
    task: TaskResult
    basis: Basis
    reported: Sequence[str]
    mistakes: Sequence[Mistake]


class _SampleIndex:
    """Samples by policy and task, and which of them were looked up."""

    def __init__(self, samples: KeptSamples) -> None:
        self.texts, self.exact = samples.texts, samples.exact
        # One for all policies and tasks of an untrusted file, which may name any number of both.
        self.until = time.monotonic() + _UNTRUSTED_SECONDS if samples.exact else None
        self._by_task: dict[tuple[str, str], dict[tuple[str, int], list[Sample]]] = defaultdict(dict)
        self._asked: set[tuple[str, str]] = set()
        for policy, sample in samples.lines:
            self._by_task[policy, sample.task].setdefault((sample.problem, sample.index), []).append(sample)

    def of(self, policy: str, task: str) -> dict[tuple[str, int], list[Sample]]:
        self._asked.add((policy, task))
        return self._by_task.get((policy, task), {})

    def unused(self) -> list[Mistake]:
        others = {key: len(found) for key, found in self._by_task.items() if key not in self._asked}
        return [
            Mistake(f"has {count} samples of policy {policy!r} on {task!r}, which the results do not name", SAMPLES)
            for (policy, task), count in others.items()
        ]


def _recount_task(
    task: TaskResult,
    protocol: Protocol,
    kept: _SampleIndex | None,
    golds: Mapping[str, str | Question] | None,
    held_out: str | None,
    asking: Mapping[str, str],
) -> _TaskRecount:
    mistakes, reported = stated_mistakes(task, protocol, held_out, asking)
    if task.lighteval:
        reported.append("lighteval's own scores")
    mistakes += _gold_mistakes(task, golds)
    groups: dict[Who, Groups] = {}
    if kept is not None:
        groups, wrong = _groups(task, protocol, kept)
        mistakes += wrong
    basis: Basis = "rights"
    if groups and kept is not None:
        basis = "verdicts"
        if kept.texts and golds is not None and not _gold_mistakes(task, golds):
            judged = judge_again(task, groups, golds)
            groups, basis = dict(judged.groups), "texts"
            mistakes += judged.mistakes
            if judged.undecided:
                reported.append(f"{judged.undecided} completions on {task.name} that the verifier could not decide")
        counted, left_out = _from_samples(task, groups, kept.until)
        reported += left_out
    else:
        counted = _from_rights(task, protocol)
        reported += ["maj@k", "lengths", "the shares of completions that were cut off, unanswered or not judged"]
    if basis != "texts":
        reported.append("which completions are right")
    return _TaskRecount(counted, basis, reported, [*mistakes, *_differences(task, counted)])


def _gold_mistakes(task: TaskResult, golds: Mapping[str, str | Question] | None) -> list[Mistake]:
    """Whether the problems are those of the data that the results name, all and in order; no golds: there are none."""
    if golds is None:
        return []
    if golds and [problem.id for problem in task.problems] == list(golds):
        return []
    what = "data is" if not task.few_shot else f"problems, or the {task.few_shot} examples before them, are"
    message = f"its {what} not the task's, whose first {len(task.problems)} problems have another SHA-256"
    return [mistake_of(task, message)]


def _groups(task: TaskResult, protocol: Protocol, kept: _SampleIndex) -> tuple[dict[Who, Groups], list[Mistake]]:
    """The samples of each problem, and what is wrong with them; no groups where some are missing."""
    mistakes: list[Mistake] = []
    groups: dict[Who, Groups] = {}
    for who in WHO:
        if getattr(task, who) is None:
            continue
        found = kept.of(task.samples.get(who, ""), task.name)
        wanted = [[(problem.id, index) for index in range(protocol.k)] for problem in task.problems]
        missing = [place for row in wanted for place in row if place not in found]
        if missing:
            mistakes.append(mistake_of_samples(task, who, missing, f"{len(missing)} samples are missing"))
            continue
        groups[who] = [[found[place][0] for place in row] for row in wanted]
        mistakes += _sample_mistakes(task, who, protocol, found)
        needed = {place for row in wanted for place in row}
        further = [place for place in found if place not in needed] if kept.exact else []
        if further:
            message = f"{len(further)} samples do not belong to the results"
            mistakes.append(mistake_of_samples(task, who, further, message))
    complete = all(who in groups for who in WHO if getattr(task, who) is not None)
    return (groups if complete else {}), mistakes


def _sample_mistakes(
    task: TaskResult, who: Who, protocol: Protocol, found: Mapping[tuple[str, int], Sequence[Sample]]
) -> Iterator[Mistake]:
    """Samples that cannot be what they say, a line for each kind."""
    longest = task.max_new_tokens
    kinds: dict[str, Callable[[Sequence[Sample]], bool]] = {
        "stand there more than once": lambda same: len(same) > 1,
        "were not drawn with their own seed": lambda same: (
            same[0].seed != protocol.seed_of(task.name, same[0].problem, same[0].index)
        ),
        f"have another length than 0 to {longest} tokens, or were cut off elsewhere": lambda same: (
            not same[0].may_be_of(longest)
        ),
    }
    for kind, holds in kinds.items():
        places = [place for place, same in found.items() if holds(same)]
        if places:
            yield mistake_of_samples(task, who, places, f"{len(places)} samples {kind}")


def _from_samples(
    task: TaskResult, groups: Mapping[Who, Groups], until: float | None
) -> tuple[TaskResult, Sequence[str]]:
    """Every figure, but maj@k of untrusted answers that take too long to compare; and what was left out."""
    try:
        return with_figures(task, groups, _pass_at(task), until), ()
    except TooManyAnswersError:
        alone = {who: [[replace(s, extracted=None) for s in row] for row in rows] for who, rows in groups.items()}
    counted = with_figures(task, alone, _pass_at(task))
    base, adapter = (_as_reported(getattr(counted, w), getattr(task, w), OF_MAJORITY) for w in WHO)
    return replace(counted, base=base, adapter=adapter), ("maj@k, whose answers take too long to compare",)


def _from_rights(task: TaskResult, protocol: Protocol) -> TaskResult:
    """Figures that follow from each problem's rights and wrongs; the others as they are."""
    groups: dict[Who, Groups] = {}
    for who in WHO:
        if getattr(task, who) is None:
            continue
        rows = [(problem.id, getattr(problem, who)) for problem in task.problems]
        if any(row is None or len(row) != protocol.k for _, row in rows):
            raise ValueError(f"the {who} has not {protocol.k} completions of each problem")
        groups[who] = [
            [Sample(task.name, name, i, 0, "", 0, False, "right" if r else "wrong", None) for i, r in enumerate(row)]
            for name, row in rows
        ]
    counted = with_figures(task, groups, _pass_at(task))
    return replace(
        counted,
        base=_as_reported(counted.base, task.base, NOT_FROM_RIGHTS),
        adapter=_as_reported(counted.adapter, task.adapter, NOT_FROM_RIGHTS),
    )


def _as_reported(counted: Score | None, written: Score | None, names: Sequence[str]) -> Score | None:
    return None if counted is None else replace(counted, **{name: getattr(written, name) for name in names})


def _pass_at(task: TaskResult) -> list[int]:
    return sorted({k for score in (task.base, task.adapter) if score is not None for k in score.pass_at})


def _differences(written: TaskResult, counted: TaskResult) -> list[Mistake]:
    """Every figure that is not what was counted; of the problems a line a policy."""
    found = []
    for who in WHO:
        both = zip(written.problems, counted.problems, strict=True)
        rows = [(one.id, getattr(one, who), getattr(two, who)) for one, two in both]
        other = [(name, there, right) for name, there, right in rows if there != right]
        if other:
            name, there, right = other[0]
            first = f"of problem {name!r} it says {marks(there)}, counted are {marks(right)}"
            found.append(mistake_of(written, f"the {who}'s rights differ on {len(other)} problems: {first}"))
    figures = [asdict(replace(task, problems=())) for task in (written, counted)]
    return found + [
        mistake_of(written, f"{path_of(place)} is {shown(there)} in the file, counted is {shown(right)}")
        for place, right, there in unequal(figures[1], figures[0])
    ]
