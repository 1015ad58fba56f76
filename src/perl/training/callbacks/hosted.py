"""Tells the host of this process what happens: see ``run/host.py``; what that asks for, the graceful stop hears."""

from transformers import TrainerCallback, TrainerState

from perl.run.folder import Run
from perl.run.host import host
from perl.trainer.callbacks.run_callback import Logs


class Hosted(TrainerCallback):
    """Hands steps and checkpoints to the host."""

    def __init__(self, run: Run) -> None:
        """Takes the run folder, which holds the checkpoints."""
        self._run = run

    def on_log(self, _: object, state: TrainerState, __: object, logs: Logs = None, **___: object) -> None:
        """Hands a step to the host; the summary at the end of training is not one."""
        if state.is_world_process_zero and logs and "train_runtime" not in logs:
            host().logged(state.global_step, logs)

    def on_save(self, *_: object, **__: object) -> None:
        """A checkpoint is whole."""
        host().saved(self._run.path)
