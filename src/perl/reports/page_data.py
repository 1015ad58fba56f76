"""All that a page shows of runs, as plain values.

RunLog, ... -> the page's data
"""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perl import __version__
from perl.doctor.codes import codes
from perl.hub.gate.hidden import shown_text, without_secrets
from perl.reports.completions import ALL_BYTES, LONGEST_TEXT, read_completions
from perl.reports.curves import (
    Curve,
    curves_of,
    differing_weights,
    panels_of,
    points_each,
    rounded,
    shown,
    task_of,
    thinned,
)
from perl.reports.differing import differences_of, outcome
from perl.reports.run_log import RunLog, number
from perl.reports.timings import means_of, stages_of

if TYPE_CHECKING:
    from perl.evaluation.results import Results
    from perl.evaluation.score import Score

_LONGEST_RECIPE = 100_000
_MOST_ALARMS = 500


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
        "longest_text": LONGEST_TEXT,
    }


def names_of(runs: Sequence[RunLog]) -> list[str]:
    """The folders' names; with as much of the path as tells them apart."""
    parts = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(run.path) for run in runs]


def _run(run: RunLog, curves: Mapping[str, Curve], most: int, most_bytes: int) -> dict[str, Any]:
    completions = read_completions(run.samples, most_bytes)
    stages = stages_of(curves)
    notes = list(run.notes)
    if completions.left_out:
        lines = "1 malformed line" if completions.left_out == 1 else f"{completions.left_out:,} malformed lines"
        notes.append(f"samples.jsonl: {lines} left out")
    settings = without_secrets(run.facts.get("settings"))
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
        "errors": _errors(curves),
        "scores": _scores(run.results),
        "stages": {name: shown(thinned(curve, most)) for name, curve in stages.items()},
        "stage_means": {name: rounded(mean) for name, mean in means_of(stages).items()},
        "alarms": [_alarm(alarm) for alarm in run.alarms[:_MOST_ALARMS]],
        "recipe": None if run.recipe is None else shown_text(run.recipe[:_LONGEST_RECIPE]),
        "settings": [[str(name), str(value)] for name, value in _mapping(settings).items()],
        "plan": _plan(run),
        "completions": list(completions.groups),
        "completion_steps": completions.steps,
        "completions_cut": completions.cut,
    }


def _facts(run: RunLog) -> list[list[str]]:
    """What a run is, a label and a text each."""
    facts = run.facts
    hardware = _mapping(facts.get("hardware"))
    found = {
        "base": facts.get("base"),
        "method": facts.get("method"),
        "algorithm": facts.get("algorithm") or facts.get("loss"),
        "trained parameters": _count(facts.get("trainable_parameters")),
        "seed": facts.get("seed"),
        "hardware": " x ".join(str(hardware[name]) for name in ("count", "device") if name in hardware) or None,
        "started": facts.get("created"),
        "commit": facts.get("git_commit"),
        "versions": ", ".join(f"{name} {value}" for name, value in _mapping(facts.get("versions")).items()) or None,
        "ended with": without_secrets(facts.get("error")),
    }
    return [[name, str(value)] for name, value in found.items() if value not in (None, "")]


def _count(value: Any) -> str | None:  # noqa: ANN401 (JSON)
    amount = number(value)
    return None if amount is None else f"{int(amount):,}"


def _errors(curves: Mapping[str, Curve]) -> dict[str, dict[str, list[float]]]:
    """Standard errors of the scores between steps, by the score's metric."""
    return {
        name: shown(curves[f"{name}_stderr"])
        for name in curves
        if task_of(name) is not None and f"{name}_stderr" in curves
    }


def _scores(results: "Results | None") -> list[dict[str, Any]]:
    """The scores at the end, of base and adapter with their 95 % intervals."""
    if results is None:
        return []
    return [
        {
            "task": task.name,
            "title": task.title,
            "k": task.score.k,
            "n": task.score.n,
            "policies": [
                _score(who, score) for who, score in (("base", task.base), ("adapter", task.adapter)) if score
            ],
            "difference": None
            if task.difference is None
            else [task.difference.mean, task.difference.low, task.difference.high],
        }
        for task in results.tasks
    ]


def _score(who: str, score: "Score") -> dict[str, Any]:
    best = max(score.pass_at, default=None)
    return {
        "who": who,
        "value": score.accuracy,
        "stderr": score.stderr,
        "low": score.low,
        "high": score.high,
        "pass": None if best is None else [best, score.pass_at[best]],
        "majority": score.majority,
        "tokens": rounded(score.mean_tokens),
        "truncated": score.truncated,
    }


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


def _plan(run: RunLog) -> dict[str, Any]:
    """What the run was planned to need, as it was recorded when it began; or why that is not known."""
    lines = run.facts.get("forecast")
    if isinstance(lines, list) and lines:
        return {"lines": [str(line) for line in lines], "note": None}
    if run.recipe is not None:
        how = f"`perl plan {run.path / 'recipe.yaml'}` derives it"
        return {"lines": [], "note": f"This run did not record what it was planned to need; {how}."}
    return {"lines": [], "note": "There is no recipe in this folder, so that nothing can be planned of it."}


def _mapping(value: Any) -> Mapping[str, Any]:  # noqa: ANN401 (JSON)
    return value if isinstance(value, Mapping) else {}
