"""A recipe on a Ray cluster: checked here, trained there, and brought home.

Recipe with engine.name: ray -> plan, cluster -> servers, processes -> run folder
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from perl import errors
from perl.errors import EXIT_DONE, InterruptedRunError, RecipeError, RunFolderError, raise_all
from perl.hub.stores import FileStore, store_at
from perl.launch.start import ProcessFailedError, record_end
from perl.recipe import Recipe
from perl.recipe.layers import folders_beside
from perl.recipe.optional_packages import RequiredPackage, missing_package
from perl.run.files import write_text
from perl.run.folder import STORED_AS, Run, check_folder, held, in_use, name_in_storage
from perl.run.progress import Progress, progress
from perl.training.plan import Plan
from perl.training.stored_run import RESUME_FROM, bring

# In which Ray lists the checkpoints of a run.
_OF_RAY = "checkpoint_manager_snapshot.json"

Source = str | Path | Mapping[str, Any] | Recipe


def train_on_ray(
    recipe: Recipe,
    plan: Plan,
    source: Source,
    overrides: Sequence[str],
    train: Callable[..., Any],
    resume_from: str | None,
) -> Run:
    """Trains a recipe on the cluster that it names, or goes on with it there.

    Args:
        recipe: Checked.
        plan: Of it, made here.
        source: What the recipe was read from; each process reads it again.
        overrides: Likewise.
        train: :func:`perl.train`, which each process calls.
        resume_from: Where another machine has kept the run; with Ray's storage, its folder there.

    Returns:
        The run, whose folder is here.

    Raises:
        PerlError: Whatever ends a run; the cluster, or a node of it, cannot be used.
    """
    raise_all(
        errors.MissingExtraError, [*missing_package("engine.name", RequiredPackage(("ray",), "ray", "ray"), "ray")]
    )
    from perl.launch.on_ray.cluster import check_room, connected, gpus_of_server
    from perl.launch.on_ray.driver import drive
    from perl.launch.on_ray.rollout_servers import PORT, ServerCommand, folder_in_memory
    from perl.launch.on_ray.worker import ProcessTask

    folder, engine, servers = recipe.output_dir.absolute(), recipe.engine, recipe.rollout.started
    check_folder(recipe)
    with suppress(RunFolderError):
        if Run.read(folder).status == "done":
            return Run.read(recipe.output_dir)
    storage = engine.storage
    if storage is not None and "://" not in storage:
        storage = str(Path(storage).expanduser().absolute())
    if resume_from is not None:
        if storage is None:
            bring(resume_from, recipe)
        else:
            _take_name(resume_from, storage, folder)
    engine = engine.model_copy(update={"storage": storage})
    try:
        with progress(plan.steps, "training", unit="steps") as shown, connected(engine) as cluster:
            shown.note = lambda: f"starting processes on {cluster.address}"
            check_room(cluster, engine, servers)
            in_job = _is_job(folder, storage)
            key, command = secrets.token_hex(16), None
            if servers is not None:
                gpus = gpus_of_server(cluster, servers)
                started = plan.server_command(PORT, on_cpu=gpus == 0, gpus=max(gpus, 1))
                command = ServerCommand(started, servers.python, gpus, key)
            with held(folder, in_use(folder)) if storage else nullcontext():  # where no process does
                name = name_in_storage(folder) if storage else folder.name
                task = ProcessTask(
                    train=train,
                    recipe=source.as_dict() if isinstance(source, Recipe) else source,
                    overrides=tuple(overrides),
                    beside=_beside(source, in_job=in_job),
                    folder=str(folder),
                    cwd=None if in_job else str(Path.cwd()),
                    servers=0 if servers is None else servers.count,
                    in_memory=folder_in_memory(secrets.token_hex(4)),
                    key=key,
                    name=name,
                    keeps=storage,
                )
                outcome = drive(cluster, engine, task, command, partial(_show, shown))
    except InterruptedRunError:
        record_end(folder, "interrupted")
        raise
    except ProcessFailedError as error:
        record_end(folder, "failed", str(error))
        raise
    if outcome.exit_code != EXIT_DONE:
        raise outcome.error()
    return Run.read(recipe.output_dir)


def _show(shown: Progress, updates: Any) -> None:  # noqa: ANN401 (Updates of a package that may be missing)
    """The driver's one line of progress, and what the processes say."""
    for line in updates.lines:
        shown.say(line)
    if updates.starts:
        shown.note = lambda: updates.text or "the processes run, the first step is to come"
    shown.update(max(0, updates.step - shown.done))


def _take_name(resume_from: str, storage: str, folder: Path) -> None:
    """Has the run go on as the one that Ray's storage has under a name.

    Raises:
        RunFolderError: The storage has no such run, or the folder holds another one.
    """
    store = store_at(resume_from.rstrip("/"), RESUME_FROM)
    place, _, name = store.name.rpartition("/")
    if place != storage.rstrip("/") or not (isinstance(store, FileStore) and store.holds(_OF_RAY)):
        hint = f"{storage}/NAME, a run that engine.storage keeps there"
        raise RunFolderError("holds no checkpoint of a run on Ray", resume_from, hint)
    own = folder / STORED_AS
    if own.is_file() and own.read_text(encoding="utf-8").strip() != name:
        raise RunFolderError(f"holds another run than {name}", str(folder), "choose another with --output")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(own, f"{name}\n")


def _is_job(folder: Path, storage: str | None) -> bool:
    """Whether this is a job that was submitted with a working directory, which each node has a copy of.

    Raises:
        RecipeError: The run folder would go with that copy.
    """
    import ray

    if not ray.get_runtime_context().runtime_env.get("working_dir"):
        return False
    if storage is None and folder.is_relative_to(Path.cwd()):
        hint = "--output with a whole path that all nodes share, or engine.storage"
        what = "the run folder lies in Ray's copy of the working directory, which goes with the job"
        raise RecipeError(what, "train.output_dir", hint)
    return True


def _beside(source: Source, *, in_job: bool) -> list[str]:
    """Folders of modules that a recipe names which the processes get without its file, as the processes find them."""
    if not isinstance(source, Recipe):
        return []
    here = Path.cwd()
    folders = [Path(folder) for folder in folders_beside(source.written_at)]
    return [str(one.relative_to(here) if in_job and one.is_relative_to(here) else one) for one in folders]
