"""Draws the README's picture of a run and its result, out of the files that the run left.

Run as ``python docs/draw_first_run.py runs/quickstart`` after ``perl train quickstart``.
"""

import json
import sys
from pathlib import Path

from perl.evaluation.scoring.figure import new_figure, save_figure
from perl.run.logs import read_log
from perl.trainer.callbacks.step_logs import CurvePanel, draw_panel

PNG = Path(__file__).parent / "first_run.png"
_INK, _BASE, _ADAPTER = "#333333", "#b9cfe8", "#1f5fa8"
_CURVES = (
    CurvePanel("reward", "Reward: share of right answers", "mean of 64 completions"),
    CurvePanel("completions/mean_length", "Length: it learns to work it out", "tokens of a completion"),
)


def draw(run: Path) -> Path:
    """Two curves of a run's log, and its score beside the base's."""
    rows = [row for row in read_log(run / "metrics.jsonl") if isinstance(row.get("step"), int)]
    ((task, score),) = json.loads((run / "run.json").read_text(encoding="utf-8"))["eval"].items()
    figure = new_figure(11, 3.2, "drawing a run")
    for index, panel in enumerate(_CURVES):
        draw_panel(figure.add_subplot(1, 3, index + 1), panel, rows, legend=index == 0)
    axes = figure.add_subplot(1, 3, 3)
    means, errors = ([100 * score[name] for name in pair] for pair in (("base", "adapter"), ("base_stderr", "stderr")))
    bars = axes.bar(["base", "adapter"], means, yerr=errors, capsize=4, color=[_BASE, _ADAPTER], width=0.55)
    axes.bar_label(
        bars, labels=[f"{mean:.1f} ± {error:.1f}" for mean, error in zip(means, errors, strict=True)], padding=3
    )
    axes.set_title(f"Score on {score['n']} problems it has never seen", loc="left", color=_INK, fontsize=10)
    axes.set_ylabel(f"right, percent (avg@{score['k']})", fontsize=8)
    axes.set_xlabel(task, fontsize=8)
    axes.set_ylim(0, 115)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, PNG, dpi=90)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
