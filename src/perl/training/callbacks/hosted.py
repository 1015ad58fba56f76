"""Tells the host of this process what happens, and does what it asks for: see ``run/host.py``."""

from transformers import TrainerCallback, TrainerControl, TrainerState

from perl.run.folder import Run
from perl.run.host import host
from perl.trainer.callbacks.run_callback import Logs


class Hosted(TrainerCallback):
    """Hands steps and checkpoints to the host; takes checkpoints that it asks for."""

    def __init__(self, run: Run) -> None:
        """Takes the run folder, which holds the checkpoints."""
        self._run = run

    def on_step_end(self, _: object, __: object, control: TrainerControl, **___: object) -> None:
        """Takes a checkpoint out of turn; all processes ask at the same step."""
        if host().save_asked():
            control.should_save = True

    def on_log(self, _: object, state: TrainerState, __: object, logs: Logs = None, **___: object) -> None:
        """Hands a step to the host; the summary at the end of training is not one."""
        if state.is_world_process_zero and logs and "train_runtime" not in logs:
            host().logged(state.global_step, logs)

    def on_save(self, *_: object, **__: object) -> None:
        """A checkpoint is whole."""
        host().saved(self._run.path)
