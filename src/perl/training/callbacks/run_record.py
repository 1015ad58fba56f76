"""Keeps ``run.json`` up to date while a recipe trains: steps, first and last reward; and tells the host.

logs of a step -> run.json
"""

import math

from transformers import TrainerCallback, TrainerState

from perl.errors import RunFolderError
from perl.run.folder import Run
from perl.run.host import host
from perl.trainer.callbacks.run_callback import Logs


class RunRecord(TrainerCallback):
    """Records each logged step, and hands steps and checkpoints to the host."""

    def __init__(self, run: Run) -> None:
        """Takes the folder to record in, which holds the checkpoints."""
        self.run = run

    def on_log(self, _: object, state: TrainerState, __: object, logs: Logs = None, **___: object) -> None:
        """Records a step; the summary at the end of training is not one."""
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        if not (self.run.path / "recipe.yaml").is_file():
            raise RunFolderError("was removed while the run wrote to it", str(self.run.path), "start it again")
        host().logged(state.global_step, logs)
        if "reward" not in logs:  # evaluation, or a step that trains on an earlier step's rollouts
            self.run.record(steps=state.global_step)
            return
        last = logs["reward"]
        known = None if last is None or not math.isfinite(last) else last
        first = self.run.facts.get("reward", {}).get("first", known)
        self.run.record(steps=state.global_step, reward={"first": first, "last": known})

    def on_save(self, *_: object, **__: object) -> None:
        """A checkpoint is whole."""
        host().saved(self.run.path)
