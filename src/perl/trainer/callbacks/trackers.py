"""A training is one run of each tracker, however often it is resumed; transformers' own callbacks write into it.

trackers.json -> the run's id, where the tracker looks for it; scores of base and adapter -> the same run
"""

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.integrations import integration_utils as theirs
from trl import GRPOConfig, GRPOTrainer

from perl.algorithms.registry import function_at
from perl.errors import PerlError, first_line, warn
from perl.evaluation.scoring.results import read_results
from perl.recipe.optional_packages import ADDED_TRACKERS, named_trackers
from perl.recipe.server_address import without_credentials
from perl.run.files import write_text

FILE = "trackers.json"
_UNNAMED = "huggingface"
"""transformers' name of a project that nobody has named."""
_set_here: dict[str, str] = {}
"""Variables that were set here, for the training before this one; any other value is the user's."""
_opened: set[str] = set()
"""Runs of wandb that were opened here."""


class KeptRuns(TrainerCallback):
    """Names each tracker's run before transformers' callbacks open it; on the main process, and ahead of them."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        """Serves a trainer.

        Args:
            trainer: Whose callbacks write to the trackers.
        """
        self._callbacks = trainer.callback_handler.callbacks
        self.mlflow_run: str | None = None

    def on_train_begin(self, args: GRPOConfig, state: TrainerState, *_: object, **__: object) -> None:
        """Finds the runs that belong to this training, or names new ones, and keeps which they are.

        Raises:
            PerlError: MLflow's store cannot be reached.
        """
        trackers = set(args.report_to or []) & set(_NAMES)
        if not trackers or not state.is_world_process_zero:
            return
        of_a_recipe = getattr(args, "of_a_recipe", False)  # whose checkpoints lie in the run folder
        folder = Path(args.output_dir).parent if of_a_recipe else Path(args.output_dir)
        resumed = of_a_recipe or state.global_step > 0
        kept = _read(folder / FILE) if resumed and (folder / FILE).is_file() else {}
        name = args.run_name or folder.resolve().name
        project = args.project if args.project != _UNNAMED else None
        ids = {tracker: kept.get(tracker) or _NAMES[tracker](project, name) for tracker in sorted(trackers)}
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / FILE, json.dumps(kept | ids, indent=2) + "\n")
        # Each run's id is put where the tracker, or transformers' callback of it, looks for one.
        args.run_name = ids.get("trackio", name)
        if args.trackio_static_space_id is None:
            args.trackio_static_space_id = False  # else a push copies all metrics into a new Space
        _set("MLFLOW_RUN_ID", ids.get("mlflow"))
        self.mlflow_run = os.environ.get("MLFLOW_RUN_ID")
        if "wandb" in ids:
            _open_wandb(ids["wandb"], project, name)
        for callback in self._callbacks:
            if isinstance(callback, theirs.TensorBoardCallback) and "tensorboard" in ids:
                callback.logging_dir = os.environ.get("TENSORBOARD_LOGGING_DIR") or str(folder / ids["tensorboard"])
        _set("MLFLOW_MAX_LOG_PARAMS", "0" if "mlflow" in kept else None)  # MLflow takes parameters once


def log_scores(trainer: GRPOTrainer, folder: Path) -> None:
    """Writes the final scores of base and adapter to the trackers, as ``eval/final/TASK/avg@K/adapter``.

    Args:
        trainer: That has trained.
        folder: That holds ``results.json``; without that file nothing is written.
    """
    if not (folder / "results.json").is_file():
        return
    scores = {
        f"eval_final/{task.name}/avg@{score.k}/{who}": score.accuracy
        for task in read_results(folder).tasks
        for who, score in (("base", task.base), ("adapter", task.adapter))
        if score is not None
    }
    kinds = theirs.WandbCallback, theirs.MLflowCallback, theirs.TrackioCallback, theirs.TensorBoardCallback
    asked = ADDED_TRACKERS.keys() & set(named_trackers(trainer.args.report_to))
    kinds += tuple(function_at(ADDED_TRACKERS[name]) for name in asked)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, KeptRuns) and callback.mlflow_run is not None:
            os.environ["MLFLOW_RUN_ID"] = callback.mlflow_run  # MLflow removes it as it opens the run
        if isinstance(callback, kinds):
            try:
                callback.on_log(trainer.args, trainer.state, trainer.control, logs=dict(scores))
                if not isinstance(callback, theirs.WandbCallback):  # which would send the model once more
                    callback.on_train_end(trainer.args, trainer.state, trainer.control)
            except Exception as error:  # noqa: BLE001 (a tracker must not fail a trained adapter)
                warn("PRL343", "%s does not take the scores: %s", type(callback).__name__, error)


def _new_mlflow_run(project: str | None, name: str) -> str:
    """Makes a run in MLflow's store; transformers starts the one that MLFLOW_RUN_ID names."""
    import mlflow

    if mlflow.active_run() is not None:  # the user's
        return str(mlflow.active_run().info.run_id)
    # A server that does not answer is to be a line within seconds, not minutes of silence.
    for variable, seconds in (("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"), ("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")):
        os.environ.setdefault(variable, seconds)
    try:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or project
        found = mlflow.set_experiment(experiment) if experiment else None
        client = mlflow.MlflowClient()
        run = client.create_run(found.experiment_id if found else "0", run_name=name)
    except mlflow.exceptions.MlflowException as error:
        said = without_credentials(first_line(error))
        raise PerlError(f"mlflow takes no run: {said}", "report_to", "MLFLOW_TRACKING_URI, or leave it out") from None
    return str(run.info.run_id)


# For trackio the id is the run's name, for TensorBoard its folder.
_NAMES: dict[str, Callable[[str | None, str], str]] = {
    "mlflow": _new_mlflow_run,
    "tensorboard": lambda *_: f"tensorboard-{secrets.token_hex(3)}",
    "trackio": lambda _, name: f"{name}-{secrets.token_hex(3)}",
    "wandb": lambda *_: secrets.token_hex(4),
}


def _set(variable: str, value: str | None) -> None:
    """Sets a variable, or takes back what was set here; a value of the user's stays."""
    if os.environ.get(variable) not in (None, _set_here.pop(variable, None)):
        return
    os.environ.pop(variable, None)
    if value is not None:
        os.environ[variable] = _set_here[variable] = value


def _open_wandb(run_id: str, project: str | None, name: str) -> None:
    """Opens the run, which transformers then takes; one that a script has opened stays open."""
    import wandb

    if wandb.run is not None:
        if wandb.run.id not in _opened or wandb.run.id == run_id:
            return
        wandb.finish()  # of a training before this one
    given: dict[str, tuple[str, Any]] = {
        "WANDB_PROJECT": ("project", project or _UNNAMED),
        "WANDB_NAME": ("name", name),
        "WANDB_RUN_ID": ("id", run_id),
        "WANDB_RESUME": ("resume", "allow"),
    }
    opened = wandb.init(**dict(value for variable, value in given.items() if not os.environ.get(variable)))
    _opened.add(opened.id)


def _read(file: Path) -> dict[str, str]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {str(name): str(identity) for name, identity in found.items()}
    except (OSError, ValueError, AttributeError) as error:
        warn("PRL344", "%s: %s; trackers begin new runs", file, error)
        return {}
