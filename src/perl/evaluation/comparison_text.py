"""A comparison of several evaluations, for people and for programs.

Comparison -> Markdown, terminal, JSON
"""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from perl.evaluation.compare import Comparison, PolicyScores
from perl.evaluation.metrics import SMALL_P
from perl.evaluation.table import (
    MARKDOWN,
    PLAIN,
    WIDEST,
    Column,
    Marks,
    difference_cell,
    error_words,
    in_parts,
    is_shown,
    judge_cell,
    lighteval_cell,
    p_cell,
    p_words,
    score_cell,
)

NOT_DIFFERENT, OTHERWISE = "≈", "†"


def as_markdown(comparison: Comparison) -> str:
    """Tables in Markdown."""
    return "\n".join([*_tables(comparison, MARKDOWN), *(f"- {note}" for note in _notes(comparison, MARKDOWN))]) + "\n"


def as_plain(comparison: Comparison) -> str:
    """The same for a terminal."""
    notes = [textwrap.fill(note, WIDEST, subsequent_indent="  ") for note in _notes(comparison, PLAIN)]
    return "\n".join([*_tables(comparison, PLAIN), *notes]) + "\n"


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


def _tables(comparison: Comparison, marks: Marks) -> list[str]:
    """Scores, a row a policy; differences, a row a policy and task, unless no problems are the same."""
    policies = comparison.policies
    scores: list[list[Column]] = []
    for task, title in comparison.tasks.items():
        lengths = {policy.scores[task].k for policy in policies if task in policy.scores}
        heading = f"{title} (avg@{lengths.pop() if len(lengths) == 1 else 'k'})"
        scores.append([(heading, [_cell(policy, task) for policy in policies])])
        own = [policy.lighteval.get(task) for policy in policies]
        if any(own):
            scores[-1].append(("by lighteval", [lighteval_cell(one) for one in own]))
    first: Column = ("Policy", [policy.name for policy in policies])
    lines = in_parts(first, scores, [], marks=marks)
    pairs = [(policy, task, found) for policy in policies for task, found in policy.differences.items()]
    if pairs:
        heading = f"Difference from {comparison.first}"
        columns: list[Column] = [
            ("Task", [comparison.tasks[task] for _, task, _ in pairs]),
            ("mean [95 % interval]", [difference_cell(found) + _mark(policy, task) for policy, task, found in pairs]),
            ("p", [p_cell(found) for _, _, found in pairs]),
        ]
        lines += ["", *in_parts((heading, [policy.name for policy, _, _ in pairs]), [columns], [], marks=marks)]
    return [*lines, ""]


def _notes(comparison: Comparison, marks: Marks) -> list[str]:
    tests = [(policy.name, task, found) for policy in comparison.policies for task, found in policy.differences.items()]
    scores = [score for policy in comparison.policies for score in policy.scores.values()]
    notes = [f"{'; '.join(('Scores in percent', *error_words(scores)))}."]
    if tests:
        notes.append(
            f"Differences from {comparison.first} are paired by problem; {p_words(len(tests), _of_what(tests))}."
        )
    if not all(is_shown(found) for _, _, found in tests):
        why = f"the 95 % interval includes 0 or p is above {SMALL_P}"
        notes.append(f"{NOT_DIFFERENT}: not shown to differ from {comparison.first}: {why}.")
    if any(policy.otherwise for policy in comparison.policies):
        notes.append(f"{OTHERWISE}: another protocol than the task's unmarked scores, not comparable with them.")
    judges = [f"{comparison.tasks[task]} {judge_cell(scorer, marks)}" for task, scorer in comparison.judges.items()]
    return [*notes, *([f"Judged by: {', '.join(judges)}."] if judges else []), *comparison.notes]


def _of_what(tests: Sequence[tuple[str, str, Any]]) -> str:
    """``3 policies x 2 tasks``; of some only ``5 differences``."""
    policies, tasks = ({test[i] for test in tests} for i in (0, 1))
    sides = [f"{len(side)} {name}" for side, name in ((policies, "policies"), (tasks, "tasks")) if len(side) > 1]
    return " x ".join(sides) if len(tests) == len(policies) * len(tasks) else f"{len(tests)} differences"


def _cell(policy: PolicyScores, task: str) -> str:
    alike = task in policy.differences and not is_shown(policy.differences[task])
    return score_cell(policy.scores.get(task)) + (f" {NOT_DIFFERENT}" if alike else "") + _mark(policy, task)


def _mark(policy: PolicyScores, task: str) -> str:
    return f" {OTHERWISE}" if task in policy.otherwise else ""
