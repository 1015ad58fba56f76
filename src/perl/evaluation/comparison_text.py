"""A comparison of several evaluations, for people and for programs.

Comparison -> Markdown, terminal, JSON
"""

from dataclasses import asdict
from typing import Any

from perl.evaluation.compare import Comparison, PolicyScores
from perl.evaluation.scoring.metrics import SMALL_P
from perl.evaluation.scoring.table import (
    MARKDOWN,
    PLAIN,
    Marks,
    difference_cell,
    error_words,
    in_cells,
    is_shown,
    judge_cell,
    lighteval_cell,
    p_cell,
    p_words,
    score_cell,
    wrapped,
)
from perl.run.tables import markdown_table, plain_table

NOT_DIFFERENT, OTHERWISE = "≈", "†"
_TEXTS = 2  # columns that are aligned to the left


def as_markdown(comparison: Comparison) -> str:
    """A table in Markdown."""
    rows = in_cells(_rows(comparison))
    lines = markdown_table(rows, [i >= _TEXTS for i in range(len(rows[0]))])
    return "\n".join([*lines, "", *(f"- {note}" for note in _notes(comparison, MARKDOWN))]) + "\n"


def as_plain(comparison: Comparison) -> str:
    """The same for a terminal."""
    rows = _rows(comparison)
    lines = plain_table(rows, [i >= _TEXTS for i in range(len(rows[0]))])
    return "\n".join([*lines, "", *wrapped(_notes(comparison, PLAIN))]) + "\n"


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
                task: {
                    **found.as_dict(),
                    "p_value": policy.p_values[task],
                    "p_corrected": found.p_value,
                    "shown": is_shown(found),
                }
                for task, found in policy.differences.items()
            },
        }
        for policy in comparison.policies
    ]
    tasks, notes, judges = dict(comparison.tasks), list(comparison.notes), dict(comparison.judges)
    return {"tasks": tasks, "judges": judges, "first": comparison.first, "policies": policies, "notes": notes}


def _rows(comparison: Comparison) -> list[list[str]]:
    """Headings, and a row a task and policy."""
    found = [(task, p, p.scores[task]) for task in comparison.tasks for p in comparison.policies if task in p.scores]
    k = {score.k for _, _, score in found}
    by_lighteval = any(policy.lighteval for policy in comparison.policies)
    columns = [
        ["Policy", *(policy.name for _, policy, _ in found)],
        ["Task", *(comparison.tasks[task] for task, _, _ in found)],
        [f"avg@{k.pop() if len(k) == 1 else 'k'}", *(_cell(policy, task) for task, policy, _ in found)],
        *([["by lighteval", *(lighteval_cell(p.lighteval.get(task)) for task, p, _ in found)]] if by_lighteval else []),
    ]
    if any(policy.differences for policy in comparison.policies):
        differences = [policy.differences.get(task) for task, policy, _ in found]
        columns.append(["difference [95 % interval]", *map(difference_cell, differences)])
        columns.append(["p", *map(p_cell, differences)])
    return [list(row) for row in zip(*columns, strict=True)]


def _notes(comparison: Comparison, marks: Marks) -> list[str]:
    tests = [(policy.name, task, found) for policy in comparison.policies for task, found in policy.differences.items()]
    scores = [score for policy in comparison.policies for score in policy.scores.values()]
    notes = [f"{'; '.join(('Scores in percent', *error_words(scores)))}."]
    if tests:
        of = p_words(len(tests), f"{len(tests)} differences")
        notes.append(f"Differences from {comparison.first} are paired by problem; {of}.")
    if not all(is_shown(found) for _, _, found in tests):
        why = f"the 95 % interval includes 0 or p is above {SMALL_P}"
        notes.append(f"{NOT_DIFFERENT}: not shown to differ from {comparison.first}: {why}.")
    if any(policy.otherwise for policy in comparison.policies):
        notes.append(f"{OTHERWISE}: another protocol than the task's unmarked scores, not comparable with them.")
    judges = [f"{comparison.tasks[task]} {judge_cell(scorer, marks)}" for task, scorer in comparison.judges.items()]
    return [*notes, *([f"Judged by: {', '.join(judges)}."] if judges else []), *comparison.notes]


def _cell(policy: PolicyScores, task: str) -> str:
    alike = task in policy.differences and not is_shown(policy.differences[task])
    marks = [NOT_DIFFERENT] * alike + [OTHERWISE] * (task in policy.otherwise)
    return " ".join([score_cell(policy.scores.get(task)), *marks])
