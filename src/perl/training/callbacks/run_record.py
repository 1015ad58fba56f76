"""Keeps ``run.json`` up to date while a recipe trains: steps done, first and last reward.

logs of a step -> run.json
"""

import math

from transformers import TrainerCallback, TrainerState

from perl.run.folder import Run
from perl.trainer.callbacks.run_callback import Logs


class RunRecord(TrainerCallback):
    """Records each logged step."""

    def __init__(self, run: Run) -> None:
        """Takes the folder to record in."""
        self.run = run

    def on_log(self, _: object, state: TrainerState, __: object, logs: Logs = None, **___: object) -> None:
        """Records a step; the summary at the end of training is not one."""
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        if "reward" not in logs:  # evaluation, or a step that trains on an earlier step's rollouts
            self.run.record(steps=state.global_step)
            return
        last = logs["reward"]
        known = None if last is None or not math.isfinite(last) else last
        first = self.run.facts.get("reward", {}).get("first", known)
        self.run.record(steps=state.global_step, reward={"first": first, "last": known})
