"""Pictures of a training: its learning curves, each of its rewards, the scores of its tasks.

metrics.jsonl -> plots/curves.png, plots/rewards.png, plots/scores.png
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.evaluation.scoring.figure import new_figure, save_figure
from perl.run.logs import read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _LINE, _FAINT = "#333333", "#1f5fa8", "#b9cfe8"
# A curve is smoothed over this share of its steps; the single steps stay visible behind it.
_SMOOTHED_SHARE = 0.1
_MANY_PANELS = 4  # more than that are drawn in three columns


@dataclass(frozen=True)
class CurvePanel:
    """A curve of a picture.

    Attributes:
        metric: What is drawn, by its name in the log.
        title: Over it.
        unit: Of its values.
        error: Metric that holds the standard error of each value; None: there is none.
    """

    metric: str
    title: str
    unit: str
    error: str | None = None


_CURVES = (
    CurvePanel("reward", "Reward", "mean of a step's completions"),
    CurvePanel("teacher/kl", "KL to the teacher", "nats per token"),
    CurvePanel("completions/mean_length", "Completion length", "tokens"),
    CurvePanel("entropy", "Entropy of the policy", "nats per token"),
    CurvePanel("kl", "KL to the reference", "nats per token"),
    CurvePanel("completions/clipped_ratio", "Truncated completions", "share"),
    CurvePanel("rows/trained_fraction", "Completions with a gradient", "share"),
    CurvePanel("prompts/seen", "Prompts seen at least once", "share"),
    CurvePanel("prompts/resting_solved", "Prompts resting, solved", "share"),
    CurvePanel("prompts/resting_hopeless", "Prompts resting, hopeless", "share"),
    CurvePanel("refill/flat_before", "Groups without variance, before refill", "share"),
    CurvePanel("refill/samples", "Sampled by the refill", "completions"),
    CurvePanel("clip_ratio/region_mean", "Clipped tokens", "share"),
    CurvePanel("sampling/sampling_logp_difference/mean", "Log-prob gap to the engine", "nats, mean"),
    CurvePanel("grad_norm", "Gradient norm", "before clipping"),
    CurvePanel("critic/explained_variance", "Critic", "explained variance of returns"),
    CurvePanel("loss", "Loss", ""),
    CurvePanel("eval_loss", "Loss on held-out data", ""),
)
_REWARD = re.compile(r"rewards/(.+)/mean")
_SCORE = re.compile(r"eval/(.+)/((?:avg|pass)@\d+)")


def draw_plots(metrics: Path, folder: Path, title: str, *, rewarded: bool = True) -> list[Path]:
    """Draws what was logged, a picture for each kind; a quantity that was not (KL where beta is 0) has no panel.

    Args:
        metrics: A log, ``metrics.jsonl``.
        folder: Where the pictures go: ``curves.png``, and where there is more than one reward ``rewards.png``, where
            tasks were scored ``scores.png``.
        title: Over each.
        rewarded: False: no reward counts, and none has a panel.

    Returns:
        The pictures' files, ``curves.png`` first.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    rows = [row for row in read_log(metrics) if isinstance(row.get("step"), int)]
    named = dict.fromkeys(name for row in rows for name in row)
    curves = [panel for panel in _CURVES if rewarded or panel.metric != "reward"]
    rewards = [CurvePanel(name, found[1], "mean") for name in named if (found := _REWARD.fullmatch(name))]
    scores = [
        CurvePanel(name, f"{found[1]}: {found[2]}", "share of right answers", f"{name}_stderr")
        for name in named
        if (found := _SCORE.fullmatch(name))
    ]
    pictures = [_draw_picture(rows, curves, folder / "curves.png", title)]
    if rewarded and len(_shown(rows, rewards)) > 1:
        pictures.append(_draw_picture(rows, rewards, folder / "rewards.png", title))
    if _shown(rows, scores):
        pictures.append(_draw_picture(rows, scores, folder / "scores.png", title))
    return pictures


def _draw_picture(rows: Sequence[Mapping[str, Any]], panels: Iterable[CurvePanel], file: Path, title: str) -> Path:
    shown = _shown(rows, panels)
    columns = min(3 if len(shown) > _MANY_PANELS else 2, max(1, len(shown)))
    lines = max(1, -(-len(shown) // columns))
    figure = new_figure(5.0 * columns, 3.1 * lines + 0.5, "drawing curves")
    figure.suptitle(title, color=_INK, fontsize=12, parse_math=False)
    for index, panel in enumerate(shown):
        draw_panel(figure.add_subplot(lines, columns, index + 1), panel, rows, legend=index == 0)
    return save_figure(figure, file)


def _shown(rows: Sequence[Mapping[str, Any]], panels: Iterable[CurvePanel]) -> list[CurvePanel]:
    """Those that have a value."""
    return [panel for panel in panels if any(_number(row, panel.metric) is not None for row in rows)]


def draw_panel(axes: "Axes", panel: CurvePanel, rows: Sequence[Mapping[str, Any]], *, legend: bool) -> None:
    """One curve: each step and the smoothed course, or values with their standard errors.

    Args:
        axes: An empty part of a picture.
        panel: What is drawn.
        rows: A log, each row with its ``step``.
        legend: Whether it says which line is which.
    """
    points = [(row["step"], value, row) for row in rows if (value := _number(row, panel.metric)) is not None]
    steps, values = [point[0] for point in points], [point[1] for point in points]
    errors = [_number(row, panel.error) if panel.error else None for *_, row in points]
    if any(error is not None for error in errors):
        reach = [error or 0.0 for error in errors]
        axes.errorbar(steps, values, yerr=reach, color=_LINE, linewidth=2, capsize=3, label="with standard error")
    else:
        axes.plot(steps, values, color=_FAINT, linewidth=1, label="each step")
        axes.plot(steps, _smoothed(values), color=_LINE, linewidth=2, label="smoothed")
    axes.set_title(panel.title, loc="left", color=_INK, fontsize=10, parse_math=False)
    axes.set_xlabel("optimizer step", fontsize=8)
    axes.set_ylabel(panel.unit, fontsize=8)
    axes.tick_params(labelsize=8)
    if panel.unit.startswith("share"):
        axes.set_ylim(-0.03, 1.03)
    axes.grid(color="#e8e8e8", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(fontsize=8, frameon=False, loc="best")


def _number(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _smoothed(values: Sequence[float]) -> list[float]:
    """Centred moving average, narrower at the ends."""
    reach = max(1, round(len(values) * _SMOOTHED_SHARE / 2))
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
