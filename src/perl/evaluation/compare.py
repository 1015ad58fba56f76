"""Several evaluations beside each other, as far as they were asked the same in the same way.

Results of several -> Comparison -> Markdown, terminal, JSON

Scores that were measured under different protocols stand in one table only on demand, and marked.
"""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from perl.errors import Mistake, PerlError, raise_all
from perl.evaluation.bases import SHORT_SHA, adapter_names, base_groups, base_names
from perl.evaluation.metrics import Difference, paired_difference
from perl.evaluation.results import Results, TaskResult
from perl.evaluation.score import Score
from perl.evaluation.table import (
    SMALL_P,
    WIDEST,
    Column,
    difference_cell,
    error_words,
    in_cells,
    is_shown,
    p_cell,
    rows_of,
    score_cell,
)
from perl.run.tables import markdown_table, plain_table

NOT_DIFFERENT, OTHERWISE = "≈", "†"
_LONGEST_SETTING = 40


@dataclass(frozen=True)
class PolicyScores:
    """A policy: a row.

    Attributes:
        name: Unlike every other row's.
        base: The base that it is, or was trained on.
        scores: By the tasks' names.
        otherwise: Tasks that it was asked under another protocol than the first that was asked them.
        differences: By the tasks' names, this policy less the first one evaluated, paired by problem; none of the
            first itself, nor of a base beside its adapter.
    """

    name: str
    base: str
    scores: Mapping[str, Score]
    otherwise: tuple[str, ...] = ()
    differences: Mapping[str, Difference] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Several evaluations.

    Attributes:
        tasks: Name -> title of what more than one of them was asked.
        policies: Bases first, then in the order given.
        first: Name of the policy that the others are compared with.
        notes: What does not agree between them.
    """

    tasks: Mapping[str, str]
    policies: tuple[PolicyScores, ...]
    first: str
    notes: tuple[str, ...]


def compare(results: Sequence[Results], *, force: bool = False) -> Comparison:
    """Puts evaluations beside each other, and each one's policy against the first's.

    Args:
        results: At least two. A base that several were compared with stands there once, if it scored the same.
        force: Compare scores of different protocols all the same.

    Raises:
        PerlError: One has no task in common with the others, or, without ``force``, one was measured under another
            protocol; then with every setting that differs.
    """
    if len(results) < 2:
        raise PerlError("a comparison needs at least two results")
    names = adapter_names(results)
    asked = Counter(task.name for found in results for task in found.tasks)
    titles = {task.name: task.title for found in results for task in found.tasks if asked[task.name] > 1}
    alone = [name for name, r in zip(names, results, strict=True) if not any(t.name in titles for t in r.tasks)]
    if alone:
        each = [f"{name}: {', '.join(t.name for t in r.tasks)}" for name, r in zip(names, results, strict=True)]
        raise PerlError(f"{alone[0]} has no task in common with the others", hint="; ".join(each))
    conflicts = _conflicts(results, names, titles)
    if conflicts and not force:
        hint = "--force compares them all the same"
        raise_all(PerlError, [Mistake(text, hint=hint) for text in conflicts.values()])
    bases = _bases(results, names, titles, conflicts)
    adapters = []
    for i, found in enumerate(results):
        scores = {task.name: task.adapter for task in found.tasks if task.adapter is not None and task.name in titles}
        otherwise = tuple(task for task in scores if (i, task) in conflicts)
        adapters += [PolicyScores(names[i], str(found.subject["base"]), scores, otherwise)] if scores else []
    # Each result's own policy: its adapter, or a base that was evaluated alone.
    rows = {row.name: row for row in (*bases.values(), *adapters)}
    own = [names[i] if names[i] in {a.name for a in adapters} else bases[i].name for i in range(len(results))]
    for i, name in enumerate(own):
        if name != own[0]:
            rows[name] = replace(rows[name], differences=_differences(results[0], results[i], titles))
    notes = (*conflicts.values(), *_engines(results, names), *_left_out(results, names, titles))
    return Comparison(titles, tuple(rows.values()), own[0], notes)


def as_markdown(comparison: Comparison) -> str:
    """Tables in Markdown."""
    lines = [line for columns in _tables(comparison) for line in (*markdown_table(in_cells(rows_of(columns))), "")]
    return "\n".join([*lines, *(f"- {note}" for note in _notes(comparison))]) + "\n"


def as_plain(comparison: Comparison) -> str:
    """The same for a terminal."""
    lines = [line for columns in _tables(comparison) for line in (*plain_table(rows_of(columns)), "")]
    notes = [textwrap.fill(note, WIDEST, subsequent_indent="  ") for note in _notes(comparison)]
    return "\n".join([*lines, *notes]) + "\n"


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """For JSON; what is not known is null."""
    policies = [
        {
            "name": policy.name,
            "base": policy.base,
            "scores": {task: asdict(score) for task, score in policy.scores.items()},
            "other_protocol": list(policy.otherwise),
            "differences": {
                task: {**found.as_dict(), "shown": is_shown(found)} for task, found in policy.differences.items()
            },
        }
        for policy in comparison.policies
    ]
    tasks, notes = dict(comparison.tasks), list(comparison.notes)
    return {"tasks": tasks, "first": comparison.first, "policies": policies, "notes": notes}


def _conflicts(
    results: Sequence[Results], names: Sequence[str], tasks: Mapping[str, str]
) -> dict[tuple[int, str], str]:
    """Number of a result and task -> how it was evaluated otherwise than by the first result that has the task."""
    found: dict[tuple[int, str], str] = {}
    for task, title in tasks.items():
        first, *others = [i for i, result in enumerate(results) if any(t.name == task for t in result.tasks)]
        for i in others:
            if results[i].task(task).protocol_hash != results[first].task(task).protocol_hash:
                settings = ", ".join(_differing(results[first], results[i], task))
                found[i, task] = f"{title} was evaluated otherwise in {names[first]} and in {names[i]}: {settings}"
    return found


def _differing(first: Results, other: Results, task: str) -> list[str]:
    """``temperature 0.6 and 1`` for every setting that two results of a task do not share."""
    settings = [_in_force(found, task) for found in (first, other)]
    if settings[0] == settings[1]:
        settings = [{**found.protocol.drawn(), "k": found.protocol.k} for found in (first, other)]
    one, two = settings
    return [f"{name} {_shown(one[name])} and {_shown(two[name])}" for name in one if one[name] != two[name]] or [
        "the prompt or the version of the task"
    ]


def _in_force(results: Results, task: str) -> dict[str, Any]:
    """Settings as they were for a task, and its data."""
    found = results.task(task)
    used = {"max_new_tokens": found.max_new_tokens, "k": found.score.k, "data sha256": found.data.get("sha256")}
    return {**results.protocol.drawn(), **used}


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        is_hash = len(value) == 64 and " " not in value
        return value[:SHORT_SHA] if is_hash else repr(textwrap.shorten(value, _LONGEST_SETTING, placeholder="..."))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _bases(
    results: Sequence[Results],
    names: Sequence[str],
    tasks: Mapping[str, str],
    conflicts: Mapping[tuple[int, str], str],
) -> dict[int, PolicyScores]:
    """Number of a result -> its base; the same one where several results have it with the same scores."""
    scores = {i: {t.name: t.base for t in r.tasks if t.base and t.name in tasks} for i, r in enumerate(results)}
    groups = base_groups(results, [i for i in scores if scores[i]], tasks)
    found: dict[int, PolicyScores] = {}
    for group, name in zip(groups, base_names(results, names, groups), strict=True):
        base = str(results[group[0]].subject["base"])
        merged = {task: score for i in group for task, score in scores[i].items()}
        otherwise = tuple(task for task in merged if any((i, task) in conflicts for i in group))
        found |= dict.fromkeys(group, PolicyScores(name, base, merged, otherwise))
    return found


def _differences(first: Results, other: Results, tasks: Mapping[str, str]) -> dict[str, Difference]:
    """The other's policy less the first's on the tasks whose problems are the same."""
    found: dict[str, Difference] = {}
    for one in first.tasks:
        for two in other.tasks:
            if one.name == two.name and one.name in tasks and one.data.get("sha256") == two.data.get("sha256"):
                before, after = _rights(one), _rights(two)
                if before and before.keys() == after.keys():
                    found[one.name] = paired_difference(list(before.values()), [after[id] for id in before])
    return found


def _rights(task: TaskResult) -> dict[str, Sequence[bool]]:
    rows = {problem.id: problem.adapter if task.adapter else problem.base for problem in task.problems}
    return {id: row for id, row in rows.items() if row is not None}


def _engines(results: Sequence[Results], names: Sequence[str]) -> list[str]:
    """A line if not all completions were drawn by the same engine in the same precision."""
    used = [" ".join(str(found.engine.get(key, "?")) for key in ("backend", "dtype")) for found in results]
    each = ", ".join(f"{name} {engine}" for name, engine in zip(names, used, strict=True))
    return [f"The engines are not the same: {each}."] if len(set(used)) > 1 else []


def _left_out(results: Sequence[Results], names: Sequence[str], tasks: Mapping[str, str]) -> list[str]:
    alone = [[task.title for task in found.tasks if task.name not in tasks] for found in results]
    return [f"Only {name} was asked: {', '.join(a)}." for name, a in zip(names, alone, strict=True) if a]


def _tables(comparison: Comparison) -> list[list[Column]]:
    """Scores, a row a policy; differences, a row a policy and task, unless no problems are the same."""
    scores: list[Column] = [("Policy", [policy.name for policy in comparison.policies])]
    for task, title in comparison.tasks.items():
        lengths = {policy.scores[task].k for policy in comparison.policies if task in policy.scores}
        heading = f"{title} (avg@{lengths.pop() if len(lengths) == 1 else 'k'})"
        scores.append((heading, [_cell(policy, task) for policy in comparison.policies]))
    pairs = [(p, task, found) for p in comparison.policies for task, found in p.differences.items()]
    differences: list[Column] = [
        (f"Difference from {comparison.first}", [policy.name for policy, _, _ in pairs]),
        ("Task", [comparison.tasks[task] for _, task, _ in pairs]),
        ("mean [95 % interval]", [difference_cell(found) + _mark(policy, task) for policy, task, found in pairs]),
        ("p", [p_cell(found) for _, _, found in pairs]),
    ]
    return [scores, differences] if pairs else [scores]


def _notes(comparison: Comparison) -> list[str]:
    found = [difference for policy in comparison.policies for difference in policy.differences.values()]
    scores = [score for policy in comparison.policies for score in policy.scores.values()]
    notes = [f"{'; '.join(('Scores in percent', *error_words(scores)))}."]
    if found:
        notes.append(f"Differences from {comparison.first} are paired by problem; p: sign flips by problem.")
    if not all(map(is_shown, found)):
        why = f"the 95 % interval includes 0 or p is above {SMALL_P}"
        notes.append(f"{NOT_DIFFERENT}: not shown to differ from {comparison.first}: {why}.")
    if any(policy.otherwise for policy in comparison.policies):
        notes.append(f"{OTHERWISE}: another protocol than the task's unmarked scores, not comparable with them.")
    return [*notes, *comparison.notes]


def _cell(policy: PolicyScores, task: str) -> str:
    alike = task in policy.differences and not is_shown(policy.differences[task])
    return score_cell(policy.scores.get(task)) + (f" {NOT_DIFFERENT}" if alike else "") + _mark(policy, task)


def _mark(policy: PolicyScores, task: str) -> str:
    return f" {OTHERWISE}" if task in policy.otherwise else ""
