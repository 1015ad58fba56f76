"""Several evaluations beside each other, as far as they were asked the same in the same way.

folders -> Results of several, counted again -> Comparison

Scores that were measured under different protocols stand in one table only on demand, and marked.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from perl.errors import Mistake, PerlError, did_you_mean, raise_all
from perl.evaluation.comparing.compared import PROBLEM, Paired, Scored, difference_of, together
from perl.evaluation.recounting.files import recount_folder
from perl.evaluation.recounting.recount import Recount
from perl.evaluation.scoring.found_results import (
    SHORT_SHA,
    FoundResults,
    conflicts_of,
    differing_settings,
    find_results,
    names_of,
    numbered,
    ways_of,
)
from perl.evaluation.scoring.results import OtherScore, Results, TaskResult, Who
from perl.evaluation.scoring.score import Score
from perl.evaluation.scoring.table import PolicyScore, asked_as_lighteval, doubts, protocol_note, scores_of
from perl.evaluation.scoring.task import MATH
from perl.run.progress import progress

BASE = "base"
"""What each adapter is compared with where its own base is asked for."""
_MOST_NAMED = 4


@dataclass(frozen=True)
class PolicyScores:
    """A policy: a row for each task.

    Attributes:
        name: Unlike every other row's.
        base: The base that it is, or was trained on.
        who: What it is in the results of its tasks.
        tasks: By name, those that it was scored on.
        numbers: Of its results; of a base several.
        group: Number of the base that it is or has; None: that was not scored.
        otherwise: Tasks that it was asked under another protocol than the first that was asked them.
        folder: Where its results lie; None: not known, or of a base.
        settings: Of its run, those that differ between the runs that are compared.
        differences: By the tasks' names, this policy less the one that it is compared with, paired by problem, with p
            values that are corrected for the number of all differences of the comparison.
    """

    name: str
    base: str
    who: Who
    tasks: Mapping[str, TaskResult]
    numbers: Sequence[int]
    group: int | None = None
    otherwise: tuple[str, ...] = ()
    folder: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    differences: Mapping[str, Paired] = field(default_factory=dict)

    @property
    def scores(self) -> dict[str, Score]:
        """By the tasks' names."""
        found = {name: task.base if self.who == "base" else task.adapter for name, task in self.tasks.items()}
        return {name: score for name, score in found.items() if score is not None}

    @property
    def lighteval(self) -> dict[str, OtherScore]:
        """By the tasks' names, lighteval's own scores of tasks that bear its name."""
        named = {name: task for name, task in self.tasks.items() if asked_as_lighteval(task)}
        return {name: task.lighteval[self.who] for name, task in named.items() if self.who in task.lighteval}

    def compared_on(self, task: TaskResult) -> Scored:
        """Its score on a task, and of each problem the share of right completions."""
        rows = {problem.id: problem.base if self.who == "base" else problem.adapter for problem in task.problems}
        shares = {id: fmean(row) for id, row in rows.items() if row}
        return Scored(self.name, {0: fmean(shares.values()) if shares else 0.0}, {0: shares})


@dataclass(frozen=True)
class Comparison:
    """Several evaluations.

    Attributes:
        tasks: Name -> title of what more than one of them was asked.
        policies: Bases first, then in the order given.
        first: Name of the policy that the others are compared with; ``its base`` where each has one of its own.
        notes: What does not agree between them.
        judges: Task -> what judged it where that is not the verifier, as results name it.
    """

    tasks: Mapping[str, str]
    policies: tuple[PolicyScores, ...]
    first: str
    notes: tuple[str, ...]
    judges: Mapping[str, str] = field(default_factory=dict)


