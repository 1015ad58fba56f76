"""A log of completions: of each logged step those of one prompt, with their rewards and advantages.

newest completions of a step -> samples.jsonl
"""

from pathlib import Path

from transformers import TrainerState, TrainingArguments

from perl.run.logs import append_row
from perl.trainer.callbacks.run_callback import Logs, RunCallback, check_every, folder_of, reopened

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
