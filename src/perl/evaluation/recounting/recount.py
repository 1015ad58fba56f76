"""Every figure of an evaluation, counted from its samples, and whether a file of figures says the same.

samples -> TaskResult with every figure; Results, samples -> Recount

``perl eval`` counts by :func:`with_figures`, and whoever is to believe a file counts again by the same function.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from perl.errors import Mistake
from perl.evaluation.recounting.judged_again import (
    AGAIN,
    judge_again,
    mistake_of,
    mistake_of_samples,
    path_of,
    shown,
    stated_mistakes,
    unequal,
)
from perl.evaluation.scoring.metrics import paired_difference
from perl.evaluation.scoring.protocol import Protocol, asking_of
from perl.evaluation.scoring.results import RESULTS, SAMPLES, ProblemResult, Results, TaskResult, Who
from perl.evaluation.scoring.samples import Sample
from perl.evaluation.scoring.score import rights, score_samples
from perl.evaluation.scoring.task import Question

Groups = Sequence[Sequence[Sample]]
Golds = Mapping[str, Mapping[str, str | Question]]
"""Task -> problem -> its gold answer, or all of it where another scorer than the verifier judges."""
Basis = Literal["texts", "verdicts"]
"""What figures were counted from: completions that were judged again, or verdicts as they stand beside the lengths and
answers of completions."""

WHO: tuple[Who, ...] = ("base", "adapter")
_SamplesByPlace = Mapping[tuple[str, int], Sequence[Sample]]


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
        results: With every figure as it was counted; of a task that could not be counted as the file says them.
        basis: Task -> what its figures were counted from.
        reported: What could not be counted, in words.
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


def with_figures(task: TaskResult, groups: Mapping[Who, Groups], pass_at: Sequence[int] = ()) -> TaskResult:
    """A task's result with every figure counted from samples.

    Args:
        task: Says what was asked; its figures, and which completions are right, do not count.
        groups: Who -> the samples of each problem, problems in the same order.
        pass_at: Further numbers for pass@k, beside the powers of two up to k.

    Raises:
        ValueError: There is no problem, or fewer completions than pass@k needs.
    """
    names = [samples[0].problem for samples in next(iter(groups.values()))]
    rows = {who: rights(group) for who, group in groups.items()}
    scores = {who: score_samples(group, pass_at, task.scorer) for who, group in groups.items()}
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


def recount(results: Results, samples: KeptSamples, golds: Golds | None = None, held_out: str | None = None) -> Recount:
    """Counts every figure again, and compares.

    Args:
        results: Read from a file, which may hold anything.
        samples: Of the policies that it names.
        golds: By which completions are judged again, where samples have their texts.
        held_out: What the run's held-out problems are called; None: nobody knows.
    """
    by_task: dict[tuple[str, str], dict[tuple[str, int], list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for policy, sample in samples.lines:
        by_task[policy, sample.task][sample.problem, sample.index].append(sample)
    found: list[TaskResult] = []
    basis: dict[str, Basis] = {}
    reported: list[str] = []
    mistakes: list[Mistake] = []
    for task in results.tasks:
        of_task = {who: by_task.pop((key, task.name), {}) for who, key in task.samples.items()}
        one = _recount_task(task, results, samples, of_task, (golds or {}).get(task.name), held_out)
        counted, counted_from, not_counted, wrong = one
        found.append(counted)
        basis |= {task.name: counted_from} if counted_from else {}
        reported += [what for what in not_counted if what not in reported]
        mistakes += wrong
    if samples.exact:
        mistakes += [
            Mistake(f"has {len(of)} samples of policy {policy!r} on {task!r}, which the results do not name", SAMPLES)
            for (policy, task), of in by_task.items()
        ]
    return Recount(replace(results, tasks=tuple(found)), basis, tuple(reported), tuple(mistakes))


def file_mistakes(written: Mapping[str, Any], counted: Results) -> Iterator[Mistake]:
    """Where a results file is not what was counted, the part that lighteval's readers find included.

    Args:
        written: The file.
        counted: Its results, counted again.
    """
    own = json.loads(json.dumps(counted.as_dict()))
    for place, right, there in unequal(own, written):
        message = f"{path_of(place)} is {shown(there)} in the file, counted is {shown(right)}"
        if place[:2] != ("perl", "tasks"):
            yield Mistake(message, RESULTS, AGAIN)
        elif place[3:4] != ("problems",):  # whose rights are compared problem by problem
            yield Mistake(message.removeprefix(".".join(place[:3]) + "."), f"{RESULTS}: {place[2]}", AGAIN)


def _recount_task(
    task: TaskResult,
    results: Results,
    kept: KeptSamples,
    found: Mapping[str, _SamplesByPlace],
    golds: Mapping[str, str | Question] | None,
    held_out: str | None,
) -> tuple[TaskResult, Basis | None, list[str], list[Mistake]]:
    """The task, of no basis where it could not be counted; what was not counted again; what is wrong."""
    mistakes, reported = stated_mistakes(task, results.protocol, held_out, asking_of(results.subject))
    if task.lighteval:
        reported.append("lighteval's own scores")
    of_golds = _gold_mistakes(task, golds)
    groups, of_samples = _groups(task, results.protocol, found, exact=kept.exact)
    mistakes += [*of_golds, *of_samples]
    if groups is None:
        return task, None, reported, mistakes
    basis: Basis = "verdicts"
    if kept.texts and golds is not None and not of_golds:
        (groups, undecided, otherwise), basis = judge_again(task, groups, golds), "texts"
        mistakes += otherwise
        if undecided:
            reported.append(f"{undecided} completions on {task.name} that the verifier could not decide")
    else:
        reported.append("which completions are right")
    pass_at = {k for score in (task.base, task.adapter) if score is not None for k in score.pass_at}
    try:
        counted = with_figures(task, groups, sorted(pass_at))
    except ValueError as error:
        mistakes.append(mistake_of(task, f"its figures cannot be counted: {str(error)[:100]}"))
        return task, None, reported, mistakes
    return counted, basis, reported, [*mistakes, *_other_rights(task, counted)]


def _gold_mistakes(task: TaskResult, golds: Mapping[str, str | Question] | None) -> list[Mistake]:
    """Whether the problems are those of the data that the results name, all and in order; no golds: there are none."""
    if golds is None:
        return []
    if golds and [problem.id for problem in task.problems] == list(golds):
        return []
    what = "data is" if not task.few_shot else f"problems, or the {task.few_shot} examples before them, are"
    message = f"its {what} not the task's, whose first {len(task.problems)} problems have another SHA-256"
    return [mistake_of(task, message)]


def _groups(
    task: TaskResult, protocol: Protocol, found: Mapping[str, _SamplesByPlace], *, exact: bool
) -> tuple[dict[Who, Groups] | None, list[Mistake]]:
    """The samples of each problem, and what is wrong with them; no groups where some are missing."""
    mistakes: list[Mistake] = []
    groups: dict[Who, Groups] = {}
    wanted = [[(problem.id, index) for index in range(task.score.k)] for problem in task.problems]
    needed = {place for row in wanted for place in row}
    scored = [who for who in WHO if getattr(task, who) is not None]
    for who in scored:
        there = found.get(who, {})
        missing = [place for row in wanted for place in row if place not in there]
        if missing:
            mistakes.append(mistake_of_samples(task, who, missing, f"{len(missing)} samples are missing"))
            continue
        groups[who] = [[there[place][0] for place in row] for row in wanted]
        mistakes += _sample_mistakes(task, who, protocol, there)
        if further := [place for place in there if exact and place not in needed]:
            message = f"{len(further)} samples do not belong to the results"
            mistakes.append(mistake_of_samples(task, who, further, message))
    return (groups if len(groups) == len(scored) else None), mistakes


def _sample_mistakes(task: TaskResult, who: Who, protocol: Protocol, found: _SamplesByPlace) -> Iterator[Mistake]:
    """Samples that cannot be what they say, a line for each kind."""
    longest = task.max_new_tokens
    kinds: dict[str, Callable[[Sequence[Sample]], bool]] = {
        "stand there more than once": lambda same: len(same) > 1,
        "were not drawn with their own seed": lambda same: same[0].seed != protocol.seed_of(*same[0].place),
        f"have another length than 0 to {longest} tokens, or were cut off elsewhere": lambda same: (
            not same[0].may_be_of(longest)
        ),
    }
    for kind, holds in kinds.items():
        places = [place for place, same in found.items() if holds(same)]
        if places:
            yield mistake_of_samples(task, who, places, f"{len(places)} samples {kind}")


def _other_rights(written: TaskResult, counted: TaskResult) -> Iterator[Mistake]:
    """Of each policy a line where its rights are not what was counted."""
    for who in WHO:
        both = zip(written.problems, counted.problems, strict=True)
        rows = [(one.id, getattr(one, who), getattr(two, who)) for one, two in both]
        other = [(name, there, right) for name, there, right in rows if there != right]
        if other:
            name, there, right = other[0]
            first = f"of problem {name!r} it says {_marks(there)}, counted are {_marks(right)}"
            yield mistake_of(written, f"the {who}'s rights differ on {len(other)} problems: {first}")


def _marks(row: Sequence[bool] | None) -> str:
    """Rights and wrongs as ones and zeros."""
    return "none" if row is None else "".join("1" if right else "0" for right in row)[:64]
