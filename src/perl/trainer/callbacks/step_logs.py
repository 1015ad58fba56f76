"""What is logged of each step: numbers, pictures of them while training and at the end, and a group of completions.

logs of a step -> metrics.jsonl -> plots/curves.png, rewards.png, scores.png; its newest completions -> samples.jsonl

Each line is written whole, so a kill loses at most the step it interrupts.
"""

import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerState, TrainingArguments

from perl.errors import MissingExtraError, warn
from perl.evaluation.scoring.figure import new_figure, save_figure
from perl.run.logs import append_row, read_log
from perl.trainer.alarms.rule import number
from perl.trainer.callbacks.run_callback import Logs, RunCallback, check_every, folder_of, reopened
from perl.trainer.sampling.given_rewards import is_rewarded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METRICS, PLOTS = "metrics.jsonl", "plots"

# Pictures take about a second. While training they are drawn at a checkpoint, once so many times as long has passed.
_SHARE = 100


class LearningCurves(RunCallback):
    """Writes ``metrics.jsonl`` and draws every reward, every score and what else was logged.

    Works with any trainer of transformers or TRL. Pictures need matplotlib; without it the numbers are written, and a
    line says what to install.

    Example:
        ``PeftGRPOTrainer(..., callbacks=[LearningCurves()])``, then look at ``OUTPUT_DIR/plots`` or run
        ``perl report OUTPUT_DIR``.
    """

    def __init__(self, folder: str | Path | None = None, *, title: str | None = None) -> None:
        """Writes nothing yet.

        Args:
            folder: Where ``metrics.jsonl`` and ``plots/`` go; None: the trainer's ``output_dir``.
            title: Over the pictures; None: the folder's name.
        """
        self._given, self._title = folder, title
        self._drawn_at, self._took = 0.0, 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        """Opens the log; a training that goes on loses the lines of steps that are done again."""
        super().on_train_begin(args, state)
        self._drawn_at = time.monotonic()
        reopened(folder_of(args, self._given) / METRICS, state)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, __: object, logs: Logs = None, **___: object
    ) -> None:
        """Records a step; the summary at the end of training is not one."""
        if state.is_world_process_zero and logs and "train_runtime" not in logs:
            append_row(folder_of(args, self._given) / METRICS, {"step": state.global_step, **logs})

    def on_save(self, args: TrainingArguments, state: TrainerState, *__: object, **___: object) -> None:
        """Draws what there is, unless pictures would take more than a hundredth of the time."""
        if state.is_world_process_zero and time.monotonic() - self._drawn_at > _SHARE * self._took:
            self._draw(folder_of(args, self._given), last=False)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *__: object, **___: object) -> None:
        """Draws the whole."""
        if state.is_world_process_zero:
            self._draw(folder_of(args, self._given), last=True)

    def _draw(self, folder: Path, *, last: bool) -> None:
        metrics = folder / METRICS
        if not metrics.is_file():
            return
        started, title = time.monotonic(), self._title or folder.resolve().name
        rewarded = self.trainer is None or is_rewarded(self.trainer)
        try:
            draw_plots(metrics, folder / PLOTS, title, rewarded=rewarded)
        except (MissingExtraError, OSError, ValueError) as error:  # a picture must not end a training
            if last:
                warn("PRL306", "%s", error)
        self._drawn_at = time.monotonic()
        self._took = self._drawn_at - started


SAMPLES = "samples.jsonl"


class SamplesLog(RunCallback):
    """Writes ``samples.jsonl``: a group of completions of each logged step, a JSON object a completion.

    Example:
        ``PeftGRPOTrainer(..., callbacks=[SamplesLog(every=10)])``
    """

    needs_ours = "other trainers show their completions to no callback"

    def __init__(self, folder: str | Path | None = None, *, every: int = 1) -> None:
        """Writes nothing yet.

        Args:
            folder: Where ``samples.jsonl`` goes; None: the trainer's ``output_dir``.
            every: Optimizer steps between two groups; of steps that are not logged there is none.

        Raises:
            RecipeError: ``every`` is not a number of steps.
        """
        check_every(every, "SamplesLog(every)")
        self._given, self._every = folder, every
        self._next = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        """Opens the log; a training that goes on loses the lines of steps that are done again."""
        super().on_train_begin(args, state)
        self._next = self._after(state.global_step) if state.global_step else 0
        reopened(folder_of(args, self._given) / SAMPLES, state)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, __: object, logs: Logs = None, **___: object
    ) -> None:
        """Records a group; an evaluation, and a step that trains on an earlier step's rollouts, has none."""
        if not state.is_world_process_zero or "reward" not in (logs or {}) or "train_runtime" in (logs or {}):
            return
        if state.global_step < self._next:
            return
        self._next = self._after(state.global_step)
        for sample in self.trainer.latest_group():
            append_row(folder_of(args, self._given) / SAMPLES, {"step": state.global_step, **sample})

    def _after(self, step: int) -> int:
        """The next step of which a group is due."""
        return (step // self._every + 1) * self._every


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
    return [panel for panel in panels if any(number(row.get(panel.metric)) is not None for row in rows)]


def draw_panel(axes: "Axes", panel: CurvePanel, rows: Sequence[Mapping[str, Any]], *, legend: bool) -> None:
    """One curve: each step and the smoothed course, or values with their standard errors.

    Args:
        axes: An empty part of a picture.
        panel: What is drawn.
        rows: A log, each row with its ``step``.
        legend: Whether it says which line is which.
    """
    points = [(row["step"], value, row) for row in rows if (value := number(row.get(panel.metric))) is not None]
    steps, values = [point[0] for point in points], [point[1] for point in points]
    errors = [number(row.get(panel.error)) if panel.error else None for *_, row in points]
    if any(error is not None for error in errors):
        spread = [error or 0.0 for error in errors]
        axes.errorbar(steps, values, yerr=spread, color=_LINE, linewidth=2, capsize=3, label="with standard error")
    else:
        # A centred moving average, narrower at the ends.
        reach = max(1, round(len(values) * _SMOOTHED_SHARE / 2))
        smoothed = [statistics.fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]
        axes.plot(steps, values, color=_FAINT, linewidth=1, label="each step")
        axes.plot(steps, smoothed, color=_LINE, linewidth=2, label="smoothed")
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
