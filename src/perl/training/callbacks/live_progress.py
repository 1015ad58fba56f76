"""The live line of training: step, reward, KL to the teacher, length, tokens a second, time left."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerState, TrainingArguments
from trl import GRPOTrainer

from perl.run.progress import Recurring, TimeLeft, duration, live_line
from perl.trainer.callbacks.run_callback import Logs, RunCallback
from perl.trainer.sampling.given_rewards import is_rewarded
from perl.training.callbacks.benchmark_scores import BenchmarkScores

# In a log: a line each time another tenth of the steps is done.
_LINES_IN_A_LOG = 10
# What a line shows, in order: metric, text.
_SHOWN = (
    ("reward", "reward {:.3f}"),
    ("teacher/kl", "KL to the teacher {:.3f}"),
    ("completions/mean_length", "length {:.1f}"),
    ("refill/samples", "refill {:.0f}"),
)


class LiveProgress(RunCallback):
    """Redraws one line on a terminal; writes ten lines in all where the output is a log.

    Works with any trainer of transformers or TRL; those that log no reward show their loss. In a
    :class:`perl.PeftGRPOTrainer` it takes the place of transformers' own progress bar.

    Example:
        ``PeftGRPOTrainer(..., callbacks=[LiveProgress()])``
    """

    def __init__(self, *, say: Callable[[str], None] | None = None) -> None:
        """Nothing is shown before training begins.

        Args:
            say: Takes each line of a log; None: stderr.
        """
        self._say = say
        self._bar: tqdm | None = None
        self._first_step, self._text = 0, ""
        self._tokens: float | None = None
        self._time = TimeLeft()
        self._at, self._seconds = 0.0, 0.0

    def serve(self, trainer: GRPOTrainer) -> None:
        """Takes the place of transformers' bars."""
        super().serve(trainer)
        for theirs in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(theirs)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        """Starts the clock; a resumed run counts the steps that are done."""
        super().on_train_begin(args, state)
        self._first_step, self._text, self._tokens, self._seconds = state.global_step, "", None, 0.0
        self._time, self._at = TimeLeft(), 0.0
        if state.is_world_process_zero:
            self._bar = live_line(state.max_steps, "training  ETA ?", state.global_step, timed=False, asked=True)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        """What came between two steps ends here."""
        now = time.monotonic()
        if self._at:
            self._time.add_between(state.global_step, now - self._at)
        else:  # every callback has begun by now
            every = int(state.eval_steps or 0) if args.eval_strategy == "steps" else 0  # of the state: in whole steps
            recurring = [Recurring(every)] if every else []
            for one in self.trainer.callback_handler.callbacks if self.trainer is not None else ():
                recurring += [Recurring(one.every, one.completions)] if isinstance(one, BenchmarkScores) else []
            self._time = TimeLeft(tuple(recurring), getattr(args, "generation_batch_size", None) or 0)
        self._at = now

    def on_optimizer_step(self, *_: object, **__: object) -> None:
        """A step ends here; scores of it come afterwards."""
        now = time.monotonic()
        self._time.add_step(now - self._at)
        self._seconds += now - self._at
        self._at = now

    def on_log(self, _: object, state: TrainerState, __: object, logs: Logs = None, **___: object) -> None:
        """Shows the step that was logged."""
        if self._bar is None or not logs or "loss" not in logs:
            return
        # A step that trains on an earlier step's rollouts has no reward.
        if "reward" in logs or "completions/mean_length" not in logs:
            self._text = self._describe(logs) or self._text
        left = self._time.left(state.global_step, state.max_steps)
        text = f"{self._text}  ETA {'?' if left is None else duration(left)}"
        self._bar.set_description_str(f"training  {text}", refresh=False)
        self._bar.update(state.global_step - self._bar.n)
        every = max(1, state.max_steps // _LINES_IN_A_LOG)
        is_due = state.global_step % every == 0 or state.global_step in (self._first_step + 1, state.max_steps)
        if self._bar.disable and is_due:
            line = f"step {state.global_step}/{state.max_steps}  {text}"
            if self._say is None:
                sys.stderr.write(f"{line}\n")
            else:
                self._say(line)

    def on_train_end(self, *_: object, **__: object) -> None:
        """Takes the line away."""
        if self._bar is not None:
            self._bar.close()

    def _describe(self, logs: Mapping[str, Any]) -> str:
        rewarded = self.trainer is None or is_rewarded(self.trainer)
        parts = [
            text.format(logs[name])
            for name, text in _SHOWN
            if logs.get(name) is not None and (rewarded or name != "reward")
        ]
        if not parts and logs.get("loss") is not None:
            parts = [f"loss {float(logs['loss']):.3f}"]
        tokens = logs.get("num_tokens") or 0.0
        if self._tokens is not None:
            parts.append(f"{(tokens - self._tokens) / max(self._seconds, 1e-9):,.0f} tokens/s")
            self._seconds = 0.0
        elif tokens:
            self._seconds = 0.0
        self._tokens = tokens or None
        return "  ".join(parts)
