"""Several adapters that were scored in one call, in one table: each base once, and its adapters below it.

Results of each adapter -> Markdown, or lines for a terminal

Each adapter is compared with its own base; what holds for all stands below once.
"""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from perl.evaluation.bases import SHORT_SHA, adapter_names, base_groups, base_names
from perl.evaluation.metrics import SMALL_P, Difference, corrected
from perl.evaluation.results import OtherScore, Results, TaskResult, Who
from perl.evaluation.score import Score
from perl.evaluation.table import (
    MARKDOWN,
    PLAIN,
    WIDEST,
    Column,
    Marks,
    Scored,
    asked_as_lighteval,
    base_words,
    difference_cell,
    doubts,
    engine_note,
    error_words,
    in_parts,
    is_shown,
    judges_note,
    lighteval_cell,
    majority_cell,
    not_shown,
    p_cell,
    p_words,
    pass_cell,
    protocol_hashes,
    protocol_note,
    score_cell,
    without_lighteval,
)
from perl.run.tables import percent

WORSE = "↓"


@dataclass(frozen=True)
class _Row:
    """A policy.

    Attributes:
        name: Unlike every other row's.
        who: What it is in the results that its tasks are from.
        tasks: Name -> the task, of an adapter with the p value that the table shows.
    """

    name: str
    who: Who
    tasks: Mapping[str, TaskResult]

    def score(self, task: str) -> Score | None:
        """On a task; None: it was not asked."""
        found = self.tasks.get(task)
        return None if found is None else found.base if self.who == "base" else found.adapter

    def by_lighteval(self, task: str) -> OtherScore | None:
        """Lighteval's own score; None: it is not known."""
        return self.tasks[task].lighteval.get(self.who) if task in self.tasks else None


def adapters_markdown(results: Sequence[Results]) -> str:
    """The table in Markdown, with the protocol and all reservations below it; arguments as :func:`adapters_table`."""
    return "\n".join([*_lines(results, MARKDOWN), "", *(f"- {note}" for note in _notes(results, MARKDOWN))]) + "\n"


def adapters_table(results: Sequence[Results]) -> str:
    """The table for a terminal; where it would be too wide, in parts that begin with the same column.

    Args:
        results: At least one, an adapter each (or a base alone), of which bases may differ. A base that several were
            compared with stands there once, if it scored the same.
    """
    notes = [textwrap.fill(note, WIDEST, subsequent_indent="  ") for note in _notes(results, PLAIN)]
    return "\n".join([*_lines(results, PLAIN), "", *notes]) + "\n"


def _lines(results: Sequence[Results], marks: Marks) -> list[str]:
    rows, tasks = _rows(results), _tasks(results)
    scores = [_score_columns(rows, task, marks, alone=len(tasks) == 1) for task in tasks.values()]
    further = [_further_columns(rows, task, alone=len(tasks) == 1) for task in tasks.values()]
    if marks is PLAIN:  # as many of these in a line as it shows, whatever task they are of
        further = [[column] for columns in further for column in columns]
    return in_parts(("Policy", [row.name for row in rows]), scores, further, marks=marks)


def _tasks(results: Sequence[Results]) -> dict[str, TaskResult]:
    """Name -> the first result of each task that any was asked, for its title and size."""
    return _by_name(task for found in results for task in found.tasks)


def _by_name(tasks: Iterable[TaskResult]) -> dict[str, TaskResult]:
    found: dict[str, TaskResult] = {}
    for task in tasks:
        found.setdefault(task.name, task)
    return found


def _groups(results: Sequence[Results]) -> list[list[int]]:
    return base_groups(results, range(len(results)), _tasks(results))


def _rows(results: Sequence[Results]) -> list[_Row]:
    """Each base that was scored, and below it its adapters; differences are corrected over all of them."""
    names, groups = adapter_names(results), _groups(results)
    differences = iter(corrected([task.difference for found in results for task in found.tasks]))
    tasks = [[replace(task, difference=next(differences)) for task in found.tasks] for found in results]
    rows: list[_Row] = []
    for group, base in zip(groups, base_names(results, names, groups), strict=True):
        scored = _by_name(task for i in group for task in tasks[i] if task.base is not None)
        rows += [_Row(base, "base", scored)] if scored else []
        adapters = [(names[i], _by_name(task for task in tasks[i] if task.adapter is not None)) for i in group]
        rows += [_Row(name, "adapter", found) for name, found in adapters if found]
    return rows


def _score_columns(rows: Sequence[_Row], task: TaskResult, marks: Marks, *, alone: bool) -> list[Column]:
    """avg@k and the difference from the base of one task."""
    k = _k(rows, task.name)
    columns: list[Column] = [
        (f"avg@{k}" if alone else f"{task.title} avg@{k}", [_marked(row, task.name, marks) for row in rows])
    ]
    found = [_difference(row, task.name) for row in rows]
    if any(found):
        columns.append(("difference [95 % interval]", [difference_cell(one) for one in found]))
        columns.append(("p", [p_cell(one) for one in found]))
    return columns


