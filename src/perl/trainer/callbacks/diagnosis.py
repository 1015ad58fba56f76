"""Reports why nothing is learned: rewards that do not differ within any group.

logs of a step -> one line with the setting to change, when flat steps follow each other

``HealthAlarms`` says the same among other alarms; this is for a script that wants nothing else.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments

from perl.trainer.alarms.flat import FlatSteps as FlatSteps
from perl.trainer.alarms.flat import diagnose as diagnose
from perl.trainer.alarms.flat import flat_steps
from perl.trainer.alarms.flat import is_flat as is_flat
from perl.trainer.alarms.flat import typical as typical
from perl.trainer.alarms.history import History
from perl.trainer.alarms.rule import Setup

logger = logging.getLogger("perl")

SHOWN = ("max_completion_length", "temperature", "num_generations")
"""Arguments whose present values stand in the line."""


class FlatRewards(TrainerCallback):
    """Warns once flat steps follow each other, again each time their number has doubled, and says when it is over.

    Works with ``PeftGRPOTrainer`` and with TRL's ``GRPOTrainer``; the alarms of a ``PeftGRPOTrainer`` that is given one
    leave this to it.
    """

    def __init__(
        self, after_steps: int = 5, latest_completions: Callable[[], list[str]] = list, *, compares: bool = True
    ) -> None:
        """Waits for flat steps.

        Args:
            after_steps: How many in a row are a warning; 0: never warn.
            latest_completions: Gives the trainer's newest completions, of which a typical one is shown.
            compares: Whether equal rewards of a group make no advantage; with a critic or a baseline of the batch they
                do.
        """
        self._compares = compares
        self._steps = 0
        self.after_steps = after_steps
        self.latest_completions = latest_completions
        self._steps = 0
        self._begin(0)

    def on_train_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:  # noqa: ANN401 (transformers')
        """Begins to count; a resumed run counts anew."""
        self._begin(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        _: Any,  # noqa: ANN401 (transformers')
        logs: Mapping[str, Any] | None = None,
        **__: Any,  # noqa: ANN401
    ) -> None:
        """Counts the steps that were logged."""
        if self.after_steps < 1 or not state.is_world_process_zero or not logs:
            return
        rows = len(self._history.rows)
        self._history.add(state.global_step, logs)
        if len(self._history.rows) == rows or is_flat(logs) is None:
            return
        values = {name: getattr(args, name, None) for name in SHOWN}
        completion = typical(self.latest_completions())
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
            logger.warning("%s", diagnose(flat))

    def _begin(self, step: int) -> None:
        self._history, self._steps, self._warn_at = History(step), 0, self.after_steps
