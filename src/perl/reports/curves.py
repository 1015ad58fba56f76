"""The numbers of a run's steps as curves that a page can hold, the panels they are drawn in, and where the time went.

rows of metrics.jsonl -> curves by metric -> panels, seconds of each stage

A long curve is thinned: of each stretch of steps the smallest and the largest value stay, so that no spike is lost.
"""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perl.reports.run_log import RunLog, mapping, number

MOST_POINTS = 2_000
"""Of a curve."""
_ALL_POINTS = 300_000
_FEWEST_POINTS = 200
_DIGITS = 6

_SCORE = re.compile(r"eval/(?P<task>.+)/avg@(?P<k>\d+)")
_REWARD = re.compile(r"rewards/(?P<name>.+)/mean")
_VERDICT = re.compile(r"reward/(?P<name>.+)/(?P<verdict>[a-z_]+)_frac")
_STAGES = (
    *("policy to the engine", "rollouts", "forward and backward passes"),
    "verdicts, rewards, log-probs, the rest",
)
# Not a quantity of the training.
_NO_CURVES = {"step", "epoch", "total_flos", "train_runtime", "train_samples_per_second", "train_steps_per_second"}


@dataclass(frozen=True)
class Curve:
    """A metric over steps.

    Attributes:
        steps: Optimizer steps, ascending.
        values: As many.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """A picture.

    Attributes:
        section: Heading that it stands under.
        title: What is drawn.
        unit: Of the values.
        metrics: Name -> how its line is called.
    """

    section: str
    title: str
    unit: str
    metrics: Mapping[str, str]


_FIXED = (
    Panel("Rewards", "Total reward", "mean of a step's completions", {"reward": "reward"}),
    Panel("Rewards", "KL to the teacher", "nats per token", {"teacher/kl": "KL to the teacher"}),
    Panel("Completions", "Length", "tokens", {"completions/mean_length": "mean", "completions/max_length": "longest"}),
    Panel("Completions", "Truncated", "share of completions", {"completions/clipped_ratio": "truncated"}),
    Panel("Completions", "Trained on", "share of completions", {"rows/trained_fraction": "trained on"}),
    Panel("Completions", "Groups without a signal", "share of groups", {"frac_reward_zero_std": "all rewards equal"}),
    Panel("Policy", "Entropy", "nats per token", {"entropy": "entropy"}),
    Panel("Policy", "KL to the reference", "nats per token", {"kl": "KL"}),
    Panel(
        *("Policy", "Clipped", "share of tokens"),
        {
            "clip_ratio/region_mean": "clipped",
            "clip_ratio/low_mean": "at the lower bound",
            "clip_ratio/high_mean": "at the upper bound",
        },
    ),
    Panel("Policy", "Gradient norm", "", {"grad_norm": "gradient norm"}),
    Panel("Policy", "Learning rate", "", {"learning_rate": "learning rate"}),
    Panel("Policy", "Loss", "", {"loss": "loss"}),
    Panel(
        *("Engine", "Log-probs of engine and trainer differ", "nats"),
        {"sampling/sampling_logp_difference/mean": "mean", "sync/gap_limit": "what is usual"},
    ),
    Panel("Engine", "Parity check", "nats", {"sync/logp_diff": "difference"}),
    Panel("Speed", "Seconds of a step", "s", {"step_time": "step"}),
    Panel("Speed", "Tokens of rollouts", "tokens per second", {"rollout/tokens_per_second": "tokens per second"}),
)


def curves_of(run: RunLog) -> dict[str, Curve]:
    """Every metric of a run that is a number, whole."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in run.rows:
        step = int(row["step"])
        for name, value in row.items():
            amount = None if name in _NO_CURVES else number(value)
            if amount is None:
                continue
            steps, values = found.setdefault(name, ([], []))
            if steps and steps[-1] == step:  # logged twice: the later one holds
                values[-1] = amount
            elif not steps or step > steps[-1]:
                steps.append(step)
                values.append(amount)
    return {name: Curve(tuple(steps), tuple(values)) for name, (steps, values) in found.items()}