def _further_columns(rows: Sequence[_Row], task: TaskResult, *, alone: bool) -> list[Column]:
    name, k = task.name, _k(rows, task.name)
    cells: list[tuple[str, Callable[[Score], str]]] = []
    if k != "1":  # with one completion a problem they are avg@1 again
        cells += [(f"pass@{k}", pass_cell), (f"maj@{k}", majority_cell)]
    cells += [
        ("mean tokens", lambda score: f"{score.mean_tokens:,.0f}"),
        ("truncated", lambda score: percent(score.truncated)),
        ("no answer", lambda score: percent(score.no_answer)),
    ]

    def column(heading: str, text: Callable[[Score], str]) -> Column:
        scores = [row.score(name) for row in rows]
        return heading if alone else f"{task.title} {heading}", ["-" if one is None else text(one) for one in scores]

    columns = [column(heading, text) for heading, text in cells]
    if asked_as_lighteval(task) and any(row.by_lighteval(name) for row in rows):
        heading = f"avg@{k} by lighteval"
        own = [lighteval_cell(row.by_lighteval(name)) for row in rows]
        columns.insert(0, (heading if alone else f"{task.title} {heading}", own))
    return columns


def _k(rows: Sequence[_Row], task: str) -> str:
    found = {score.k for row in rows if (score := row.score(task)) is not None}
    return f"{found.pop()}" if len(found) == 1 else "k"


def _difference(row: _Row, task: str) -> Difference | None:
    return row.tasks[task].difference if row.who == "adapter" and task in row.tasks else None


def _marked(row: _Row, task: str, marks: Marks) -> str:
    """A score, set off if the difference from its base is shown."""
    cell, difference = score_cell(row.score(task)), _difference(row, task)
    if difference is None or not is_shown(difference):
        return cell
    return marks.strong.format(cell) if difference.mean > 0 else f"{cell} {WORSE}"


def _notes(results: Sequence[Results], marks: Marks) -> list[str]:
    """What holds for all once, and what does not with whose it is."""
    names, rows, tasks = adapter_names(results), _rows(results), _tasks(results)
    scored = [
        Scored("the base" if row.name == "base" else row.name, task, score, task.lighteval.get(row.who))
        for row in rows
        for task in row.tasks.values()
        if (score := row.score(task.name)) is not None
    ]
    tests = [
        (task, found)
        for row in rows
        for task in row.tasks.values()
        if (found := _difference(row, task.name)) is not None
    ]
    problems = ", ".join(f"{task.title} {task.score.n:,}" for task in tasks.values())
    return [
        *_once(names, [protocol_note(found) for found in results]),
        *_once(names, _engines(results)),
        *_subjects(results, names, marks),
        f"Problems: {problems}.",
        *judges_note(tasks.values(), marks),
        *_once(names, [protocol_hashes(found.tasks, marks) for found in results]),
        _legend(rows, [one.score for one in scored], marks),
        *doubts(scored),
        *without_lighteval(tasks.values()),
        *not_shown(tests),
    ]


def _once(names: Sequence[str], notes: Sequence[str]) -> list[str]:
    """Each note once, with whose it is where not all have it."""
    whose: dict[str, list[str]] = {}
    for name, note in zip(names, notes, strict=True):
        whose.setdefault(note, []).append(name)
    return list(whose) if len(whose) == 1 else [f"{', '.join(of)}: {note}" for note, of in whose.items()]


def _engines(results: Sequence[Results]) -> list[str]:
    """What drew the completions, with the largest difference of log-probabilities that any adapter saw."""
    seen = [one for found in results if (one := found.engine.get("logp_diff")) is not None]
    most = {"logp_diff": max(seen)} if seen else {}
    return [engine_note(replace(found, engine={**found.engine, **most})) for found in results]


def _subjects(results: Sequence[Results], names: Sequence[str], marks: Marks) -> list[str]:
    """A line a base, with its adapters."""
    lines = []
    for group in _groups(results):
        hashes = [(names[i], results[i].subject.get("adapter_sha256")) for i in group]
        adapters = ", ".join(f"{name}, sha256 {marks.code.format(sha[:SHORT_SHA])}" for name, sha in hashes if sha)
        label = f"; adapter{'s' if len(group) > 1 else ''}: {adapters}" if adapters else ""
        lines.append(f"Base: {base_words(results[group[0]])}{label}.")
    return lines


def _legend(rows: Sequence[_Row], scores: Sequence[Score], marks: Marks) -> str:
    parts = ["Scores and shares in percent", *error_words(scores)]
    tests = [(row.name, task, found) for row in rows for task in row.tasks if (found := _difference(row, task))]
    if tests:
        adapters, tasks = ({one[i] for one in tests} for i in (0, 1))
        whole = len(tests) == len(adapters) * len(tasks)
        sides = [f"{len(side)} {name}" for side, name in ((adapters, "adapters"), (tasks, "tasks")) if len(side) > 1]
        parts.append("difference: adapter less its base, paired by problem")
        parts.append(p_words(len(tests), " x ".join(sides) if whole else f"{len(tests)} differences"))
        rule = f"the interval excludes 0 and p is at most {SMALL_P}"
        shown = [found for _, _, found in tests if is_shown(found)]
        signs = [f"{marks.name}: better than its base"] if any(found.mean > 0 for found in shown) else []
        signs += [f"{WORSE}: worse than its base"] if any(found.mean < 0 for found in shown) else []
        parts += [f"{', '.join(signs)}: {rule}"] if signs else []
    return "; ".join(parts) + "."
