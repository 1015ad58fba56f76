"""Reports why nothing is learned: rewards that do not differ within any group.

logs of a step -> one line with the setting to change, when flat steps follow each other

``HealthAlarms`` says it among other alarms; this is for a script that wants nothing else.
"""

import logging
from collections.abc import Callable

from transformers import TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from perl.algorithms.estimators import ADVANTAGES
from perl.errors import RecipeError
from perl.trainer.alarms.flat import diagnose, flat_steps, is_flat, typical
from perl.trainer.alarms.history import History
from perl.trainer.alarms.rule import Setup, as_in_a_script
from perl.trainer.alarms.table import RULES
from perl.trainer.callbacks.run_callback import Logs, RunCallback
from perl.trainer.config import own_setting

FLAT = "rewards_flat"
"""The alarm that this is."""

logger = logging.getLogger("perl")

SHOWN = ("max_completion_length", "temperature", "num_generations")
"""Arguments whose present values stand in the line."""


class FlatRewards(RunCallback):
    """Warns once flat steps follow each other, again each time their number has doubled, and says when it is over.

    Works with ``PeftGRPOTrainer`` and with TRL's ``GRPOTrainer``; the alarms of a ``PeftGRPOTrainer`` that is given one
    leave this to it.
    """

    def __init__(self, after_steps: int = 5, latest_completions: Callable[[], list[str]] | None = None) -> None:
        """Waits for flat steps.

        Args:
            after_steps: How many in a row are a warning; 0: never warn.
            latest_completions: Gives the trainer's newest completions, of which a typical one is shown; None: those of
                a ``PeftGRPOTrainer``.

        Raises:
            RecipeError: ``after_steps`` is not a number of steps.
        """
        if not isinstance(after_steps, int) or isinstance(after_steps, bool) or after_steps < 0:
            raise RecipeError(f"must be a whole number of steps, not {after_steps!r}", "FlatRewards(after_steps)")
        self._compares = True
        self.after_steps = after_steps
        self.latest_completions = latest_completions
        self._steps = 0
        self._begin(0)

    def serve(self, trainer: GRPOTrainer) -> None:
        """Learns what equal rewards mean to the trainer's advantages."""
        super().serve(trainer)
        self._compares = compares_groups(trainer.args)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        """Begins to count; a resumed run counts anew."""
        super().on_train_begin(args, state)
        self._begin(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        _: object,
        logs: Logs = None,
        **__: object,
    ) -> None:
        """Counts the steps that were logged."""
        if self.after_steps < 1 or not state.is_world_process_zero or not logs:
            return
        rows = len(self._history.rows)
        self._history.add(state.global_step, logs)
        if len(self._history.rows) == rows or is_flat(logs) is None:
            return
        values = {name: getattr(args, name, None) for name in SHOWN}
        newest = self.latest_completions or (list if self.trainer is None else self.trainer.latest_completions)
        completion = typical(newest())
        flat = flat_steps(self._history, Setup(compares=self._compares, completion=completion, values=values))
        if flat is None:
            if self._steps >= self.after_steps:
                logger.info("rewards differ within groups again, after %d steps in which they did not", self._steps)
            self._steps, self._warn_at = 0, self.after_steps
            return
        self._steps = flat.steps
        if self._steps >= self._warn_at:
            while self._warn_at <= self._steps:
                self._warn_at *= 2
            code = RULES[FLAT].code
            line = diagnose(flat) if getattr(args, "of_a_recipe", False) else as_in_a_script(diagnose(flat))
            logger.warning("%s [%s]", line, code, extra={"code": code})

    def _begin(self, step: int) -> None:
        self._history, self._steps, self._warn_at = History(step), 0, self.after_steps


def compares_groups(args: GRPOConfig) -> bool:
    """Whether equal rewards of a group make no advantage; with a critic or a baseline of the batch they do."""
    return ADVANTAGES[own_setting(args, "advantage_estimator")].flat == "0"
