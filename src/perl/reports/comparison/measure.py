"""What a run is compared by: a task's score at the end, the best adapter's score between steps, or a logged number.

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
from perl.evaluation.metrics import error_of_mean, pass_at_k_by_problem
from perl.evaluation.results import Results, TaskResult
from perl.reports.comparison.checks import disagreement
from perl.reports.run_log import RunLog, number
from perl.run.differing import flat
from perl.run.ends import ends
from perl.run.facts import best_disagreement, read_best

BEST, REWARD = "best", "reward"
_OF_TASK = re.compile(r"(?P<task>.+)/(?P<metric>avg|pass)@(?P<k>\d+)")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")
_LONGEST_LIST = 12


@dataclass(frozen=True)
class Measure:
    """By what runs are compared.

    Attributes:
        kind: ``task``, ``best`` or ``logged``.
        key: As ``--score`` takes it.
        title: For people.
        task: Name of the task, of a score at the end.
        passes: k' of pass@k'; None: avg@k.
    """

    kind: str
    key: str
    title: str
    task: str = ""
    passes: int | None = None

    @property
    def percent(self) -> bool:
        """Whether it is a share, and is shown in percent."""
        return self.kind != "logged"


@dataclass(frozen=True)
class Measured:
    """What a run has of it.

    Attributes:
        value: The score, or the mean.
        stderr: Its standard error, over problems or steps; NaN: not known.
        count: Problems or steps that it is the mean of.
        asked: Values with the same may be compared.
        way: How it was asked, setting -> text, to tell people in what others differ.
        by_problem: Problem -> its score; empty where the value is not a mean over problems.
        k: Completions a problem.
        results: That it is from; None: from the log.
    """

    value: float
    stderr: float
    count: int
    asked: tuple[str, ...]
    way: Mapping[str, str] = field(default_factory=dict)
    by_problem: Mapping[str, float] = field(default_factory=dict)
    k: int = 1
    results: Results | None = None


def choose_measure(runs: Sequence[RunLog], asked: str | None = None) -> Measure:
    """By what runs are compared.

    Args:
        runs: All of them.
        asked: A task, ``TASK/avg@K``, ``TASK/pass@K``, ``best``, or the name of a number in ``metrics.jsonl``. None:
            the task that most finished runs were scored on, among these the first; without any the reward.

    Raises:
        PerlError: No run has it, or none has anything that it could be compared by.
    """
    tasks = Counter(task.name for run in runs if run.results is not None for task in run.results.tasks)
    titles = {task.name: task for run in runs if run.results is not None for task in run.results.tasks}
    if asked is None and tasks:
        return _of_task(titles[max(tasks, key=lambda name: tasks[name])])
    logged = {name for run in runs for row in run.rows for name in row if number(row[name]) is not None}
    if asked is None or asked == REWARD:
        if REWARD in logged:
            return Measure("logged", REWARD, "mean reward of the last steps")
        raise PerlError("no run has anything to compare: no final evaluation and no reward", _names(runs))
    if asked == BEST:
        return Measure("best", BEST, "score of the best adapter between steps (eval.best)")
    found = _asked_task(asked, titles)
    if found is not None:
        return found
    if asked in logged:
        return Measure("logged", asked, f"{asked}, mean of the last steps")
    known = [*titles, *(f"{name}/{metric}" for name, task in titles.items() for metric in _metrics(task))]
    known += [BEST, *sorted(logged)]
    nearest = did_you_mean(asked, known)
    some = ", ".join(known[:_LONGEST_LIST]) + (", ..." if len(known) > _LONGEST_LIST else "")
    raise PerlError(f"no run has a score {asked!r}", "--score", nearest or f"there are {some}")


def measured(run: RunLog, measure: Measure) -> Measured | str:
    """What a run has of a measure, or the reason why it has none."""
    unknown = run.is_script and run.planned is None  # nothing says how many steps a script was to do
    if run.status != "done" and not unknown:
        return str(run.facts.get("error") or run.state) if run.status == "failed" else run.state
    if measure.kind == "task":
        return _final(run, measure)
    return _best(run) if measure.kind == "best" else _logged(run, measure.key)


def last_mean(run: RunLog, name: str) -> tuple[float, float, int] | None:
    """The mean of a logged number over the last steps, its standard error and how many steps they are."""
    values = [value for row in run.rows if (value := number(row.get(name))) is not None]
    found = ends(values)
    return None if found is None else (found[1].value, found[1].error, found[1].steps)


def _of_task(task: TaskResult, passes: int | None = None) -> Measure:
    metric = f"avg@{task.score.k}" if passes is None else f"pass@{passes}"
    return Measure("task", f"{task.name}/{metric}", f"{metric} on {task.title} at the end", task.name, passes)


def _metrics(task: TaskResult) -> list[str]:
    return [f"avg@{task.score.k}", *(f"pass@{k}" for k in task.score.pass_at if k > 1)]


def _asked_task(asked: str, titles: Mapping[str, TaskResult]) -> Measure | None:
    if asked in titles:
        return _of_task(titles[asked])
    match = _OF_TASK.fullmatch(asked)
    if match is None or match["task"] not in titles:
        return None
    task, k = titles[match["task"]], int(match["k"])
    if match["metric"] == "pass":
        return _of_task(task, k) if 1 <= k <= task.score.k else None
    return _of_task(task) if k == task.score.k else None


def _final(run: RunLog, measure: Measure) -> Measured | str:
    """Of the last adapter, counted from which completions of each problem are right."""
    if run.results is None:
        return next((note for note in run.notes if note.startswith("eval/")), "not scored at the end")
    task = next((task for task in run.results.tasks if task.name == measure.task), None)
    if task is None:
        return f"not scored on {measure.task}"
    wrong = disagreement(run, run.results)
    if wrong is not None:
        return wrong
    who = "adapter" if task.adapter is not None else "base"
    right = {problem.id: row for problem in task.problems if (row := getattr(problem, who)) is not None}
    k = task.score.k
    if measure.passes is None:
        scores = {id: statistics.fmean(row) for id, row in right.items()}
    elif measure.passes > k:
        return f"has {k} completions a problem, fewer than pass@{measure.passes} needs"
    else:
        scores = dict(zip(right, pass_at_k_by_problem(list(right.values()), measure.passes), strict=True))
    asked = (task.protocol_hash, str(task.data.get("sha256")))
    value, error = statistics.fmean(scores.values()), error_of_mean(list(scores.values()))
    return Measured(value, error, len(scores), asked, {}, scores, k, run.results)


def _best(run: RunLog) -> Measured | str:
    try:
        found = read_best(run.path / "best")
    except FileNotFoundError:
        return "kept no best adapter (eval.best)"
    except (OSError, ValueError) as error:
        return f"best/best.json: {error}"
    wrong = best_disagreement(found, run.rows, done=run.status == "done" and not run.is_script)
    if wrong:
        return wrong
    metric = str(found["metric"])
    rows = [row for row in run.rows if row.get("step") == found["step"]]
    stderr = next((e for row in rows if (e := number(row.get(f"eval/{metric}_stderr"))) is not None), math.nan)
    way = {"metric": metric, **_flat({"eval": run.settings.get("eval")})}
    return Measured(float(found["value"]), stderr, 1, tuple(map(str, way.items())), way)


def _logged(run: RunLog, name: str) -> Measured | str:
    """Numbers of a training are of its own rewards, problems and sampling."""
    found = last_mean(run, name)
    if found is None:
        return f"logged no {name}"
    value, error, steps = found
    way = {f"rewards.{key}": str(weight) for key, weight in _mapping(run.facts.get("rewards")).items()}
    if run.settings:
        rollout = _mapping(run.settings.get("rollout"))
        parts = {"rewards": run.settings.get("rewards"), "data": run.settings.get("data")}
        way = _flat({**parts, "rollout": {key: rollout[key] for key in _SAMPLING if key in rollout}})
    return Measured(value, error, steps, tuple(map(str, sorted(way.items()))), way)


def _flat(value: Any) -> dict[str, str]:  # noqa: ANN401 (YAML)
    return {key: text for key, text in flat(value).items() if text != "none"}


def _mapping(value: Any) -> Mapping[str, Any]:  # noqa: ANN401 (JSON)
    return value if isinstance(value, Mapping) else {}


def _names(runs: Sequence[RunLog]) -> str:
    return str(runs[0].path) if len(runs) == 1 else f"{len(runs)} runs"
