"""What a card says of scores, line by line, so that a card can be compared with its results.

Results -> lines of Markdown

Differences of several tasks are shown by p values that are corrected for their number, as in the table below them.
"""

from perl.evaluation.scoring.metrics import SMALL_P
from perl.evaluation.scoring.results import HELD_OUT, Results, TaskResult, is_held_out
from perl.evaluation.scoring.table import (
    MARKDOWN,
    difference_cell,
    excludes_zero,
    is_shown,
    judge_cell,
    judged_together,
    markdown,
    score_cell,
)
from perl.evaluation.scoring.task import MATH
from perl.zoo.intervals import percent

_MOST_IN_HEADLINE = 3


def headline(results: Results) -> str:
    """The scores in a sentence, of the first few tasks."""
    return " ".join(_sentence(task) for task in judged_together(results.tasks)[:_MOST_IN_HEADLINE])


def results_lines(results: Results) -> list[str]:
    """The table with its protocol and reservations, as ``perl eval`` writes it."""
    return markdown(results).rstrip("\n").splitlines()


def reservations(results: Results) -> list[str]:
    """What a reader must not conclude from the scores."""
    tasks = judged_together(results.tasks)
    together = sum(task.difference is not None for task in tasks)
    return [line for task in tasks for line in [*_of_difference(task, together), *_of_completions(task)]]


def contamination(results: Results) -> list[str]:
    """What is known of whether the problems were seen before they were asked."""
    held_out = [task.title.removesuffix(HELD_OUT) for task in results.tasks if is_held_out(task.title)]
    benchmarks = [task.title for task in results.tasks if not is_held_out(task.title)]
    lines = []
    if held_out:
        lines.append(f"No held-out problem of {_listed(held_out)} is a training problem too.")
    if benchmarks:
        lines.append(
            f"The training problems were not compared with those of {_listed(benchmarks)}, and whether the base has "
            "seen these before is not known."
        )
    return lines


def _sentence(task: TaskResult) -> str:
    score, name = task.score, f"avg@{task.score.k}"
    if task.scorer != MATH:
        name = f"judged by {judge_cell(task.scorer, MARKDOWN)}, {name}"
    if task.base is None or task.adapter is None:
        return f"On {task.title} it scores {score_cell(score)} % ({name} over {score.n:,} problems)."
    verdict = "" if is_shown(task.difference) else ", which does not tell them apart"
    return (
        f"On {task.title} it scores {score_cell(task.adapter)} %, the base {score_cell(task.base)} % "
        f"({name} over {score.n:,} problems), a difference of {difference_cell(task.difference)}{verdict}."
    )


def _of_difference(task: TaskResult, together: int) -> list[str]:
    """Of a task whose p value was corrected for so many."""
    difference = task.difference
    if difference is None:
        return [f"The base was not scored beside it on {task.title}."] if task.adapter and not task.base else []
    if is_shown(difference):
        worse = difference.mean < 0
        return [f"On {task.title} it is worse than its base."] if worse else []
    if task.score.n < 2:
        return [f"On {task.title} a single problem was asked: the score says nothing of others."]
    cannot = f"On {task.title} it cannot be told from its base"
    if excludes_zero(difference):
        correction = f", corrected for {together} tasks," if together > 1 else ""
        return [f"{cannot}: the p value of the difference{correction} is above {SMALL_P}."]
    ends = difference_cell(difference).partition(" ")[2]
    return [f"{cannot}: the 95 % interval of the difference, {ends} points, holds 0."]


def _of_completions(task: TaskResult) -> list[str]:
    score, lines = task.score, []
    if score.truncated > 0:
        lines.append(
            f"On {task.title} {percent(score.truncated)} % of its completions were cut off after "
            f"{task.max_new_tokens:,} tokens; with more the score may be another one."
        )
    if score.unjudged > 0:
        lines.append(
            f"On {task.title} {percent(score.unjudged)} % of its completions could not be compared with the gold "
            "answer; they count as wrong."
        )
    return lines


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