def compare(
    results: Sequence[Results],
    *,
    force: bool = False,
    found: Sequence[FoundResults] | None = None,
    against: str | None = None,
) -> Comparison:
    """Puts evaluations beside each other, and the policy of each against one of them.

    Args:
        results: At least two. A base that several were compared with stands there once, if it scored the same.
        force: Compare scores of different protocols all the same.
        found: Where each lies, by which they are named; None: by their own names.
        against: Name of the row that the others are compared with; ``base``: each with its own base. None: the base if
            results were searched for and all have the same one, else the first result.

    Raises:
        PerlError: No two have a task in common, no row is called so, or, without ``force``, one was measured under
            another protocol; then with every setting that differs.
    """
    names = adapter_names(results) if found is None else names_of(found, results)
    asked = Counter(task.name for one in results for task in one.tasks)
    titles = {task.name: task.title for one in results for task in one.tasks if asked[task.name] > 1}
    shares = [any(task.name in titles for task in one.tasks) for one in results]
    alone = [name for name, is_shared in zip(names, shares, strict=True) if not is_shared]
    if len(results) - len(alone) < 2:
        each = [f"{name}: {', '.join(t.name for t in r.tasks)}" for name, r in zip(names, results, strict=True)]
        raise PerlError(f"{alone[0]} has no task in common with the others", hint="; ".join(each))
    names = [name for name in names if name not in alone]
    results = [one for one, is_shared in zip(results, shares, strict=True) if is_shared]
    found = None if found is None else [one for one, is_shared in zip(found, shares, strict=True) if is_shared]
    conflicts = conflicts_of(results, names, titles)
    if conflicts and not force:
        hint = "--force compares them all the same"
        raise_all(PerlError, [Mistake(text, hint=hint) for text in conflicts.values()])
    rows = _rows(results, names, titles, conflicts, found)
    # With the settings under which each was scored, where these are not the same.
    ways = ways_of(results, {task for _, task in conflicts})
    called = {row.name: f"{row.name} ({way})" if (way := ways[row.numbers[0]]) else row.name for row in rows}
    first, pairs = _pairs(rows, called, against, searched=any(one.searched for one in found or ()))
    notes = [*conflicts.values(), *engines_note(results, names)]
    for name, one in zip(names, results, strict=True):
        if others := [task.title for task in one.tasks if task.name not in titles]:
            notes.append(f"Only {name} was asked: {', '.join(others)}.")
    if alone:
        notes.append(f"Left out, since no other was asked the same tasks: {', '.join(alone)}.")
    scorers = {task.name: task.scorer for one in results for task in one.tasks if task.scorer != MATH}
    judges = {name: scorers[name] for name in titles if name in scorers}
    compared = _with_differences(rows, pairs)
    return Comparison(
        titles, tuple(replace(row, name=called[row.name]) for row in compared), first, tuple(notes), judges
    )


def compare_adapters(results: Sequence[Results]) -> Comparison:
    """Adapters that were asked in one call, each beside its own base; with how, and what their scores are worth.

    Args:
        results: At least two, an adapter each, of which bases may differ.
    """
    scored = any(task.base for one in results for task in one.tasks)
    found = compare(results, force=True, against=BASE if scored else None)
    every: dict[tuple[str, str, str], PolicyScore] = {}  # a base that several have, once
    for name, result in zip(adapter_names(results), results, strict=True):
        for one in (one for task in result.tasks for one in scores_of(task, name)):
            every.setdefault((one.called, one.task.name, repr(one.score)), one)
    how = dict.fromkeys(protocol_note(one) for one in results)
    return replace(found, notes=(*how, *doubts(list(every.values())), *found.notes))


def compare_folders(paths: Sequence[str | Path], *, force: bool = False, against: str | None = None) -> Comparison:
    """Puts the results in several folders beside each other.

    Args:
        paths: As :func:`perl.evaluation.scoring.found_results.find_results` takes them.
        force: As in :func:`compare`.
        against: Likewise.

    Raises:
        PerlError: There are fewer than two results, or some are not those of the samples beside them; or as
            :func:`compare`.
    """
    found = find_results(paths)
    if len(found) < 2:
        raise PerlError("a comparison needs two results, and there is one", str(paths[0]), "name another folder too")
    counted: list[tuple[FoundResults, Recount]] = []
    unreadable: list[Mistake] = []  # no results of ours, among what was searched for
    with progress(len(found), "counting again", unit="results") as line:
        for one in found:
            try:
                counted.append((one, recount_folder(one.folder)))
            except PerlError as error:
                if not one.searched:
                    raise
                unreadable += error.mistakes
            line.update()
    raise_all(PerlError, [mistake for one, again in counted for mistake in again.mistakes_at(str(one.folder))])
    if len(counted) < 2:
        raise_all(PerlError, unreadable)
    results, places = [again.results for _, again in counted], [one for one, _ in counted]
    compared = compare(results, force=force, found=places, against=against)
    notes = [*compared.notes, *(f"Left out: {mistake}." for mistake in unreadable)]
    reported: dict[str, list[str]] = {}  # what could not be counted again, and where
    for one, again in counted:
        if again.reported:
            reported.setdefault(again.reported_sentence, []).append(str(one.folder))
    for sentence, of in reported.items():
        named = ", ".join(of) if len(of) <= _MOST_NAMED else f"{len(of)} of {len(counted)} results"
        notes.append(f"{named}: {sentence}.")
    return replace(compared, notes=tuple(notes))


