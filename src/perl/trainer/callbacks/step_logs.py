"""What is logged of each step: numbers, pictures of them while training and at the end, and a group of completions.

logs of a step -> metrics.jsonl -> plots/*.png; its newest completions -> samples.jsonl

Each line is written whole, so a kill loses at most the step it interrupts.
"""

import time
from pathlib import Path

from transformers import TrainerState, TrainingArguments

from perl.errors import MissingExtraError, warn
from perl.run.logs import append_row
from perl.trainer.callbacks.plots import draw_plots
from perl.trainer.callbacks.run_callback import Logs, RunCallback, check_every, folder_of, reopened
from perl.trainer.sampling.given_rewards import is_rewarded

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
        try:
            draw_plots(metrics, folder / PLOTS, title, rewarded=self._rewarded)
        except (MissingExtraError, OSError, ValueError) as error:  # a picture must not end a training
            if last:
                warn("PRL306", "%s", error)
        self._drawn_at = time.monotonic()
        self._took = self._drawn_at - started

    @property
    def _rewarded(self) -> bool:
        """Whether a reward counts; of a trainer of which nothing is known one does."""
        return self.trainer is None or is_rewarded(self.trainer)


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
