"""Trackio: one run of a training, its tables and scores.

Place -> trackio.init with the run's name; tables -> trackio.Table

On this machine a run forgets the steps that a resumed training repeats; in a Space or on a server it cannot, and they
are left out. Nothing goes to a Space that the user has not named.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import TrainerState
from transformers.integrations.integration_utils import TrackioCallback
from trl import GRPOConfig

from perl.trainer.trackers.one_run import OneRun
from perl.trainer.trackers.place import Place, forget_after, known, last_logged, note, place_of
from perl.trainer.trackers.shown import ShownArguments, shown_recipe
from perl.trainer.trackers.table import Table

_STEP = "train/global_step"  # as transformers calls it


class TrackioRun(OneRun, TrackioCallback):
    """Logs into the run whose name is kept."""

    tracker = "trackio"

    def open_run(self, place: Place) -> None:
        """Chooses the run's name, under which transformers opens it."""
        _name(place)

    def on_train_begin(self, args: GRPOConfig, *given: Any, **more: Any) -> None:  # noqa: ANN401 (transformers')
        """Extends ours: a run in a Space is not one of this machine."""
        self._space_id = args.trackio_space_id
        super().on_train_begin(args, *given, **more)

    def rewind(self, place: Place, step: int) -> int:
        """Deletes what this machine has after a step."""
        facts = known(place, self.tracker)
        if _is_remote(self._space_id):
            return last_logged(place, self.tracker)
        if facts.get("logged"):
            _delete_after(facts["project"], facts["name"], step)
            forget_after(place, self.tracker, step)
        return step

    def setup(self, args: Any, state: TrainerState, model: Any, **_: Any) -> None:  # noqa: ANN401 (transformers')
        """Replaces transformers' setup, whose settings come after trackio has stored what the run was opened with."""
        if state.is_world_process_zero:
            config: dict[str, Any] = getattr(getattr(model, "config", None), "to_dict", dict)()
            recipe = shown_recipe(place_of(args).recipe)
            config |= {**args.to_dict(), **({"recipe": recipe} if recipe is not None else {})}
            with _printing_aside():  # what trackio prints is no result of a command
                self._trackio.init(
                    project=args.project,
                    name=args.run_name,
                    space_id=args.trackio_space_id,
                    resume="allow",
                    private=args.hub_private_repo,
                    bucket_id=args.trackio_bucket_id,
                    config=_without_its_own(config),
                )
            self._space_id = self._trackio.context_vars.current_space_id.get()
        self._initialized = True

    def on_train_end(self, *given: Any, **more: Any) -> None:  # noqa: ANN401 (transformers')
        """Extends transformers' end, which prints too."""
        with _printing_aside():
            super().on_train_end(*given, **more)

    def on_push_begin(self, args: GRPOConfig, *given: Any, **more: Any) -> None:  # noqa: ANN401 (transformers')
        """Replaces transformers' copy of all metrics into a new Space: only into one that was asked for."""
        if args.trackio_static_space_id:
            super().on_push_begin(args, *given, **more)

    def _shown(self, args: GRPOConfig, place: Place) -> Any:  # noqa: ANN401 (stands for arguments)
        facts = known(place, self.tracker)
        named = {name: facts[key] for name, key in (("run_name", "name"), ("project", "project")) if key in facts}
        return ShownArguments(args, **named)


def write_table(_: Place, name: str, table: Table, step: int) -> None:
    """Logs a table at a step, if a run is open."""
    import trackio

    if trackio.context_vars.current_run.get() is not None:
        rows = trackio.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        trackio.log({name: rows, _STEP: step})


def write_scores(place: Place, scores: Mapping[str, float], table: Table, step: int) -> None:
    """Logs scores and their table, and ends the run."""
    import trackio

    with _printing_aside():
        if trackio.context_vars.current_run.get() is None:
            project, name = _name(place)
            trackio.init(project=project, name=name, resume="allow", config=_stored_config(project, name))
        if table.rows:
            write_table(place, "scores", table, step)
        trackio.log({**scores, _STEP: step})
        trackio.finish()


def _name(place: Place) -> tuple[str, str]:
    """Project and name of the run: a new one takes a name that no other run of the project has."""
    from trackio.sqlite_storage import SQLiteStorage

    facts = known(place, TrackioRun.tracker)
    if "name" in facts:
        return facts["project"], facts["name"]
    project = os.environ.get("TRACKIO_PROJECT") or place.project or "huggingface"
    taken = set(SQLiteStorage.get_runs(project))
    name = next(name for name in _numbered(place.name) if name not in taken)
    note(place, TrackioRun.tracker, project=project, name=name)
    return project, name


def _stored_config(project: str, name: str) -> dict[str, Any]:
    """The settings of a run, which trackio replaces by those that it is opened with."""
    from trackio.sqlite_storage import SQLiteStorage

    return _without_its_own(SQLiteStorage.get_run_config(project, name) or {})


def _without_its_own(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if not name.startswith("_")}  # which trackio refuses


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}-{number}"
        number += 1


def _is_remote(space: str | None) -> bool:
    return bool(space or os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"))


def _delete_after(project: str, name: str, step: int) -> None:
    """Deletes a run's rows after a step from trackio's data base, those that name no step (TRL's timings) too."""
    from trackio.sqlite_storage import SQLiteStorage

    file = SQLiteStorage.get_project_db_path(project)
    if not file.exists():
        return
    with SQLiteStorage._get_process_lock(project), SQLiteStorage._get_connection(file) as connection:
        rows = connection.execute("SELECT id, metrics FROM metrics WHERE run_name = ?", (name,)).fetchall()
        kept = max((row["id"] for row in rows if 0 < _step_of(row["metrics"]) <= step), default=-1)
        connection.execute("DELETE FROM metrics WHERE run_name = ? AND id > ?", (name, kept))
        connection.commit()


def _step_of(metrics: str | bytes) -> float:
    found = json.loads(metrics).get(_STEP, 0)
    return found if isinstance(found, int | float) else 0


@contextlib.contextmanager
def _printing_aside() -> Iterator[None]:
    with contextlib.redirect_stdout(sys.stderr):
        yield