def _rows(
    results: Sequence[Results],
    names: Sequence[str],
    titles: Mapping[str, str],
    conflicts: Collection[tuple[int, str]],
    found: Sequence[FoundResults] | None,
) -> list[PolicyScores]:
    """Bases, then adapters."""

    def row(name: str, numbers: Sequence[int], who: Who, group: int | None) -> PolicyScores:
        tasks: dict[str, TaskResult] = {}
        for task in (task for i in numbers for task in results[i].tasks if task.name in titles):
            if getattr(task, who) is not None:
                tasks.setdefault(task.name, task)
        otherwise = tuple(task for task in tasks if any((i, task) in conflicts for i in numbers))
        return PolicyScores(name, str(results[numbers[0]].subject["base"]), who, tasks, numbers, group, otherwise)

    groups: list[list[int]] = []  # results that have the same base
    for i, one in enumerate(results):
        if any(task.base and task.name in titles for task in one.tasks):
            same = (group for group in groups if all(_same_base(one, results[j], titles) for j in group))
            group = next(same, [])
            groups += [] if group else [group]
            group.append(i)
    bases = [str(results[group[0]].subject["base"]) for group in groups]
    rows = []
    for number, (group, base) in enumerate(zip(groups, bases, strict=True)):
        own = f"base {base}" if bases.count(base) == 1 else f"base of {names[group[0]]}"
        rows.append(row(BASE if len(groups) == 1 else own, group, "base", number))
    settings = [] if found is None else differing_settings(found)
    for i, one in enumerate(results):
        if any(task.adapter and task.name in titles for task in one.tasks):
            of_base = next((number for number, group in enumerate(groups) if i in group), None)
            adapter = row(names[i], [i], "adapter", of_base)
            rows.append(
                adapter if found is None else replace(adapter, folder=str(found[i].folder), settings=settings[i])
            )
    return rows


def _pairs(
    rows: Sequence[PolicyScores], called: Mapping[str, str], against: str | None, *, searched: bool
) -> tuple[str, list[tuple[PolicyScores, PolicyScores]]]:
    """What they are compared with, as it is called, and each policy behind the one that it is compared with."""
    bases = {row.group: row for row in rows if row.who == "base"}
    adapters = [row for row in rows if row.who == "adapter"]
    if against is None and searched and len(bases) == 1 and adapters and all(row.group in bases for row in adapters):
        against = BASE
    if against == BASE and bases and adapters:
        first = called[next(iter(bases.values())).name] if len(bases) == 1 else "its base"
        return first, [(bases[row.group], row) for row in adapters if row.group in bases]
    known = {row.name: row for row in rows} | {called[row.name]: row for row in rows}
    if against is not None and against not in known:
        raise PerlError(f"no row is called {against!r}", "--against", did_you_mean(against, {row.name for row in rows}))
    # Each result's own policy: its adapter, or a base that was evaluated alone.
    own = {i: row for row in rows for i in row.numbers}  # adapters stand behind bases
    chosen = own[0] if against is None else known[against]
    others = {row.name: row for _, row in sorted(own.items()) if row is not chosen}
    return called[chosen.name], [(chosen, row) for row in others.values()]


def _with_differences(
    rows: Sequence[PolicyScores], pairs: Sequence[tuple[PolicyScores, PolicyScores]]
) -> list[PolicyScores]:
    """Every row less the one that it is compared with, on the tasks whose problems are the same."""
    found: dict[tuple[str, str], Paired] = {}
    for first, row in pairs:
        for name in (name for name in first.tasks if name in row.tasks):
            one, other = first.tasks[name], row.tasks[name]
            difference = difference_of(first.compared_on(one), row.compared_on(other))
            if one.data.get("sha256") == other.data.get("sha256") and difference.by == PROBLEM:
                found[row.name, name] = difference
    corrected = dict(zip(found, together(list(found.values())), strict=True))
    differences = {row.name: {task: one for (name, task), one in corrected.items() if name == row.name} for row in rows}
    return [replace(row, differences=differences[row.name]) for row in rows]


def engines_note(results: Sequence[Results], names: Sequence[str]) -> list[str]:
    """A line if not all completions were drawn by the same engine in the same precision."""
    used = [" ".join(str(found.engine.get(key, "?")) for key in ("backend", "dtype")) for found in results]
    each = ", ".join(f"{name} {engine}" for name, engine in zip(names, used, strict=True))
    return [f"The engines are not the same: {each}."] if len(set(used)) > 1 else []


def adapter_names(results: Sequence[Results]) -> list[str]:
    """What the results are called; with a hash or a number where they are called the same, or as a row for bases is."""
    plain = [str(found.subject["name"]) for found in results]
    hashes = [(found.subject.get("adapter_sha256") or "")[:SHORT_SHA] for found in results]
    longer = [
        f"{name} ({sha})" if sha and (plain.count(name) > 1 or name == "base") else name
        for name, sha in zip(plain, hashes, strict=True)
    ]
    return numbered(longer)


def _same_base(one: Results, other: Results, tasks: Collection[str]) -> bool:
    """Whether two results have the same base and it did the same under the same protocol wherever both scored it."""
    known = ("base", "base_revision", "base_sha256", "base_quantization")
    if any(one.subject.get(name) != other.subject.get(name) for name in known):
        return False
    others = {task.name: task for task in other.tasks}
    shared = [(t, others[t.name]) for t in one.tasks if t.name in others and t.name in tasks]
    return all((a.base, a.protocol_hash) == (b.base, b.protocol_hash) for a, b in shared if a.base and b.base)
