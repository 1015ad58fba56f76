"""The live line of training: step, reward, KL to the teacher, length, tokens a second, time left."""

import logging
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerState

from perl.run.progress import duration, live_line
from perl.trainer.callbacks.recorder import report_of
from perl.types import StepReport

logger = logging.getLogger("perl")

# In a log: a line each time another tenth of the steps is done.
_LINES_IN_A_LOG = 10


class LiveProgress(TrainerCallback):
    """Redraws one line on a terminal; writes ten lines in all where the output is a log."""

    def __init__(self, *, rewarded: bool = True) -> None:
        """Nothing is shown before training begins.

        Args:
            rewarded: False: no reward counts, and none is shown.
        """
        self._rewarded = rewarded
        self._bar: tqdm | None = None
        self._started = 0.0
        self._first_step = 0
        self._previous: tuple[float, float] | None = None
        self._text = ""

    def on_train_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:  # noqa: ANN401 (transformers')
        """Starts the clock; a resumed run counts the steps that are done."""
        self._started, self._first_step = time.monotonic(), state.global_step
        if state.is_world_process_zero:
            self._bar = live_line(state.max_steps, "training", state.global_step)

    def on_log(self, _: Any, state: TrainerState, __: Any, logs: Mapping[str, Any] | None = None, **___: Any) -> None:  # noqa: ANN401
        """Shows the step that was logged."""
        if self._bar is None or not logs or "loss" not in logs:
            return
        if "reward" in logs:  # a step that trains on an earlier step's rollouts has none
            self._text = self._describe(report_of(state.global_step, logs))
        self._bar.set_description_str(f"training  {self._text}", refresh=False)
        self._bar.update(state.global_step - self._bar.n)
        every = max(1, state.max_steps // _LINES_IN_A_LOG)
        is_due = state.global_step % every == 0 or state.global_step in (self._first_step + 1, state.max_steps)
        if self._bar.disable and is_due:
            elapsed = time.monotonic() - self._started
            left = elapsed / (state.global_step - self._first_step) * (state.max_steps - state.global_step)
            logger.info("step %d/%d  %s  ETA %s", state.global_step, state.max_steps, self._text, duration(left))

    def on_train_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 (transformers')
        """Takes the line away."""
        if self._bar is not None:
            self._bar.close()

    def _describe(self, report: StepReport) -> str:
        now = time.monotonic()
        parts = []
        if report.reward is not None and self._rewarded:
            parts.append(f"reward {report.reward:.3f}")
        if report.teacher_kl is not None:
            parts.append(f"KL to the teacher {report.teacher_kl:.3f}")
        if report.length is not None:
            parts.append(f"length {report.length:.1f}")
        if self._previous is not None:
            tokens, then = self._previous
            parts.append(f"{(report.tokens - tokens) / max(now - then, 1e-9):,.0f} tokens/s")
        self._previous = (report.tokens, now)
        return "  ".join(parts)
