"""A comparison of several evaluations, for people and for programs.

Comparison -> Markdown, terminal, JSON
"""

from dataclasses import asdict
from typing import Any

from perl.evaluation.comparing.evaluations import Comparison
from perl.evaluation.scoring.metrics import SMALL_P
from perl.evaluation.scoring.table import (
    MARKDOWN,
    PLAIN,
    Marks,
    compared_cells,
    error_words,
    is_shown,
    judges_note,
    p_words,
    with_notes,
)
from perl.run.tables import UNKNOWN, Row, TableCell, fact_cell, printed

NOT_DIFFERENT, OTHERWISE = "≈", "†"


def as_markdown(comparison: Comparison) -> str:
    """A table in Markdown."""
    table = printed(_rows(comparison), style="markdown", in_marks=True)
    return with_notes(table, _notes(comparison, MARKDOWN), MARKDOWN)


def as_plain(comparison: Comparison) -> str:
    """The same for a terminal."""
    return with_notes(printed(_rows(comparison)), _notes(comparison, PLAIN), PLAIN)


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """For JSON; what is not known is null. A difference's ``p_value`` is its own, ``p_corrected`` the table's."""
    policies = [
        {
            "name": policy.name,
            "base": policy.base,
            "folder": policy.folder,
            "settings": dict(policy.settings),
            "scores": {task: asdict(score) for task, score in policy.scores.items()},
            "other_protocol": list(policy.otherwise),
            "differences": {
                task: {**found.as_dict(), "shown": is_shown(found)} for task, found in policy.differences.items()
            },
        }
        for policy in comparison.policies
    ]
    tasks, notes, judges = dict(comparison.tasks), list(comparison.notes), dict(comparison.judges)
    return {"tasks": tasks, "judges": judges, "first": comparison.first, "policies": policies, "notes": notes}


def _rows(comparison: Comparison) -> list[Row]:
    """A row a task and policy."""
    found = [(task, p, p.scores[task]) for task in comparison.tasks for p in comparison.policies if task in p.scores]
    k = {score.k for _, _, score in found}
    heading = f"avg@{k.pop() if len(k) == 1 else 'k'}"
    rows: list[Row] = []
    for task, policy, score in found:
        difference, other = policy.differences.get(task), policy.lighteval.get(task)
        marks = [NOT_DIFFERENT] * (difference is not None and not is_shown(difference))
        marks += [OTHERWISE] * (task in policy.otherwise)
        rows.append(
            {
                "Policy": fact_cell(policy.name),
                "Task": fact_cell(comparison.tasks[task]),
                heading: TableCell(score.accuracy, " ".join([str(score.average_estimate), *marks])),
                "by lighteval": UNKNOWN if other is None else TableCell(other.accuracy, str(other.estimate)),
                **compared_cells(difference, "difference [95 % interval]"),
            }
        )
    return rows


def _notes(comparison: Comparison, marks: Marks) -> list[str]:
    tests = [found for policy in comparison.policies for found in policy.differences.values()]
    scores = [score for policy in comparison.policies for score in policy.scores.values()]
    notes = [f"{'; '.join(('Scores in percent', *error_words(scores)))}."]
    if tests:
        of = p_words(len(tests), f"{len(tests)} differences")
        notes.append(f"Differences from {comparison.first} are paired by problem; {of}.")
    if not all(map(is_shown, tests)):
        why = f"the 95 % interval includes 0 or p is above {SMALL_P}"
        notes.append(f"{NOT_DIFFERENT}: not shown to differ from {comparison.first}: {why}.")
    if any(policy.otherwise for policy in comparison.policies):
        notes.append(f"{OTHERWISE}: another protocol than the task's unmarked scores, not comparable with them.")
    judges = {comparison.tasks[task]: scorer for task, scorer in comparison.judges.items()}
    return [*notes, *judges_note(judges, marks), *comparison.notes]
