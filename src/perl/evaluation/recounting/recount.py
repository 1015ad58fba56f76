"""Every figure of an evaluation, counted from its samples, and whether a file of figures says the same.

samples -> TaskResult with every figure; Results, samples, gold answers -> Recount

``perl eval`` counts by :func:`with_figures`, and whoever is to believe a file counts again by the same function. Every
text is judged again, whatever verdict stands beside it. Most verdicts are known at once or by a moment of algebra, and
must be the file's. A comparison that takes long may be over its limit on one day and not on another: such a verdict may
be undecided in the file, and how many are is reported. A decided one never stands where the text gives none.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from perl.errors import Mistake
from perl.evaluation.scoring.metrics import paired_difference
from perl.evaluation.scoring.protocol import Protocol, asking_of, task_facts
from perl.evaluation.scoring.results import HELD_OUT, RESULTS, SAMPLES, ProblemResult, Results, TaskResult, Who
from perl.evaluation.scoring.samples import Place, Sample
from perl.evaluation.scoring.score import rights, score_samples
from perl.evaluation.scoring.scorers import SCORERS
from perl.evaluation.scoring.task import MATH, WITH_TOOLS, Question, all_tasks, shown_fact, titled
from perl.rewards.verifier import Judging, check_all
from perl.sandbox import is_sandbox
from perl.types import Verdict

Groups = Sequence[Sequence[Sample]]
Golds = Mapping[str, Mapping[str, str | Question]]
"""Task -> problem -> its gold answer, or all of it where another scorer than the verifier judges."""
Basis = Literal["texts", "verdicts"]
"""What figures were counted from: completions that were judged again, or verdicts as they stand beside the lengths and
answers of completions."""

WHO: tuple[Who, ...] = ("base", "adapter")
_SamplesByPlace = Mapping[tuple[str, int], Sequence[Sample]]
UNDECIDED = frozenset({"timeout", "unjudged", "error"})
# Processor time for one comparison: more than an evaluation allows, so that a busy machine overturns no verdict.
_PATIENCE_SECONDS = 30.0
# What is decided so soon was not too long for an evaluation, which allows several times as much. What is not, would be
# undecided again after perl eval, and could never be pushed.
_SOON_SECONDS = 1.0
AGAIN = "perl eval writes it anew"
_TOLERANCE = 1e-9
_ABSENT = object()


@dataclass(frozen=True)
class KeptSamples:
    """Samples as a file holds them.

    Attributes:
        lines: What names the policy, and the sample; a line each, those that stand twice included.
        texts: They have the completions' texts; of a file without them, which was published, its results stand on each
            of its samples.
    """

    lines: Sequence[tuple[str, Sample]]
    texts: bool = True


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
    if not samples.texts:
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
        message = f"{'.'.join(place)[:100]} is {shown(there)} in the file, counted is {shown(right)}"
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
    # The problems must be those of the data that the results name, all and in order; without golds nobody knows.
    same_data = bool(golds) and [problem.id for problem in task.problems] == list(golds or ())
    if golds is not None and not same_data:
        what = "data is" if not task.few_shot else f"problems, or the {task.few_shot} examples before them, are"
        message = f"its {what} not the task's, whose first {len(task.problems)} problems have another SHA-256"
        mistakes.append(mistake_of(task, message))
    groups, of_samples = _groups(task, results.protocol, found, exact=not kept.texts)
    mistakes += of_samples
    if groups is None:
        return task, None, reported, mistakes
    basis: Basis = "verdicts"
    if kept.texts and golds is not None and same_data:
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


def _groups(
    task: TaskResult, protocol: Protocol, found: Mapping[str, _SamplesByPlace], *, exact: bool
) -> tuple[dict[Who, Groups] | None, list[Mistake]]:
    """The samples of each problem, and what is wrong with them; no groups where some are missing."""
    mistakes: list[Mistake] = []
    groups: dict[Who, Groups] = {}
    wanted = [[(problem.id, index) for index in range(task.score.k)] for problem in task.problems]
    needed, longest = {place for row in wanted for place in row}, task.max_new_tokens
    scored = [who for who in WHO if getattr(task, who) is not None]
    for who in scored:
        there = found.get(who, {})
        kinds = {"are missing": [place for row in wanted for place in row if place not in there]}
        if not kinds["are missing"]:
            groups[who] = [[there[place][0] for place in row] for row in wanted]
            firsts = {place: same[0] for place, same in there.items()}
            kinds = {
                "stand there more than once": [place for place, same in there.items() if len(same) > 1],
                "were not drawn with their own seed": [
                    place for place, one in firsts.items() if one.seed != protocol.seed_of(*one.place)
                ],
                f"have another length than 0 to {longest} tokens, or were cut off elsewhere": [
                    place for place, one in firsts.items() if not one.may_be_of(longest)
                ],
                "do not belong to the results": [place for place in there if exact and place not in needed],
            }
        for kind, places in kinds.items():
            if places:
                mistakes.append(mistake_of_samples(task, who, places, f"{len(places)} samples {kind}"))
    return (groups if len(groups) == len(scored) else None), mistakes


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


def judge_again(
    task: TaskResult, groups: Mapping[Who, Groups], golds: Mapping[str, str | Question]
) -> tuple[dict[Who, Groups], int, list[Mistake]]:
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
    again: dict[Who, Groups] = {}
    mistakes: list[Mistake] = []
    undecided = 0
    for who, rows in groups.items():
        then = [sample for row in rows for sample in row]
        now = [sample.judged(verdict) for sample, verdict in zip(then, _verdicts(then, golds), strict=True)]
        other = [(one, two) for one, two in zip(then, now, strict=True) if one != two]
        if other:
            one, two = other[0]
            first = f"{one.status} ({shown(one.extracted)}) in the file, {two.status} ({shown(two.extracted)}) now"
            message = f"{len(other)} verdicts are not those of the texts: {first}"
            mistake = mistake_of_samples(task, who, [(one.problem, one.index)], message)
            mistakes.append(replace(mistake, hint="perl eval judges them again"))
        undecided += sum(sample.status in UNDECIDED for sample in now)
        one_by_one = iter(now)
        again[who] = [[next(one_by_one) for _ in row] for row in rows]
    return again, undecided, mistakes


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
    defined, own = all_tasks().get(task.name), task.title == task.name + HELD_OUT
    known, mistakes, reported = None if own else defined, [], []
    if len(set(task.samples.values())) < len(task.samples):
        mistakes.append(mistake_of(task, "base and adapter name the same samples"))
    if known is None and not own:
        return mistakes, [f"the title and the protocol of {task.name}, which is not a task of perl eval"]
    judge, title = (known.scorer, titled(known.title, task.few_shot)) if known else (MATH, task.title)
    if own and task.scorer.startswith(WITH_TOOLS):  # a conversation's verdict takes the run's tools
        judge = task.scorer
    if task.scorer != judge:
        message = f"its scorer is {shown(task.scorer)}, the task's is {shown(judge)}"
        mistakes.append(mistake_of(task, message, "perl eval judges it by that"))
    if task.title != title:
        mistakes.append(mistake_of(task, f"its title is {shown(task.title)}, the task's is {shown(title)}"))
    if own and task.few_shot:
        mistakes.append(mistake_of(task, "it shows examples, and held-out problems are asked without"))
    if own and held_out not in (None, task.name):
        message = f"its title is {shown(task.title)}, the run held out {shown(held_out)}"
        mistakes.append(mistake_of(task, message))
    elif own and defined is not None and not is_sandbox(task.name) and held_out is None:
        reported.append(f"that the problems of {task.title!r} are those of a run, and not the benchmark's")
    version, prompt = (known.version, known.prompt) if known else (1, "{problem}")
    examples = shown_fact(task.few_shot, task.examples)
    about = (task.name, version, prompt, task.data["sha256"], task.max_new_tokens, None if judge == MATH else judge)
    if task.protocol_hash != protocol.hash(task_facts(*about, examples, asking)):
        # Not the right one: who edits results would only have to copy it.
        message = f"its protocol_hash is {shown(task.protocol_hash)}, which protocol, task and data do not give"
        mistakes.append(mistake_of(task, message, "perl eval scores it with the task as it is now"))
    return mistakes, reported


def unequal(expected: object, found: object, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Leaves that are not equal: where, what is expected, what is there."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in [*expected, *(key for key in found if key not in expected)]:
            yield from unequal(expected.get(key, _ABSENT), found.get(key, _ABSENT), (*place, str(key)))
        return
    same = type(expected) is type(found) and expected == found
    if (
        isinstance(expected, int | float)
        and isinstance(found, int | float)
        and bool not in (type(expected), type(found))
    ):
        nans = math.isnan(expected), math.isnan(found)
        same = all(nans) if any(nans) else math.isclose(expected, found, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    if not same:
        yield place, expected, found


def mistake_of(task: TaskResult, message: str, hint: str = AGAIN) -> Mistake:
    """What is wrong with a task's results."""
    return Mistake(message, f"{RESULTS}: {task.name}", hint)


def mistake_of_samples(task: TaskResult, who: Who, places: Sequence[tuple[str, int]], message: str) -> Mistake:
    """What is wrong with some samples of a policy on a task."""
    problem, index = places[0]
    return Mistake(f"{message}; the first is number {index} of problem {problem!r}", f"{SAMPLES}: {task.name}, {who}")


def shown(value: object) -> str:
    """A value as a line may hold it."""
    if value is _ABSENT:
        return "absent"
    return f"{value:.10g}" if isinstance(value, float) else repr(value)[:80]
