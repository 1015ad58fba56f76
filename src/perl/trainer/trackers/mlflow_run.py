"""MLflow: one run of a training, its tables and scores.

Place -> mlflow.start_run with the run's id; tables -> artifacts that MLflow's pages show as tables

A metric cannot be taken back, so a step that a resumed training repeats is left out.
"""

import os
from collections.abc import Mapping
from typing import Any

from transformers import TrainerState
from transformers.integrations.integration_utils import MLflowCallback

from perl.errors import PerlError, first_line
from perl.recipe.server_address import without_credentials
from perl.run.warned import warn
from perl.trainer.trackers.one_run import OneRun
from perl.trainer.trackers.place import Place, known, note
from perl.trainer.trackers.shown import ShownArguments, shown_recipe
from perl.trainer.trackers.table import Table

_IN_EVERY_LOG = "epoch"


class MLflowRun(OneRun, MLflowCallback):
    """Logs into the run whose id is kept, unless the user has opened one or names one in ``MLFLOW_RUN_ID``."""

    tracker = "mlflow"
    _ends = False  # whether the run is ours to end

    def open_run(self, place: Place) -> None:
        """Opens the run, which transformers then takes; it ends when the training ends."""
        import mlflow

        # A server that does not answer is to be a line within seconds, not minutes of silence.
        for variable, seconds in (("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"), ("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")):
            os.environ.setdefault(variable, seconds)
        try:
            self._ends = _open(place)
        except mlflow.exceptions.MlflowException as error:
            said = without_credentials(first_line(error))
            raise PerlError(
                f"mlflow takes no run: {said}", "report_to", "MLFLOW_TRACKING_URI, or leave it out"
            ) from None

    def rewind(self, place: Place, _: int) -> int:
        """Nothing can be taken back; what the run has is asked, for a kill may have lost what was not stored yet."""
        import mlflow

        run = mlflow.active_run()
        if run is None or run.info.run_id != known(place, self.tracker).get("id"):
            return 0
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, _IN_EVERY_LOG)
        return max((metric.step for metric in history), default=0)

    def setup(self, args: Any, state: TrainerState, model: Any) -> None:  # noqa: ANN401 (transformers')
        """Extends transformers' setup: a run that we opened is ended too, and parameters are given only once."""
        import mlflow

        run = mlflow.active_run() if state.is_world_process_zero else None
        seen = run is not None and bool(mlflow.MlflowClient().get_run(run.info.run_id).data.params)
        super().setup(_Parameters(args, self._MAX_PARAM_VAL_LENGTH, seen=seen), state, None if seen else model)
        self._auto_end_run: bool = self._ends or self._auto_end_run

    def on_train_end(self, args: Any, state: TrainerState, *given: Any, **more: Any) -> None:  # noqa: ANN401 (transformers')
        """Extends transformers' end: what is on its way to the store arrives before."""
        import mlflow

        if state.is_world_process_zero:
            mlflow.flush_async_logging()
        super().on_train_end(args, state, *given, **more)


class _Parameters(ShownArguments):
    """Arguments as parameters, which MLflow takes once and only short."""

    def __init__(self, args: Any, longest: int, *, seen: bool) -> None:  # noqa: ANN401 (stands for arguments)
        """Shows none where the run has some already; of the others those that are no longer than MLflow takes."""
        super().__init__(args)
        self._longest, self._seen = longest, seen

    def to_dict(self) -> dict[str, Any]:
        """Parameters by name."""
        shown = {} if self._seen else super().to_dict()
        return {name: value for name, value in shown.items() if len(str(value)) <= self._longest}


def write_table(_: Place, name: str, table: Table, step: int) -> None:
    """Stores a table of its own for a step, if a run is active."""
    import mlflow

    if mlflow.active_run() is not None:
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        mlflow.log_table(table.by_column(), f"{name}/{step:06d}.json")


def write_scores(place: Place, scores: Mapping[str, float], table: Table, step: int) -> None:
    """Logs scores as metrics and as a table, and ends the run."""
    import mlflow

    ours = _open(place)
    if mlflow.active_run() is None and os.environ.get("MLFLOW_RUN_ID"):
        ours = mlflow.start_run() is not None
    mlflow.log_metrics({name.replace("@", "_"): value for name, value in scores.items()}, step=step)
    if table.rows:
        write_table(place, "scores", table, step)
    if ours:
        mlflow.flush_async_logging()
        mlflow.end_run()


def _open(place: Place) -> bool:
    """Opens the run; False: the user's is open, or will be."""
    import mlflow

    if mlflow.active_run() is not None or os.environ.get("MLFLOW_RUN_ID"):
        return False
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or place.project
    if experiment and not os.environ.get("MLFLOW_EXPERIMENT_ID"):
        mlflow.set_experiment(experiment)
    identity = known(place, MLflowRun.tracker).get("id")
    if identity is not None:
        try:
            mlflow.start_run(run_id=identity)
            return True
        except mlflow.exceptions.MlflowException as error:
            warn("PRL344", "mlflow does not have the run of %s any more, and a new one begins: %s", place.folder, error)
    run = mlflow.start_run(run_name=os.environ.get("MLFLOW_RUN_NAME") or place.name)
    note(place, MLflowRun.tracker, id=run.info.run_id, tables={}, logged=0)
    if (recipe := shown_recipe(place.recipe)) is not None:
        mlflow.log_text(recipe, "recipe.yaml")
    return True
