"""The trackers in which a training is one run: a row each.

trainer -> the same with these callbacks in the place of transformers'; tables, scores -> each tracker

The other trackers of transformers are used as transformers uses them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import Trainer, TrainerCallback
from transformers.integrations import integration_utils as theirs

from perl.trainer.trackers import mlflow_run, tensorboard_run, trackio_run, wandb_run
from perl.trainer.trackers.one_run import OneRun
from perl.trainer.trackers.place import Place
from perl.trainer.trackers.table import Table


@dataclass(frozen=True)
class Tracker:
    """A tracker.

    Attributes:
        name: In ``report_to``.
        theirs: transformers' callback.
        ours: What takes its place.
        write_table: Writes a table of a name at a step into the run that is open.
        write_scores: Writes scores by name and as a table at a step, opens the run for it and closes it.
        logs_completions: Whether TRL's ``log_completions`` writes a table of completions too.
    """

    name: str
    theirs: type[TrainerCallback]
    ours: type[OneRun]
    write_table: Callable[[Place, str, Table, int], None]
    write_scores: Callable[[Place, Mapping[str, float], Table, int], None]
    logs_completions: bool = False


TRACKERS = {
    row.name: row
    for row in (
        Tracker(
            "mlflow",
            theirs.MLflowCallback,
            mlflow_run.MLflowRun,
            mlflow_run.write_table,
            mlflow_run.write_scores,
        ),
        Tracker(
            "tensorboard",
            theirs.TensorBoardCallback,
            tensorboard_run.TensorBoardRun,
            tensorboard_run.write_table,
            tensorboard_run.write_scores,
        ),
        Tracker(
            "trackio",
            theirs.TrackioCallback,
            trackio_run.TrackioRun,
            trackio_run.write_table,
            trackio_run.write_scores,
            logs_completions=True,
        ),
        Tracker(
            "wandb",
            theirs.WandbCallback,
            wandb_run.WandbRun,
            wandb_run.write_table,
            wandb_run.write_scores,
            logs_completions=True,
        ),
    )
}


def follow_runs(trainer: Trainer) -> None:
    """Puts our callbacks in the place of transformers', so that a resumed training goes on in the run that it has."""
    ours = {row.theirs: row.ours for row in TRACKERS.values()}
    callbacks = trainer.callback_handler.callbacks
    # One that a script has given its own writer is the script's.
    theirs = [type(found) in ours and getattr(found, "tb_writer", None) is None for found in callbacks]
    callbacks[:] = [ours[type(one)]() if known else one for one, known in zip(callbacks, theirs, strict=True)]
