"""Samples, alarms and final scores as tables of the trackers that ``report_to`` names.

new rows of samples.jsonl and alarms.jsonl -> a table of each tracker; eval/results.json -> a table and numbers there

The rows are read from the files, whoever writes them. Each is sent once: a training that goes on begins after the last
row that a tracker still has.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState
from trl import GRPOConfig

from perl.evaluation.results import Results, read_results
from perl.run.logs import log_rows, logged_step
from perl.run.warned import warn
from perl.trainer.callbacks.run_callback import Logs, RunCallback, check_every, folder_of
from perl.trainer.trackers.place import Place, given_tables, known, note, note_table, place_of
from perl.trainer.trackers.registry import TRACKERS, Tracker
from perl.trainer.trackers.table import Table, table_of

TABLES = ("samples", "alarms")
"""Tables, and the files without their suffix."""


class TrackedTables(RunCallback):
    """Sends the new rows of ``samples.jsonl`` and ``alarms.jsonl`` to the trackers every so many steps and at the end.

    Trackers are those of ``report_to`` among wandb, mlflow, trackio and tensorboard; without any it does nothing. A
    tracker that refuses a table is told of once, and the training goes on.

    Example:
        ``PeftGRPOTrainer(..., callbacks=[SamplesLog(), TrackedTables(every=20)])``
    """

    def __init__(self, folder: str | Path | None = None, every: int = 10) -> None:
        """Sends nothing yet.

        Args:
            folder: That holds the files; None: the trainer's ``output_dir``.
            every: Steps between two tables.

        Raises:
            RecipeError: ``every`` is not a number of steps.
        """
        check_every(every, "TrackedTables(every)")
        self._given, self._every = None if folder is None else Path(folder), every
        self._files: dict[str, _NewRows] = {}
        self._trackers: list[Tracker] = []

    def on_train_begin(self, args: GRPOConfig, state: TrainerState, *_: object, **__: object) -> None:
        """Finds what is sent already."""
        super().on_train_begin(args, state)
        self._trackers = trackers_of(args) if state.is_world_process_zero else []
        folder = folder_of(args, self._given)
        self._files = {name: _NewRows(folder / f"{name}.jsonl") for name in TABLES}

    def on_log(
        self, args: GRPOConfig, state: TrainerState, control: TrainerControl, logs: Logs = None, **_: object
    ) -> None:
        """Sends, where it is due; before the end of the training, at which trackers close."""
        ends = control.should_training_stop or "train_runtime" in (logs or {})
        if self._trackers and (ends or state.global_step % self._every == 0):
            self._send(args, place_of(args))

    def _send(self, args: GRPOConfig, place: Place) -> None:
        for name, file in self._files.items():
            begins = [max(given_tables(place, one.name).get(name, []), default=-1) for one in self._trackers]
            rows = file.take(min(begins, default=-1))
            for tracker in list(self._trackers):
                if name == "samples" and getattr(args, "log_completions", False) and tracker.logs_completions:
                    continue  # TRL sends them all
                sent = max(given_tables(place, tracker.name).get(name, []), default=-1)
                unsent = [row for row in rows if _step_of(row) > sent]
                if unsent and not self._sent(place, tracker, name, unsent):
                    self._trackers.remove(tracker)

    def _sent(self, place: Place, tracker: Tracker, name: str, rows: list[dict[str, Any]]) -> bool:
        last = max(map(_step_of, rows))
        try:
            tracker.write_table(place, name, table_of(rows), last)
        except Exception as error:  # noqa: BLE001 (a tracker must not end a training)
            warn("PRL343", "%s takes no table of %s, and gets no more of them: %s", tracker.name, name, error)
            return False
        note_table(place, tracker.name, name, last)
        return True


def track_scores(args: GRPOConfig, folder: Path, step: int) -> None:
    """Sends the final scores of base and adapter to the trackers, and closes their runs; on the main process.

    Args:
        args: Of the training.
        folder: That holds ``results.json``; without that file the runs are closed only.
        step: Of the adapter.
    """
    trackers, place = trackers_of(args), place_of(args)
    if not trackers:
        return
    found = read_results(folder) if (folder / "results.json").is_file() else None
    scores = dict(_scores(found)) if found is not None else {}
    for tracker in trackers:
        if known(place, tracker.name).get("scores") == scores:
            continue  # sent before a kill
        try:
            tracker.write_scores(place, scores, _table(found), step)
        except Exception as error:  # noqa: BLE001 (a tracker must not fail a trained adapter)
            warn("PRL343", "%s does not take the scores: %s", tracker.name, error)
            continue
        note(place, tracker.name, scores=scores)


def trackers_of(args: GRPOConfig) -> list[Tracker]:
    """The trackers of ``report_to`` that tables go to."""
    return [TRACKERS[name] for name in args.report_to or [] if name in TRACKERS]


class _NewRows:
    """The rows of a log that were not taken yet, whole lines only."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def take(self, after: int) -> list[dict[str, Any]]:
        """Those of later steps than one."""
        rows: list[dict[str, Any]] = []
        if not self._path.is_file():
            return rows
        with self._path.open("rb") as log:
            log.seek(self._at)
            while (line := log.readline()).endswith(b"\n"):
                self._at += len(line)
                if logged_step(line) > after:
                    rows += log_rows(line.decode("utf-8", errors="replace"))
        return rows


def _step_of(row: Mapping[str, Any]) -> int:
    step = row.get("step")
    return int(step) if isinstance(step, int | float) else 0


def _policies(results: Results) -> Iterator[tuple[str, str, Any]]:
    for task in results.tasks:
        for who, score in (("base", task.base), ("adapter", task.adapter)):
            if score is not None:
                yield task.name, who, score


def _scores(results: Results) -> Iterator[tuple[str, float]]:
    for task, who, score in _policies(results):
        yield f"final/{task}/avg@{score.k}/{who}", score.accuracy


def _table(results: Results | None) -> Table:
    columns = ("task", "policy", "avg@k", "stderr", "k", "problems", "mean_tokens", "truncated", "no_answer")
    rows = tuple(
        (task, who, score.accuracy, score.stderr, score.k, score.n, score.mean_tokens, score.truncated, score.no_answer)
        for task, who, score in (_policies(results) if results is not None else ())
    )
    return Table(columns, rows)
