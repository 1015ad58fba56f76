"""What differs between runs: settings, versions, hardware, and what came out.

runs -> tables of the rows that are not the same in all
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perl.hub.gate.hidden import without_secrets
from perl.reports.curves import Curve
from perl.reports.run_log import RunLog, number
from perl.run.differing import as_text, differing, flat
from perl.run.ends import Mean, ends
from perl.run.progress import duration
from perl.zoo.intervals import score_text

if TYPE_CHECKING:
    from perl.evaluation.results import TaskResult

# Where things are or go.
_PLACES = {"train.output_dir", "hub.repo_id", "hub.push", "hub.private", "rollout.sync_folder"}
_COMMIT = 12  # characters


def differences_of(runs: Sequence[RunLog], curves: Sequence[Mapping[str, Curve]]) -> list[dict[str, Any]]:
    """Tables: a title, and rows of a label and a text for each run.

    Args:
        runs: At least two, or there is nothing to compare.
        curves: Of each.
    """
    if len(runs) < 2:
        return []
    tables = [
        ("Recipe", [_settings(run) for run in runs]),
        ("Run", [_identity(run) for run in runs]),
        ("Versions", [_texts(run.facts.get("versions")) for run in runs]),
    ]
    found = [{"title": title, "rows": _rows(columns)} for title, columns in tables]
    results = [outcome(run, of_run) for run, of_run in zip(runs, curves, strict=True)]
    found.append({"title": "What came out", "rows": _rows(results, all_rows=True)})
    return [table for table in found if table["rows"]]


def outcome(run: RunLog, curves: Mapping[str, Curve]) -> dict[str, str]:
    """Rewards at both ends, scores, time: a text for each."""
    found = {"state": run.state}
    named = {"reward": "reward", **{name: _reward(name) for name in curves if _reward(name)}}
    named |= {"completions/mean_length": "length", "entropy": "entropy", "kl": "KL to the reference"}
    named |= {"teacher/kl": "KL to the teacher"}
    for metric, label in named.items():
        if metric in curves and (means := ends(curves[metric].values)) is not None:
            found[label] = f"{_mean(means[0])} → {_mean(means[1])}"
    for task in run.results.tasks if run.results is not None else ():
        found[f"{task.title}, avg@{task.score.k}"] = score_of(task)
    seconds = number(run.facts.get("seconds"))
    if seconds:
        found["time"] = duration(seconds)
    return found


def score_of(task: "TaskResult") -> str:
    """``66.6 ± 1.5 → 99.2 ± 0.3``: base and adapter in percent."""
    scores = [score for score in (task.base, task.adapter) if score is not None]
    return " → ".join(score_text(score.accuracy, score.stderr, score.n) for score in scores)


def _mean(mean: Mean) -> str:
    """With as many decimals as a mean of its size needs."""
    decimals = 3 if abs(mean.value) < 10 else 1
    error = "" if math.isnan(mean.error) else f" ± {mean.error:.{decimals}f}"
    return f"{mean.value:.{decimals}f}{error}"


def _reward(metric: str) -> str:
    inside = metric.removeprefix("rewards/").removesuffix("/mean")
    return f"reward {inside}" if metric == f"rewards/{inside}/mean" else ""


def _settings(run: RunLog) -> dict[str, str]:
    return {name: text for name, text in flat(without_secrets(run.settings)).items() if name not in _PLACES}


def _identity(run: RunLog) -> dict[str, str]:
    facts = run.facts
    names = ("method", "base", "revision", "base_dtype", "quantization", "loss", "algorithm", "seed")
    found = {name.replace("_", " "): as_text(facts[name]) for name in names if facts.get(name) is not None}
    for name in ("trainable_parameters", "total_parameters"):
        if (count := number(facts.get(name))) is not None:
            found[name.replace("_", " ")] = f"{int(count):,}"
    if facts.get("git_commit"):
        found["commit"] = str(facts["git_commit"])[:_COMMIT]
    hardware = _texts(facts.get("hardware"))
    return found | {f"hardware: {name}": text for name, text in hardware.items()}


def _texts(values: Any) -> dict[str, str]:  # noqa: ANN401 (JSON)
    return {str(name): as_text(value) for name, value in values.items()} if isinstance(values, Mapping) else {}


def _rows(columns: Sequence[Mapping[str, str]], *, all_rows: bool = False) -> list[dict[str, Any]]:
    """The rows that are not the same in all columns."""
    return [{"label": label, "values": values} for label, values in differing(columns, all_rows=all_rows).items()]
