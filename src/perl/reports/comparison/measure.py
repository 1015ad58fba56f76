"""What a run is compared by: a task's score at the end, or the mean of a logged number over the last steps.

runs, what was asked for -> a Measure; run -> Measured, or why it has none

The score at the end is the one on the card, of the last adapter. Only what was asked alike may be compared, so each
value says how it was asked.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perl.errors import PerlError, did_you_mean
from perl.evaluation.scoring.metrics import error_of_mean, pass_at_k_by_problem
from perl.evaluation.scoring.results import RESULTS, Results, TaskResult
from perl.reports.run_log import RunLog, mapping, number
from perl.run.logs import ends
from perl.run.tables import flat

REWARD = "reward"
_PASS = re.compile(r"(?P<task>.+)/pass@(?P<k>\d+)")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")
_LONGEST_LIST = 12


@dataclass(frozen=True)
class Measure:
    """By what runs are compared.

    Attributes:
        key: As ``--score`` takes it.
        title: For people.
        task: Name of the task, of a score at the end; else a number in the log is meant.
        passes: k' of pass@k'; None: avg@k.
    """

    key: str
    title: str
    task: str = ""
    passes: int | None = None


@dataclass(frozen=True)
class Measured:
    """What a run has of it.

    Attributes:
        value: The score, or the mean.
        stderr: Its standard error, over problems or steps; NaN: not known.
        count: Problems or steps that it is the mean of.
        asked: How it was asked, setting -> text: values with the same may be compared.
        by_problem: Problem -> its score; empty where the value is not a mean over problems.
        k: Completions a problem.
        results: That it is from; None: from the log.
    """

    value: float
    stderr: float
    count: int
    asked: Mapping[str, str]
    by_problem: Mapping[str, float] = field(default_factory=dict)
    k: int = 1
    results: Results | None = None


def choose_measure(runs: Sequence[RunLog], asked: str | None = None) -> Measure:
    """By what runs are compared.

    Args:
        runs: All of them.
        asked: A task, ``TASK/avg@K``, ``TASK/pass@K``, or the name of a number in ``metrics.jsonl``. None: the task
            that most finished runs were scored on, among these the first; without any the reward.

    Raises:
        PerlError: No run has it, or none has anything that it could be compared by.
    """
    scored = [task for run in runs if run.results is not None for task in run.results.tasks]
    tasks, counts = {task.name: task for task in scored}, Counter(task.name for task in scored)
    if asked is None and tasks:
        return _of_task(tasks[max(counts, key=lambda name: counts[name])])
    logged = {name for run in runs for row in run.rows for name in row if number(row[name]) is not None}
    if asked is None and REWARD not in logged:
        where = str(runs[0].path) if len(runs) == 1 else f"{len(runs)} runs"
        raise PerlError("no run has anything to compare: no final evaluation and no reward", where)
    known = {name: _of_task(task) for name, task in tasks.items()}
    known |= {f"{name}/avg@{task.score.k}": _of_task(task) for name, task in tasks.items()}
    known |= {name: Measure(name, f"mean {name} of the last steps") for name in sorted(logged)}
    key = asked or REWARD
    match = _PASS.fullmatch(key)
    if match is not None and match["task"] in tasks:
        return _of_task(tasks[match["task"]], int(match["k"]))
    if key not in known:
        some = ", ".join([*known][:_LONGEST_LIST]) + (", ..." if len(known) > _LONGEST_LIST else "")
        raise PerlError(f"no run has a score {asked!r}", "--score", did_you_mean(key, known) or f"there are {some}")
    return known[key]


def measured(run: RunLog, measure: Measure) -> Measured | str:
    """What a run has of a measure, or the reason why it has none."""
    unknown = run.is_script and run.planned is None  # nothing says how many steps a script was to do
    if run.status != "done" and not unknown:
        return str(run.facts.get("error") or run.state) if run.status == "failed" else run.state
    if measure.task:
        return _final(run, measure)
    found = last_mean(run, measure.key)
    if found is None:
        return f"logged no {measure.key}"
    # Numbers of a training are of its own rewards, problems and sampling.
    asked: dict[str, Any] = {"rewards": run.facts.get("rewards")}
    if run.settings:
        rollout = mapping(run.settings.get("rollout"))
        asked = {"rewards": run.settings.get("rewards"), "data": run.settings.get("data")}
        asked["rollout"] = {key: rollout[key] for key in _SAMPLING if key in rollout}
    return Measured(*found, {key: text for key, text in flat(asked).items() if text != "none"})


def last_mean(run: RunLog, name: str) -> tuple[float, float, int] | None:
    """The mean of a logged number over the last steps, its standard error and how many steps they are."""
    found = ends([value for row in run.rows if (value := number(row.get(name))) is not None])
    return None if found is None else (found[1].value, found[1].error, found[1].steps)


def of_another(run: RunLog, results: Results) -> str | None:
    """``base`` or ``adapter`` if results are of another one than the run names; None: not as far as it says."""
    fingerprint = mapping(run.facts.get("fingerprint"))
    for of in ("base", "adapter"):
        said, known = results.subject.get(f"{of}_sha256"), fingerprint.get(of)
        if said is not None and known is not None and said != known:
            return of
    return None


def _of_task(task: TaskResult, passes: int | None = None) -> Measure:
    metric = f"avg@{task.score.k}" if passes is None else f"pass@{passes}"
    return Measure(f"{task.name}/{metric}", f"{metric} on {task.title} at the end", task.name, passes)


def _final(run: RunLog, measure: Measure) -> Measured | str:
    """Of the last adapter, counted from which completions of each problem are right."""
    if run.results is None:
        return next((note for note in run.notes if note.startswith("eval/")), "not scored at the end")
    task = next((task for task in run.results.tasks if task.name == measure.task), None)
    if task is None:
        return f"not scored on {measure.task}"
    if (other := of_another(run, run.results)) is not None:
        return f"{RESULTS} is of another {other} than run.json names"
    who, k = "adapter" if task.adapter is not None else "base", task.score.k
    right = {problem.id: row for problem in task.problems if (row := getattr(problem, who)) is not None}
    if measure.passes is None:
        scores = {id: statistics.fmean(row) for id, row in right.items()}
    elif measure.passes > k:
        return f"has {k} completions a problem, fewer than pass@{measure.passes} needs"
    else:
        scores = dict(zip(right, pass_at_k_by_problem(list(right.values()), measure.passes), strict=True))
    asked = {"protocol": task.protocol_hash, "data": str(task.data.get("sha256"))}
    value, error = statistics.fmean(scores.values()), error_of_mean(list(scores.values()))
    if measure.passes is None and not math.isclose(value, task.score.accuracy, abs_tol=1e-9):
        return f"{RESULTS}: the accuracy there is not that of its problems"
    return Measured(value, error, len(scores), asked, scores, k, run.results)
