"""Writes what happens to the run folder as it happens.

logs of a step -> metrics.jsonl, samples.jsonl, run.json

Each line is written whole, so a kill loses at most the step it interrupts.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerState

from perl.run.folder import Run
from perl.types import StepReport


def report_of(step: int, logs: Mapping[str, Any]) -> StepReport:
    """The record of a step from TRL's names for its metrics."""
    return StepReport(
        step=step,
        reward=logs.get("reward"),
        length=logs.get("completions/mean_length"),
        entropy=logs.get("entropy"),
        kl=logs.get("kl"),
        tokens=logs.get("num_tokens") or 0.0,
        teacher_kl=logs.get("teacher/kl"),
    )


class Recorder(TrainerCallback):
    """Appends every logged step to ``metrics.jsonl`` and a group of its completions to ``samples.jsonl``."""

    def __init__(self, run: Run, latest_group: Callable[[], list[dict[str, Any]]]) -> None:
        """Records into a run folder.

        Args:
            run: The folder.
            latest_group: Gives the trainer's newest completions of one prompt.
        """
        self.run = run
        self.latest_group = latest_group

    def on_log(self, _: Any, state: TrainerState, __: Any, logs: Mapping[str, Any] | None = None, **___: Any) -> None:  # noqa: ANN401
        """Records a step; the summary at the end of training is not one."""
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        self._append(self.run.metrics, {"step": state.global_step, **logs})
        if "reward" not in logs:  # evaluation, or a step that trains on an earlier step's rollouts
            self.run.record(steps=state.global_step)
            return
        for sample in self.latest_group():
            self._append(self.run.samples, {"step": state.global_step, **sample})
        report = report_of(state.global_step, _finite(logs))
        reward = {"first": self.run.facts.get("reward", {}).get("first", report.reward), "last": report.reward}
        self.run.record(steps=state.global_step, reward=reward)

    def _append(self, path: Any, row: Mapping[str, Any]) -> None:  # noqa: ANN401 (a path)
        with path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(_finite(row), ensure_ascii=False) + "\n")


def _finite(value: Any) -> Any:  # noqa: ANN401 (JSON values)
    """The same value with null where JSON has no number for it."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