def points_each(curves: int) -> int:
    """Points that each of so many curves may have, so that a page stays small."""
    return max(_FEWEST_POINTS, min(MOST_POINTS, _ALL_POINTS // max(curves, 1)))


def thinned(curve: Curve, most: int) -> Curve:
    """At most so many points: the ends, and the smallest and largest value of each stretch.

    Args:
        curve: Of any length.
        most: Points, at least 4.
    """
    count = len(curve.steps)
    if count <= most:
        return curve
    stretches, kept = (most - 2) // 2, {0, count - 1}
    for index in range(stretches):
        places = range(1 + index * (count - 2) // stretches, 1 + (index + 1) * (count - 2) // stretches)
        kept |= {min(places, key=curve.values.__getitem__), max(places, key=curve.values.__getitem__)}
    order = sorted(kept)
    return Curve(tuple(curve.steps[i] for i in order), tuple(curve.values[i] for i in order))


def shown(curve: Curve) -> dict[str, list[Any]]:
    """For the page's data, with as many digits as are seen."""
    return {"x": list(curve.steps), "y": [rounded(value) for value in curve.values]}


def rounded(value: Any) -> float | None:  # noqa: ANN401 (JSON)
    """With six digits; None: it is no finite number."""
    found = number(value)
    return None if found is None else float(f"{found:.{_DIGITS}g}")


def panels_of(names: Iterable[str], weights: Mapping[str, Sequence[float]]) -> list[Panel]:
    """The panels of what any run has logged, and one for each metric that has no place in them.

    Args:
        names: Metrics of all runs.
        weights: Reward -> its weights in the runs.
    """
    # A reward follows the total; the total is not drawn twice where a single reward weighs 1.
    logged = set(names) - ({"reward"} if list(map(set, weights.values())) == [{1.0}] else set())
    panels = [panel for panel in _FIXED if next(iter(panel.metrics)) in logged]
    # Rewards, their verdicts, scores and what a critic logs have names of the run's.
    verdicts = dict[str, dict[str, str]]()
    for metric in sorted(logged):
        if (reward := reward_of(metric)) is not None:
            given = weights.get(reward, ())
            weight = f"weight {' / '.join(f'{one:g}' for one in given)}" if given else "mean"
            panels.append(Panel("Rewards", f"Reward {reward}", weight, {metric: reward}))
        elif match := _VERDICT.fullmatch(metric):
            verdicts.setdefault(match["name"], {})[metric] = match["verdict"].replace("_", " ")
        elif (task := task_of(metric)) is not None:
            panels.append(Panel("Scores", task[0], f"avg@{task[1]}", {metric: "policy"}))
        elif metric.startswith("critic/"):
            title = metric.removeprefix("critic/").replace("_", " ").capitalize()
            panels.append(Panel("Critic", title, "", {metric: metric}))
    title, unit = "Verdicts of {} that are not right", "share of completions"
    panels += [Panel("Rewards", title.format(name), unit, lines) for name, lines in verdicts.items()]
    taken = {name for panel in panels for name in panel.metrics}
    others = sorted(name for name in logged - taken if not name.startswith("eval/"))
    panels += [Panel("All others", name, "", {name: name}) for name in others]
    order = ("Rewards", "Scores", "Completions", "Policy", "Engine", "Critic", "Speed", "All others")
    return sorted(panels, key=lambda panel: order.index(panel.section))


def reward_of(metric: str) -> str | None:
    """The reward whose mean a metric is; None: it is none."""
    match = _REWARD.fullmatch(metric)
    return match["name"] if match else None


def task_of(metric: str) -> tuple[str, int] | None:
    """The task and k of a score between steps; None: the metric is none."""
    match = _SCORE.fullmatch(metric)
    return (match["task"], int(match["k"])) if match else None


def differing_weights(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Reward -> the weights that it has in the runs, each once."""
    found: dict[str, list[float]] = {}
    for facts in runs:
        for name, weight in mapping(facts.get("rewards")).items():
            amount = number(weight)
            if amount is not None and amount not in found.setdefault(str(name), []):
                found[str(name)].append(amount)
    return found


def stages_of(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Seconds of each stage that is known, step by step; together they are the step's.

    Args:
        curves: Of a run, whole; ``rollout/seconds`` holds ``sync/seconds``.
    """
    whole = curves.get("step_time")
    if whole is None:
        return {}
    known = [curves.get(f"{name}/seconds", Curve((), ())) for name in ("sync", "rollout", "update")]
    syncs, rollouts, updates = (dict(zip(curve.steps, curve.values, strict=True)) for curve in known)
    if not (rollouts or updates):
        return {"whole step": whole}
    stages: dict[str, list[float]] = {name: [] for name in _STAGES}
    for step, seconds in zip(whole.steps, whole.values, strict=True):
        sync = min(syncs.get(step, 0.0), seconds)
        rollout = max(0.0, min(rollouts.get(step, 0.0), seconds) - sync)
        update = min(updates.get(step, 0.0), max(0.0, seconds - sync - rollout))
        parts = (sync, rollout, update, max(0.0, seconds - sync - rollout - update))
        for name, part in zip(stages, parts, strict=True):
            stages[name].append(part)
    return {name: Curve(whole.steps, tuple(values)) for name, values in stages.items() if any(values)}


def stage_means(stages: Mapping[str, Curve]) -> dict[str, float]:
    """Seconds of each stage in the mean step; the first, which opens engines, does not count if there are others."""
    return {
        name: statistics.fmean(curve.values[1:] if len(curve.values) > 1 else curve.values)
        for name, curve in stages.items()
    }
