"""All that a page shows of runs, and what differs between them, as plain values.

RunLog, ... -> the page's data
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perl import __version__
from perl.doctor.codes import codes
from perl.hub.gate import shown_text, without_secrets
from perl.reports.completions import ALL_BYTES, read_completions
from perl.reports.curves import (
    Curve,
    curves_of,
    differing_weights,
    panels_of,
    points_each,
    reward_of,
    rounded,
    shown,
    stage_means,
    stages_of,
    task_of,
    thinned,
)
from perl.reports.run_log import RunLog, lines_text, mapping, names_of, number
from perl.run.logs import Mean, ends
from perl.run.progress import duration
from perl.run.tables import differing, flat
from perl.zoo.intervals import score_text

if TYPE_CHECKING:
    from perl.evaluation.scoring.results import TaskResult

_LONGEST_RECIPE = 100_000
_MOST_ALARMS = 500
# Settings that say where things are or go.
_PLACES = {"train.output_dir", "hub.repo_id", "hub.push", "hub.private", "rollout.sync_folder"}


def page_data(runs: Sequence[RunLog]) -> dict[str, Any]:
    """Everything, small enough for a page.

    Args:
        runs: At least one.
    """
    curves = [curves_of(run) for run in runs]
    most = points_each(sum(map(len, curves)))
    weights = differing_weights([run.facts for run in runs])
    panels = panels_of((name for of_run in curves for name in of_run), weights)
    names = names_of(runs)
    return {
        "version": __version__,
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "points": most,
        "thinned": any(len(curve.steps) > most for of_run in curves for curve in of_run.values()),
        "panels": [
            {"section": p.section, "title": p.title, "unit": p.unit, "metrics": dict(p.metrics)} for p in panels
        ],
        "runs": [
            {"name": name, **_run(run, of_run, most, ALL_BYTES // len(runs))}
            for name, run, of_run in zip(names, runs, curves, strict=True)
        ],
        "differences": differences_of(runs, curves),
    }


def _run(run: RunLog, curves: Mapping[str, Curve], most: int, most_bytes: int) -> dict[str, Any]:
    completions = read_completions(run.samples, most_bytes)
    stages = stages_of(curves)
    lines = run.facts.get("forecast")
    plan: dict[str, Any] = {"lines": list(map(str, lines)) if isinstance(lines, list) else [], "note": None}
    if not plan["lines"]:
        plan["note"] = "There is no recipe in this folder, so that nothing can be planned of it."
        if run.recipe is not None:
            how = f"`perl plan {run.path / 'recipe.yaml'}` derives it"
            plan["note"] = f"This run did not record what it was planned to need; {how}."
    notes = list(run.notes)
    if completions.left_out:
        notes.append(f"samples.jsonl: {lines_text(completions.left_out)} left out")
    settings = without_secrets(run.facts.get("settings"))
    scored = [name for name in curves if task_of(name) is not None]
    return {
        "path": str(run.path),
        "status": run.status,
        "state": run.state,
        "step": run.step,
        "planned": run.planned,
        "facts": _facts(run),
        "outcome": outcome(run, curves),
        "notes": notes,
        "curves": {name: shown(thinned(curve, most)) for name, curve in curves.items()},
        "errors": {name: shown(curves[f"{name}_stderr"]) for name in scored if f"{name}_stderr" in curves},
        "scores": [_score(task) for task in run.results.tasks] if run.results is not None else [],
        "stages": {name: shown(thinned(curve, most)) for name, curve in stages.items()},
        "stage_means": {name: rounded(mean) for name, mean in stage_means(stages).items()},
        "alarms": [_alarm(alarm) for alarm in run.alarms[:_MOST_ALARMS]],
        "recipe": None if run.recipe is None else shown_text(run.recipe[:_LONGEST_RECIPE]),
        "settings": [[str(name), str(value)] for name, value in mapping(settings).items()],
        "plan": plan,
        "completions": list(completions.groups),
        "completion_steps": completions.steps,
    }


def _facts(run: RunLog) -> list[tuple[str, str]]:
    """What a run is, a label and a text each."""
    facts, names = run.facts, ("base", "revision", "base_dtype", "quantization", "method", "algorithm", "loss", "seed")
    found = {name.replace("_", " "): facts.get(name) for name in names}
    parameters = number(facts.get("trainable_parameters"))
    found |= {
        "trained parameters": None if parameters is None else f"{int(parameters):,}",
        **{f"hardware: {name}": value for name, value in mapping(facts.get("hardware")).items()},
        "started": facts.get("created"),
        "commit": facts.get("git_commit"),
        **{f"version of {name}": value for name, value in mapping(facts.get("versions")).items()},
        "ended with": without_secrets(facts.get("error")),
    }
    return [(name, str(value)) for name, value in found.items() if value not in (None, "")]


def _score(task: "TaskResult") -> dict[str, Any]:
    """The scores at the end, of base and adapter with their 95 % intervals."""
    policies, gain = [], task.difference
    for who, score in (("base", task.base), ("adapter", task.adapter)):
        if score is not None:
            best = max(score.pass_at, default=None)
            known = {name: getattr(score, name) for name in ("stderr", "low", "high", "majority", "truncated")}
            known |= {"pass": None if best is None else [best, score.pass_at[best]]}
            policies.append({"who": who, "value": score.accuracy, **known, "tokens": rounded(score.mean_tokens)})
    difference = None if gain is None else [gain.mean, gain.low, gain.high]
    of = {"task": task.name, "title": task.title, "k": task.score.k, "n": task.score.n}
    return {**of, "policies": policies, "difference": difference}


def _alarm(alarm: Mapping[str, Any]) -> dict[str, Any]:
    """An alarm with what ``perl explain`` says of its code."""
    code = codes().get(str(alarm.get("code", "")))
    return {
        "step": int(number(alarm.get("step")) or 0),
        "code": str(alarm.get("code", "")),
        "name": str(alarm.get("name", "")).replace("_", " "),
        "line": str(alarm.get("line", ""))[:2_000],
        "value": number(alarm.get("value")),
        "limit": number(alarm.get("limit")),
        "stopped": alarm.get("stopped") is True,
        "explained": None if code is None else [code.title, code.what, code.why, code.fix],
    }


def differences_of(runs: Sequence[RunLog], curves: Sequence[Mapping[str, Curve]]) -> list[dict[str, Any]]:
    """What differs between several runs, as tables: a title, and rows of a label and a text for each run.

    Args:
        runs: Of one there is nothing to compare.
        curves: Of each.
    """
    if len(runs) < 2:
        return []
    settings = [flat(without_secrets(run.settings)) for run in runs]
    tables = {
        "Recipe": differing([{key: text for key, text in one.items() if key not in _PLACES} for one in settings]),
        "Run": differing([dict(_facts(run)) for run in runs]),
        "What came out": differing(
            [outcome(run, of_run) for run, of_run in zip(runs, curves, strict=True)], all_rows=True
        ),
    }
    return [
        {"title": title, "rows": [{"label": label, "values": values} for label, values in rows.items()]}
        for title, rows in tables.items()
        if rows
    ]


def outcome(run: RunLog, curves: Mapping[str, Curve]) -> dict[str, str]:
    """Rewards at both ends, scores, time: a text for each."""
    found = {"state": run.state}
    rewards = {name: f"reward {reward}" for name in curves if (reward := reward_of(name)) is not None}
    named = {"reward": "reward", **rewards, "completions/mean_length": "length", "entropy": "entropy"}
    named |= {"kl": "KL to the reference", "teacher/kl": "KL to the teacher"}
    for metric, label in named.items():
        if metric in curves and (means := ends(curves[metric].values)) is not None:
            found[label] = f"{_mean(means[0])} → {_mean(means[1])}"
    for task in run.results.tasks if run.results is not None else ():
        scores = [score for score in (task.base, task.adapter) if score is not None]
        texts = [score_text(score.accuracy, score.stderr, score.n) for score in scores]
        found[f"{task.title}, avg@{task.score.k}"] = " → ".join(texts)
    seconds = number(run.facts.get("seconds"))
    if seconds:
        found["time"] = duration(seconds)
    return found


def _mean(mean: Mean) -> str:
    """With as many decimals as a mean of its size needs."""
    decimals = 3 if abs(mean.value) < 10 else 1
    error = "" if math.isnan(mean.error) else f" ± {mean.error:.{decimals}f}"
    return f"{mean.value:.{decimals}f}{error}"
