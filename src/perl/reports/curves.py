"""The numbers of a run's steps as curves that a page can hold, and the panels they are drawn in.

rows of metrics.jsonl -> curves by metric; runs -> panels

A long curve is thinned: of each stretch of steps the smallest and the largest value stay, so that no spike is lost.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perl.reports.run_log import RunLog, number

MOST_POINTS = 2_000
"""Of a curve."""
_ALL_POINTS = 300_000
_FEWEST_POINTS = 200
_DIGITS = 6

_SCORE = re.compile(r"eval/(?P<task>.+)/avg@(?P<k>\d+)")
_REWARD = re.compile(r"rewards/(?P<name>.+)/mean")
_VERDICT = re.compile(r"reward/(?P<name>.+)/(?P<verdict>[a-z_]+)_frac")
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
    Panel("Prompts", "Seen", "share of the prompts", {"prompts/seen": "seen at least once"}),
    Panel(
        *("Prompts", "Resting", "share of the prompts"),
        {"prompts/resting_solved": "solved", "prompts/resting_hopeless": "hopeless"},
    ),
    Panel(
        *("Prompts", "Groups without variance", "share of groups"),
        {"refill/flat_before": "as first sampled", "refill/flat_after": "after the refill"},
    ),
    Panel("Prompts", "Sampled by the refill", "completions", {"refill/samples": "sampled besides"}),
    Panel("Completions", "Masked out", "share of completions", {"rows/masked_fraction": "masked out"}),
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
    Panel("Engine", "Largest difference of a token", "nats", {"sampling/sampling_logp_difference/max": "largest"}),
    Panel("Engine", "Parity check", "nats", {"sync/logp_diff": "difference"}),
    Panel(
        *("Engine", "Importance ratio of engine and trainer", ""),
        {
            "sampling/importance_sampling_ratio/mean": "mean",
            "sampling/importance_sampling_ratio/min": "smallest",
            "sampling/importance_sampling_ratio/max": "largest",
        },
    ),
    Panel("Engine", "Steps behind", "steps", {"rollout/steps_behind": "steps behind"}),
    Panel(
        *("Engine", "Staleness", "optimizer steps"),
        {"sampling/staleness/mean": "mean", "sampling/staleness/max": "largest"},
    ),
    Panel("Engine", "Effective sample size", "share", {"sampling/effective_sample_size": "effective share"}),
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


def shown(curve: Curve) -> dict[str, list[float]]:
    """For the page's data, with as many digits as are seen."""
    return {"x": list(curve.steps), "y": [rounded(value) for value in curve.values]}


def rounded(value: float) -> float:
    """With six digits."""
    return float(f"{value:.{_DIGITS}g}")


def panels_of(names: Iterable[str], weights: Mapping[str, Sequence[float]]) -> list[Panel]:
    """The panels of what any run has logged, and one for each metric that has no place in them.

    Args:
        names: Metrics of all runs.
        weights: Reward -> its weights in the runs.
    """
    logged = set(names)
    panels = [panel for panel in _FIXED if next(iter(panel.metrics)) in logged]
    panels += _rewards(logged, weights) + _scores(logged) + _critic(logged)
    taken = {name for panel in panels for name in panel.metrics}
    others = sorted(name for name in logged - taken if not name.startswith("eval/"))
    panels += [Panel("All others", name, "", {name: name}) for name in others]
    order = ("Rewards", "Scores", "Completions", "Prompts", "Policy", "Engine", "Critic", "Speed", "All others")
    # A reward follows the total, the total alone is not drawn twice where a single reward weighs 1.
    return sorted(panels, key=lambda panel: order.index(panel.section))


def task_of(metric: str) -> tuple[str, int] | None:
    """The task and k of a score between steps; None: the metric is none."""
    match = _SCORE.fullmatch(metric)
    return (match["task"], int(match["k"])) if match else None


def _rewards(logged: set[str], weights: Mapping[str, Sequence[float]]) -> list[Panel]:
    panels = []
    for metric in sorted(logged):
        if (match := _REWARD.fullmatch(metric)) is None:
            continue
        name = match["name"]
        given = weights.get(name, ())
        weight = f"weight {' / '.join(f'{one:g}' for one in given)}" if given else "mean"
        panels.append(Panel("Rewards", f"Reward {name}", weight, {metric: name}))
    judged = sorted({match["name"] for metric in logged if (match := _VERDICT.fullmatch(metric))})
    for name in judged:
        verdicts = {
            metric: match["verdict"].replace("_", " ")
            for metric in sorted(logged)
            if (match := _VERDICT.fullmatch(metric)) and match["name"] == name
        }
        panels.append(Panel("Rewards", f"Verdicts of {name} that are not right", "share of completions", verdicts))
    return panels


def _scores(logged: set[str]) -> list[Panel]:
    found = ((metric, task_of(metric)) for metric in sorted(logged))
    return [Panel("Scores", f"{of[0]}", f"avg@{of[1]}", {metric: "policy"}) for metric, of in found if of is not None]


def _critic(logged: set[str]) -> list[Panel]:
    names = sorted(name for name in logged if name.startswith("critic/"))
    return [
        Panel("Critic", name.removeprefix("critic/").replace("_", " ").capitalize(), "", {name: name}) for name in names
    ]


def differing_weights(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Reward -> the weights that it has in the runs, each once."""
    found: dict[str, list[float]] = {}
    for facts in runs:
        rewards = facts.get("rewards")
        for name, weight in rewards.items() if isinstance(rewards, Mapping) else ():
            amount = number(weight)
            if amount is not None and amount not in found.setdefault(str(name), []):
                found[str(name)].append(amount)
    return found
