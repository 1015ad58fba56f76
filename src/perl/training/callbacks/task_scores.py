"""Benchmark scores between steps, and the best adapter by one of them.

policy at a step -> metrics of the step, best/

How a policy is scored is in ``scores.py``.
"""

import json
import logging
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState

from perl.run.facts import BEST, read_best
from perl.run.folder import replace_folder, write_text
from perl.run.joint_work import Processes
from perl.run.warned import warn

logger = logging.getLogger("perl")

Metrics = dict[str, float]


class TaskScores(TrainerCallback):
    """Scores the policy every so many steps and keeps the adapter that scored best."""

    def __init__(
        self,
        score: Callable[[], Metrics],
        note: Callable[[Metrics], None],
        save: Callable[[str | Path], None],
        every: int,
        best: str | None,
        folder: Path,
        processes: Processes | None = None,
    ) -> None:
        """Scores nothing yet.

        Args:
            score: Called on every process; gives metrics, ``eval/TASK/avg@K`` among them.
            note: Puts metrics into the log of the step.
            save: Saves the adapter into a folder; called on every process.
            every: Optimizer steps between two scores.
            best: By which metric the best adapter is known, without ``eval/``; None: the mean of all avg@k.
            folder: Where it is kept.
            processes: That call this callback, of which the main one writes; None: this one alone.
        """
        self._score, self._note, self._save = score, note, save
        self._every, self._by, self._folder, self._processes = every, best, folder, processes or Processes()
        self._staged = folder.with_name(f".{folder.name}.tmp")

    def on_step_end(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:  # noqa: ANN401 (transformers')
        """Scores, where it is due."""
        if state.global_step % self._every:
            return
        metrics = self._score()
        self._note(metrics)
        value = self._value(metrics)
        if self._processes.main:
            scores = [f"{name.removeprefix('eval/')} {v:.3f}" for name, v in metrics.items() if "/avg@" in name]
            logger.info("step %d: %s", state.global_step, ", ".join(scores))
        with self._processes.failing_together():
            if self._processes.by_main(lambda: value > self._best_so_far(state.global_step)):
                what = self._by or "mean avg@k"
                self._keep({"step": state.global_step, "metric": what, "value": value, "metrics": metrics})

    def _keep(self, record: dict[str, Any]) -> None:
        """Weights and what they scored change places with the older ones at once: a kill pairs none with another's."""
        if self._processes.main:
            shutil.rmtree(self._staged, ignore_errors=True)
        self._save(self._staged / "adapter")
        if self._processes.main:
            write_text(self._staged / BEST, json.dumps(record, indent=2) + "\n")
            replace_folder(self._staged, self._folder)

    def _value(self, metrics: Metrics) -> float:
        if self._by is not None:
            return metrics[f"eval/{self._by}"]
        return statistics.fmean(value for name, value in metrics.items() if "/avg@" in name)

    def _best_so_far(self, step: int) -> float:
        """Of the steps before this one: a run that goes on from a checkpoint repeats those after it."""
        if not self._folder.exists() and (self._staged / BEST).is_file():  # a kill came while it took its place
            self._staged.rename(self._folder)
        try:
            record = read_best(self._folder)
        except FileNotFoundError:
            return float("-inf")
        except (OSError, ValueError) as error:
            warn("PRL303", "%s: %s; the best score so far is forgotten", self._folder / BEST, error)
            return float("-inf")
        return float(record["value"]) if record["step"] < step else float("-inf")
