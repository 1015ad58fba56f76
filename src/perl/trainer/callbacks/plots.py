"""Learning curves of a run: reward, KL to the teacher, length, entropy, KL to the reference.

metrics.jsonl -> plots/curves.png
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.evaluation.pictures import new_figure, save_figure
from perl.trainer.callbacks.recorder import report_of
from perl.types import StepReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _LINE, _FAINT = "#333333", "#1f5fa8", "#b9cfe8"
# A curve is smoothed over this share of its steps; the single steps stay visible behind it.
_SMOOTHED_SHARE = 0.1


_PANELS = {  # title and unit of each quantity
    "reward": ("Reward", "mean of a step's completions"),
    "teacher_kl": ("KL to the teacher", "nats per token"),
    "length": ("Completion length", "tokens"),
    "entropy": ("Entropy of the policy", "nats per token"),
    "kl": ("KL to the reference", "nats per token"),
}


def draw_curves(metrics: Path, folder: Path, title: str, *, rewarded: bool = True) -> Path:
    """Draws the curves that were logged; a quantity that was not (KL where beta is 0) has no panel.

    Args:
        metrics: The run's ``metrics.jsonl``.
        folder: Where ``curves.png`` goes.
        title: What the picture is headed.
        rewarded: False: no reward counts, and none has a panel.

    Returns:
        The picture's file.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    reports = read_reports(metrics)
    logged = [name for name in _PANELS if any(getattr(report, name) is not None for report in reports)]
    panels = [name for name in logged if rewarded or name != "reward"]
    columns = 2 if len(panels) > 1 else 1
    rows = max(1, -(-len(panels) // columns))
    figure = new_figure(5.0 * columns, 3.1 * rows + 0.5, "drawing curves")
    figure.suptitle(title, color=_INK, fontsize=12)
    for index, panel in enumerate(panels):
        _draw(figure.add_subplot(rows, columns, index + 1), panel, reports, legend=index == 0)
    return save_figure(figure, folder / "curves.png")


def read_reports(metrics: Path) -> list[StepReport]:
    """The training steps in a metrics file, in order."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [report_of(row["step"], row) for row in rows if "reward" in row]


def _draw(axes: "Axes", name: str, reports: Sequence[StepReport], *, legend: bool) -> None:
    title, unit = _PANELS[name]
    points = [(r.step, getattr(r, name)) for r in reports if getattr(r, name) is not None]
    steps, values = [p[0] for p in points], [p[1] for p in points]
    axes.plot(steps, values, color=_FAINT, linewidth=1, label="each step")
    axes.plot(steps, _smoothed(values), color=_LINE, linewidth=2, label="smoothed")
    axes.set_title(title, loc="left", color=_INK, fontsize=10)
    axes.set_xlabel("optimizer step", fontsize=8)
    axes.set_ylabel(unit, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(color="#e8e8e8", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(fontsize=8, frameon=False, loc="best")


def _smoothed(values: Sequence[float]) -> list[float]:
    """Centred moving average, narrower at the ends."""
    reach = max(1, round(len(values) * _SMOOTHED_SHARE / 2))
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
