"""Weights & Biases: one run of a training, its tables and scores.

Place -> wandb.init with the run's id; tables -> wandb.Table

A run that was logged offline has a folder for each start, all with one id: ``wandb sync`` sends them in the order of
their starts as one run. What was logged cannot be taken back, so a step that a resumed training repeats is left out.
"""

import os
import secrets
from collections.abc import Mapping
from typing import Any

import yaml
from transformers.integrations.integration_utils import WandbCallback

from perl.trainer.trackers.one_run import OneRun
from perl.trainer.trackers.place import Place, forget_after, known, last_logged, note
from perl.trainer.trackers.shown import shown_recipe
from perl.trainer.trackers.table import Table

_STEP = "train/global_step"  # as transformers calls it, and the axis of its curves
_SECONDS_TO_DISK = 0.2
_opened: set[str] = set()  # ids of this process's runs; any other open one is the user's


class WandbRun(OneRun, WandbCallback):
    """Logs into the run whose id is kept, unless the user has opened one."""

    tracker = "wandb"

    def open_run(self, place: Place) -> None:
        """Opens the run with ``wandb.init``; transformers then takes the one that is open."""
        _open(place)

    def rewind(self, place: Place, _: int) -> int:
        """Nothing can be taken back; a server says what it has, for a kill may have lost what was not sent yet."""
        import wandb

        if wandb.run is None or not _is_ours():
            return 0
        held, there = last_logged(place, self.tracker), wandb.run.summary.get(_STEP) if wandb.run.resumed else None
        if isinstance(there, int | float) and there < held:
            held = int(there)
            forget_after(place, self.tracker, held)
        return held


def write_table(_: Place, name: str, table: Table, step: int) -> None:
    """Logs a table at a step, if a run is open."""
    import wandb

    if wandb.run is not None:
        logged = wandb.Table(
            columns=list(table.columns), data=[list(row) for row in table.rows], allow_mixed_types=True
        )
        wandb.log({name: logged, _STEP: step})


def write_scores(place: Place, scores: Mapping[str, float], table: Table, step: int) -> None:
    """Puts scores into the run's summary and ends it."""
    import wandb

    _open(place)
    if wandb.run is not None:
        wandb.log({**scores, _STEP: step})
        if table.rows:
            write_table(place, "scores", table, step)
        wandb.run.summary.update(dict(scores))
        if _is_ours():
            wandb.finish()


def _open(place: Place) -> None:
    import wandb

    facts = known(place, WandbRun.tracker)
    if wandb.run is not None:
        if not _is_ours() or wandb.run.id == facts.get("id"):
            return
        wandb.finish()  # of a training before this one
    identity = facts.get("id") or secrets.token_hex(4)
    # What the environment says is not said here, where it would win.
    wanted: dict[str, Any] = {
        "WANDB_PROJECT": ("project", facts.get("project") or place.project or "huggingface"),
        "WANDB_NAME": ("name", place.name),
        "WANDB_RUN_ID": ("id", identity),
        "WANDB_RESUME": ("resume", "allow"),
    }
    given = dict(value for variable, value in wanted.items() if not os.environ.get(variable))
    if "id" in given:
        note(place, WandbRun.tracker, id=identity, project=given.get("project", os.environ.get("WANDB_PROJECT")))
    # Its usual 15 s of what was logged last are lost by a kill.
    run = wandb.init(**given, settings=wandb.Settings(x_transaction_log_flush_interval=_SECONDS_TO_DISK))
    _opened.add(run.id)
    if (recipe := _recipe(place)) is not None:
        run.config.update({"recipe": recipe}, allow_val_change=True)


def _is_ours() -> bool:
    import wandb

    return wandb.run is not None and wandb.run.id in _opened


def _recipe(place: Place) -> Any:  # noqa: ANN401 (YAML)
    text = shown_recipe(place.recipe)
    try:
        return yaml.safe_load(text) if text is not None else None
    except yaml.YAMLError:  # of a line that is not shown
        return text
