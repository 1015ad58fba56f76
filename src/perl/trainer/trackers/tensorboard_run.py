"""TensorBoard: one folder of a training, its tables and scores as text.

Place -> SummaryWriter in the same folder; tables -> Markdown

A resumed training marks the step that it goes on from, and TensorBoard forgets what came after.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.integrations.integration_utils import TensorBoardCallback, default_logdir

from perl.trainer.trackers.one_run import OneRun
from perl.trainer.trackers.place import Place, forget_after, known, last_logged, note
from perl.trainer.trackers.shown import shown_recipe
from perl.trainer.trackers.table import Table

# TensorBoard reads the files of a folder one after the other and never goes back, so that all write to the newest.
_writers: dict[Path, Any] = {}


class TensorBoardRun(OneRun, TensorBoardCallback):
    """Writes into the folder that is kept, or into that of ``TENSORBOARD_LOGGING_DIR``."""

    tracker = "tensorboard"

    def open_run(self, place: Place) -> None:
        """Chooses the folder; its writer is made where it is known from which step on it writes."""
        folder = _asked_folder()
        if folder is None:
            kept = known(place, self.tracker).get("id")
            new = "tensorboard" if place.of_a_recipe else default_logdir()
            folder = place.folder / (kept or new)
            note(place, self.tracker, id=str(kept or new))
        self.logging_dir: str | None = str(folder)

    def rewind(self, place: Place, step: int) -> int:
        """Makes TensorBoard forget what came after a step."""
        folder, settings = _folder(place), {}
        if last_logged(place, self.tracker) > step:
            _close(folder)
            settings = {"purge_step": step + 1}
            forget_after(place, self.tracker, step)
        self.tb_writer = _writer(folder, **settings)
        if (recipe := shown_recipe(place.recipe)) is not None:
            self.tb_writer.add_text("recipe", "".join(f"    {line}\n" for line in recipe.splitlines()))
        return step

    def _init_summary_writer(self, _: Any) -> None:  # noqa: ANN401 (transformers')
        """Replaces transformers': the writer is the folder's only one."""
        if self.logging_dir is not None:
            self.tb_writer = _writer(Path(self.logging_dir))

    def on_train_end(self, *given: Any, **more: Any) -> None:  # noqa: ANN401 (transformers')
        """Extends transformers' end, which closes the writer."""
        super().on_train_end(*given, **more)
        if self.logging_dir is not None:
            _writers.pop(Path(self.logging_dir), None)


def write_table(place: Place, name: str, table: Table, step: int) -> None:
    """Writes a table as text of a step."""
    writer = _writer(_folder(place))
    writer.add_text(name, table.markdown(), step)
    writer.flush()


def write_scores(place: Place, scores: Mapping[str, float], table: Table, step: int) -> None:
    """Writes scores as scalars and as text."""
    for name, value in scores.items():
        _writer(_folder(place)).add_scalar(name, value, step)
    if table.rows:
        write_table(place, "scores", table, step)
    _close(_folder(place))


def _asked_folder() -> Path | None:
    asked = os.environ.get("TENSORBOARD_LOGGING_DIR")
    return Path(asked).expanduser() if asked else None


def _folder(place: Place) -> Path:
    kept = known(place, TensorBoardRun.tracker).get("id")
    return _asked_folder() or place.folder / (kept or "runs/tables")


def _writer(folder: Path, **settings: Any) -> Any:  # noqa: ANN401 (a SummaryWriter)
    if folder not in _writers:
        _writers[folder] = TensorBoardCallback()._SummaryWriter(log_dir=str(folder), **settings)
    return _writers[folder]


def _close(folder: Path) -> None:
    writer = _writers.pop(folder, None)
    if writer is not None:
        writer.close()
