"""Several evaluations beside each other, as far as they were asked the same in the same way.

folders -> Results of several, counted again -> Comparison

Scores that were measured under different protocols stand in one table only on demand, and marked.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from perl.errors import Mistake, PerlError, did_you_mean, raise_all
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
from perl.evaluation.scoring.metrics import Difference, corrected, paired_difference
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
    """A policy: a row.

    Attributes:
        name: Unlike every other row's.
        base: The base that it is, or was trained on.
        scores: By the tasks' names.
        otherwise: Tasks that it was asked under another protocol than the first that was asked them.
        differences: By the tasks' names, this policy less the one that it is compared with, paired by problem, with p
            values that are corrected for the number of all differences of the comparison.
        p_values: Each difference's own.
        lighteval: By the tasks' names, lighteval's own scores of tasks that bear its name.
        folder: Where its results lie; None: not known, or of a base.
        settings: Of its run, those that differ between the runs that are compared.
    """

    name: str
    base: str
    scores: Mapping[str, Score]
    otherwise: tuple[str, ...] = ()
    differences: Mapping[str, Difference] = field(default_factory=dict)
    p_values: Mapping[str, float] = field(default_factory=dict)
    lighteval: Mapping[str, OtherScore] = field(default_factory=dict)
    folder: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


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


@dataclass(frozen=True)
class _PolicyRow:
    """A policy with what its scores and its differences are taken from.

    Attributes:
        shown: Without differences.
        who: What it is in these results of its tasks.
        numbers: Of the results; of a base several.
        group: The base that it is or has; None: that was not scored.
        name: Without the settings that tell its protocol from the others'.
    """

    shown: PolicyScores
    who: Who
    tasks: Mapping[str, TaskResult]
    numbers: Sequence[int]
    group: int | None
    name: str

    def called_with(self, way: str) -> "_PolicyRow":
        """The row, its heading with the settings under which it was scored."""
        return replace(self, shown=replace(self.shown, name=f"{self.name} ({way})")) if way else self


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
    titles, alone = _common(results)
    searched = found is not None and any(one.searched for one in found)
    if len(results) - len(alone) < 2:
        each = [f"{name}: {', '.join(t.name for t in r.tasks)}" for name, r in zip(names, results, strict=True)]
        raise PerlError(f"{names[alone[0]]} has no task in common with the others", hint="; ".join(each))
    if alone:
        kept = [i for i in range(len(results)) if i not in alone]
        places = [found[i] for i in kept] if found else None
        rest = compare([results[i] for i in kept], force=force, found=places, against=against)
        others = ", ".join(names[i] for i in alone)
        return replace(rest, notes=(*rest.notes, f"Left out, since no other was asked the same tasks: {others}."))
    conflicts = conflicts_of(results, names, titles)
    if conflicts and not force:
        hint = "--force compares them all the same"
        raise_all(PerlError, [Mistake(text, hint=hint) for text in conflicts.values()])
    rows = _rows(results, names, titles, conflicts, found)
    if conflicts:
        ways = ways_of(results, {task for _, task in conflicts})
        rows = [row.called_with(ways[row.numbers[0]]) for row in rows]
    first, compared = _compared(rows, against, searched=searched)
    notes = (*conflicts.values(), *engines_note(results, names), *_left_out(results, names, titles))
    judges = {task.name: task.scorer for one in results for task in one.tasks if task.scorer != MATH}
    judges = {name: judges[name] for name in titles if name in judges}
    return Comparison(titles, _with_differences(rows, compared, titles), first, notes, judges)


def compare_adapters(results: Sequence[Results]) -> Comparison:
    """Adapters that were asked in one call, each beside its own base; with how, and what their scores are worth.

    Args:
        results: At least two, an adapter each, of which bases may differ.
    """
    names = adapter_names(results)
    scored = any(task.base for one in results for task in one.tasks)
    found = compare(results, force=True, against=BASE if scored else None)
    every: dict[tuple[str, str, str], PolicyScore] = {}  # a base that several have, once
    for name, task in ((name, task) for name, one in zip(names, results, strict=True) for task in one.tasks):
        for who, score in scores_of(task):
            called = "the base" if who == "base" else name
            one_of = PolicyScore(called, task, score, task.lighteval.get(who))
            every.setdefault((called, task.name, repr(score)), one_of)
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
    counted, unreadable = _counted(found)
    mistakes = [mistake for one, recounted in counted for mistake in recounted.mistakes_at(str(one.folder))]
    raise_all(PerlError, mistakes)
    if len(counted) < 2:
        raise_all(PerlError, unreadable)
    compared = compare(
        [one.results for _, one in counted], force=force, found=[one for one, _ in counted], against=against
    )
    notes = [f"Left out: {mistake}." for mistake in unreadable]
    return replace(compared, notes=(*compared.notes, *notes, *_reported(counted)))


def _counted(found: Sequence[FoundResults]) -> tuple[list[tuple[FoundResults, Recount]], list[Mistake]]:
    """Each counted again, and what is no results file of ours among what was searched for."""
    counted: list[tuple[FoundResults, Recount]] = []
    unreadable: list[Mistake] = []
    with progress(len(found), "counting again", unit="results") as line:
        for one in found:
            try:
                counted.append((one, recount_folder(one.folder)))
            except PerlError as error:
                if not one.searched:
                    raise
                unreadable += error.mistakes
            line.update()
    return counted, unreadable


def _reported(counted: Sequence[tuple[FoundResults, Recount]]) -> list[str]:
    """What could not be counted again, with the folders of which it could not, or how many there are."""
    folders: dict[str, list[str]] = {}
    for one, recounted in counted:
        if recounted.reported:
            folders.setdefault(recounted.reported_sentence, []).append(str(one.folder))
    return [
        f"{', '.join(of) if len(of) <= _MOST_NAMED else f'{len(of)} of {len(counted)} results'}: {sentence}."
        for sentence, of in folders.items()
    ]


def _common(results: Sequence[Results]) -> tuple[dict[str, str], list[int]]:
    """Name -> title of the tasks of more than one, and the numbers of those that have none of these."""
    asked = Counter(task.name for one in results for task in one.tasks)
    titles = {task.name: task.title for one in results for task in one.tasks if asked[task.name] > 1}
    return titles, [i for i, one in enumerate(results) if not any(task.name in titles for task in one.tasks)]


def _rows(
    results: Sequence[Results],
    names: Sequence[str],
    titles: Mapping[str, str],
    conflicts: Mapping[tuple[int, str], str],
    found: Sequence[FoundResults] | None,
) -> list[_PolicyRow]:
    """Bases, then adapters."""

    def row(name: str, numbers: Sequence[int], who: Who, group: int | None) -> _PolicyRow:
        tasks: dict[str, TaskResult] = {}
        for task in (task for i in numbers for task in results[i].tasks if task.name in titles):
            if (task.base if who == "base" else task.adapter) is not None:
                tasks.setdefault(task.name, task)
        scores = {
            name: score for name, task in tasks.items() if (score := task.base if who == "base" else task.adapter)
        }
        shown = PolicyScores(
            name,
            str(results[numbers[0]].subject["base"]),
            scores,
            tuple(task for task in tasks if any((i, task) in conflicts for i in numbers)),
            lighteval={
                t.name: t.lighteval[who] for t in tasks.values() if who in t.lighteval and asked_as_lighteval(t)
            },
        )
        if found is not None and who == "adapter":
            (i,) = numbers
            shown = replace(shown, folder=str(found[i].folder), settings=settings[i])
        return _PolicyRow(shown, who, tasks, numbers, group, name)

    settings = [] if found is None else differing_settings(found)
    adapters = [i for i, one in enumerate(results) if any(t.adapter and t.name in titles for t in one.tasks)]
    scored = [i for i, one in enumerate(results) if any(t.base and t.name in titles for t in one.tasks)]
    groups = _base_groups(results, scored, titles)
    of = {i: number for number, group in enumerate(groups) for i in group}
    bases = [
        row(name, group, "base", number)
        for number, (name, group) in enumerate(zip(_base_names(results, names, groups), groups, strict=True))
    ]
    return [*bases, *(row(names[i], [i], "adapter", of.get(i)) for i in adapters)]


def _compared(
    rows: Sequence[_PolicyRow], against: str | None, *, searched: bool
) -> tuple[str, list[tuple[_PolicyRow, _PolicyRow]]]:
    """What they are compared with, and each policy behind the one that it is compared with."""
    bases = {row.group: row for row in rows if row.who == "base"}
    adapters = [row for row in rows if row.who == "adapter"]
    if against is None and searched and len(bases) == 1 and adapters and all(row.group in bases for row in adapters):
        against = BASE
    if against == BASE and bases and (adapters or not any(row.name == BASE for row in rows)):
        first = next(iter(bases.values())).shown.name if len(bases) == 1 else "its base"
        return first, [(bases[row.group], row) for row in adapters if row.group in bases]
    known = {row.name: row for row in rows} | {row.shown.name: row for row in rows}
    if against is not None and against not in known:
        raise PerlError(f"no row is called {against!r}", "--against", did_you_mean(against, {row.name for row in rows}))
    # Each result's own policy: its adapter, or a base that was evaluated alone.
    own = {i: row for row in rows for i in row.numbers}  # adapters stand behind bases
    chosen = own[0] if against is None else known[against]
    compared = {row.shown.name: row for _, row in sorted(own.items())}
    return chosen.shown.name, [(chosen, row) for row in compared.values() if row is not chosen]


def _with_differences(
    rows: Sequence[_PolicyRow], compared: Sequence[tuple[_PolicyRow, _PolicyRow]], titles: Mapping[str, str]
) -> tuple[PolicyScores, ...]:
    """Every row with its differences, whose p values are corrected for the number of all of them."""
    own = {row.shown.name: _differences(first, row, titles) for first, row in compared}
    tests = [(name, task, found) for name, of_row in own.items() for task, found in of_row.items()]
    together: dict[str, dict[str, Difference]] = {name: {} for name in own}
    for (name, task, _), found in zip(tests, corrected([found for _, _, found in tests]), strict=True):
        together[name] |= {} if found is None else {task: found}
    return tuple(
        replace(
            row.shown,
            differences=together.get(row.shown.name, {}),
            p_values={task: found.p_value for task, found in own.get(row.shown.name, {}).items()},
        )
        for row in rows
    )


def _differences(first: _PolicyRow, other: _PolicyRow, tasks: Mapping[str, str]) -> dict[str, Difference]:
    """The other policy less the first on the tasks whose problems are the same."""
    found: dict[str, Difference] = {}
    for name in (name for name in tasks if name in first.tasks and name in other.tasks):
        one, two = first.tasks[name], other.tasks[name]
        if one.data.get("sha256") == two.data.get("sha256"):
            before, after = _rights(one, first.who), _rights(two, other.who)
            if before and before.keys() == after.keys():
                found[name] = paired_difference(list(before.values()), [after[id] for id in before])
    return found


def _rights(task: TaskResult, who: Who) -> dict[str, Sequence[bool]]:
    rows = {problem.id: problem.base if who == "base" else problem.adapter for problem in task.problems}
    return {id: row for id, row in rows.items() if row is not None}


def engines_note(results: Sequence[Results], names: Sequence[str]) -> list[str]:
    """A line if not all completions were drawn by the same engine in the same precision."""
    used = [" ".join(str(found.engine.get(key, "?")) for key in ("backend", "dtype")) for found in results]
    each = ", ".join(f"{name} {engine}" for name, engine in zip(names, used, strict=True))
    return [f"The engines are not the same: {each}."] if len(set(used)) > 1 else []


def _left_out(results: Sequence[Results], names: Sequence[str], tasks: Mapping[str, str]) -> list[str]:
    alone = [[task.title for task in found.tasks if task.name not in tasks] for found in results]
    return [f"Only {name} was asked: {', '.join(a)}." for name, a in zip(names, alone, strict=True) if a]


def adapter_names(results: Sequence[Results]) -> list[str]:
    """What the results are called; with a hash or a number where they are called the same, or as a row for bases is."""
    plain = [str(found.subject["name"]) for found in results]
    hashes = [(found.subject.get("adapter_sha256") or "")[:SHORT_SHA] for found in results]
    longer = [
        f"{name} ({sha})" if sha and (plain.count(name) > 1 or name == "base") else name
        for name, sha in zip(plain, hashes, strict=True)
    ]
    return numbered(longer)


def _base_groups(results: Sequence[Results], numbers: Sequence[int], tasks: Collection[str]) -> list[list[int]]:
    """Which results have the same base, in the order of the first of each.

    Args:
        results: Of which the numbers are.
        numbers: Of those that are looked at.
        tasks: On which a base must have scored the same, as far as several have it there.
    """
    groups: list[list[int]] = []
    for i in numbers:
        same = [group for group in groups if all(_same_base(results[i], results[j], tasks) for j in group)]
        if not same:
            same = [[]]
            groups += same
        same[0].append(i)
    return groups


def _base_names(results: Sequence[Results], names: Sequence[str], groups: Sequence[Sequence[int]]) -> list[str]:
    """A name for the base of each group: ``base``, if there is one only."""
    called = [str(results[group[0]].subject["base"]) for group in groups]
    if len(groups) == 1:
        return ["base"]
    return [
        f"base {base}" if called.count(base) == 1 else f"base of {names[group[0]]}"
        for group, base in zip(groups, called, strict=True)
    ]


def _same_base(one: Results, other: Results, tasks: Collection[str]) -> bool:
    """Whether two results have the same base and it did the same under the same protocol wherever both scored it."""
    known = ("base", "base_revision", "base_sha256", "base_quantization")
    if any(one.subject.get(name) != other.subject.get(name) for name in known):
        return False
    others = {task.name: task for task in other.tasks}
    shared = [(t, others[t.name]) for t in one.tasks if t.name in others and t.name in tasks]
    return all((a.base, a.protocol_hash) == (b.base, b.protocol_hash) for a, b in shared if a.base and b.base)
