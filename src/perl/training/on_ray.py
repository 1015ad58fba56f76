"""A recipe on a Ray cluster: checked here, trained there, and brought home.

Recipe with engine.name: ray -> plan, cluster -> servers, processes -> run folder
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from perl import errors
from perl.errors import EXIT_DONE, InterruptedRunError, RecipeError, RunFolderError, raise_all
from perl.launch.start import ProcessFailedError, record_end
from perl.recipe import Recipe
from perl.recipe.beside import folders_beside
from perl.recipe.optional_packages import Package, missing_package
from perl.rollouts.vllm.version import check_version
from perl.run.devices import accelerator
from perl.run.files import write_text
from perl.run.folder import LOCK, Run, check_folder, in_use
from perl.run.progress import Progress, duration, progress
from perl.training.plan import Plan

# Where a run folder remembers what the run is called in Ray's storage.
_NAME = ".in-storage"

Source = str | Path | Mapping[str, Any] | Recipe


def train_on_ray(
    recipe: Recipe, plan: Plan, source: Source, overrides: Sequence[str], train: Callable[..., Any]
) -> Run:
    """Trains a recipe on the cluster that it names, or goes on with it there.

    Args:
        recipe: Checked.
        plan: Of it, made here.
        source: What the recipe was read from; each process reads it again.
        overrides: Likewise.
        train: :func:`perl.train`, which each process calls.

    Returns:
        The run, whose folder is here.

    Raises:
        PerlError: Whatever ends a run; the cluster, or a node of it, cannot be used.
    """
    raise_all(errors.MissingExtraError, [*missing_package("engine.name", Package(("ray",), "ray", "ray"), "ray")])
    from perl.launch.on_ray.cluster import check_nodes, connected
    from perl.launch.on_ray.driver import drive
    from perl.launch.on_ray.rollout_servers import PORT, ServerCommand, folder_in_memory
    from perl.launch.on_ray.room import check_room, gpus_of_server
    from perl.launch.on_ray.worker import Task

    folder, engine, servers = recipe.output_dir.absolute(), recipe.engine, recipe.rollout.started
    check_folder(recipe)
    if _is_done(folder):
        return Run.read(recipe.output_dir)
    storage = _storage(engine.storage)
    engine = engine.model_copy(update={"storage": storage})
    try:
        with _progress(plan.steps) as line, connected(engine) as cluster:
            line.waits_for = f"looking at {cluster.address}"
            check_room(cluster, engine, servers)
            cwd, seen = seen_by_nodes(source, folder, storage)
            beside = _beside(source, seen)
            shared = None if storage else folder
            check_nodes(cluster, seen, storage=storage, shared=shared, servers=servers, check_vllm=check_version)
            key, command = secrets.token_hex(16), None
            if servers is not None:
                gpus = gpus_of_server(cluster, servers)
                started = plan.server_command(PORT, on_cpu=gpus == 0, gpus=max(gpus, 1))
                command = ServerCommand(started, servers.python, gpus, key)
            with _held(folder, storage):
                task = Task(
                    train=train,
                    recipe=source.as_dict() if isinstance(source, Recipe) else source,
                    overrides=tuple(overrides),
                    beside=beside,
                    folder=str(folder),
                    cwd=cwd,
                    servers=0 if servers is None else servers.count,
                    in_memory=folder_in_memory(secrets.token_hex(4)),
                    key=key,
                    name=_name(folder, storage),
                    keeps=storage,
                )
                line.waits_for = _starting(engine.processes or 1, task.servers, cluster)
                outcome = drive(cluster, engine, task, command, line)
    except InterruptedRunError:
        record_end(folder, "interrupted")
        raise
    except ProcessFailedError as error:
        record_end(folder, "failed", str(error))
        raise
    if outcome.code != EXIT_DONE:
        raise outcome.error()
    return Run.read(recipe.output_dir)


def look_at_cluster(recipe: Recipe, source: Source) -> str:
    """What the cluster of a recipe is, in a line, after the checks of a run that write and reserve nothing.

    Args:
        recipe: Checked; it trains on Ray.
        source: What it was read from.

    Returns:
        The line; where the cluster cannot be reached from here, why.

    Raises:
        RecipeError: The cluster cannot hold the run, or a node of it has not what the run needs.
    """
    missing = [*missing_package("engine.name", Package(("ray",), "ray", "ray"), "ray")]
    if missing:
        return f"Ray: not looked at, {missing[0]}"
    from perl.launch.on_ray.address import LOCAL, of_this_machine
    from perl.launch.on_ray.cluster import Cluster, check_here, check_nodes, connected
    from perl.launch.on_ray.room import check_room

    engine, servers = recipe.engine, recipe.rollout.started
    address = of_this_machine() if engine.address in (None, "auto") else engine.address
    if address in (None, LOCAL):
        gpus = torch.accelerator.device_count() if accelerator() is not None else 0
        check_room(Cluster("this machine's Ray cluster", {}, gpus, os.cpu_count() or 1), engine, servers)
        if servers is not None:
            check_here(servers, check_version)
        return f"Ray: a cluster of this machine alone, which has {gpus} GPUs and {os.cpu_count()} cores"
    with ExitStack() as opened:
        try:
            cluster = opened.enter_context(connected(engine))
        except RecipeError as error:
            return f"Ray: not reached from here, {error.mistakes[0].message}"
        check_room(cluster, engine, servers)
        _, seen = seen_by_nodes(source, recipe.output_dir.absolute(), engine.storage)
        check_nodes(cluster, seen, storage=None, shared=None, servers=servers, check_vllm=check_version)
        nodes = f"{len(cluster.nodes)} nodes" if len(cluster.nodes) > 1 else "one node"
        return f"Ray: {cluster.address} has {nodes}, {cluster.gpus} GPUs and {cluster.cpus} cores; the run fits"


def _name(folder: Path, storage: str | None) -> str:
    """Of the run in the storage, where others may have runs of the same name; the run folder remembers it."""
    if storage is None:
        return folder.name
    remembered = folder / _NAME
    if not remembered.is_file():
        write_text(remembered, f"{folder.name}-{secrets.token_hex(4)}\n")
    return remembered.read_text(encoding="utf-8").strip()


class _Line:
    """The driver's one line of progress, and what the processes say."""

    def __init__(self, shown: Progress) -> None:
        """Shows what is waited for until the first step is done."""
        self._shown, self._text, self._begin = shown, "", time.monotonic()
        self.waits_for = "reaching the Ray cluster"
        shown.note = self._note

    def _note(self) -> str:
        if self._text:
            return self._text
        waited = duration(time.monotonic() - self._begin)
        return f"{self.waits_for}, {waited}" if self._shown.silent else self.waits_for  # a line of a log has the time

    def __call__(self, news: Any) -> None:  # noqa: ANN401 (News of a package that may be missing)
        for line in news.lines:
            self._shown.say(line)
        if news.starts:
            self.waits_for = "the processes run, the first step is to come"
        self._text = news.text
        self._shown.update(max(0, news.step - self._shown.done))


@contextmanager
def _progress(steps: int) -> Iterator[_Line]:
    with progress(steps, "training", unit="steps") as shown:
        yield _Line(shown)


def _starting(processes: int, servers: int, cluster: Any) -> str:  # noqa: ANN401 (of a package that may be missing)
    parts = [f"{processes} process{'es' if processes > 1 else ''}"]
    parts += [f"{servers} server{'s' if servers > 1 else ''}"] if servers else []
    return f"starting {' and '.join(parts)} on {cluster.address}"


@contextmanager
def _held(folder: Path, storage: str | None) -> Iterator[None]:
    """Holds the run folder where no process does, since each has one of its own."""
    if storage is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise in_use(folder) from None
    try:
        yield
    finally:
        lock.release()


def _is_done(folder: Path) -> bool:
    with suppress(RunFolderError):
        return Run.read(folder).status == "done"
    return False


def _storage(written: str | None) -> str | None:
    """A folder of this machine by its whole path; a URI as it is."""
    if written is None or "://" in written:
        return written
    return str(Path(written).expanduser().absolute())


def seen_by_nodes(source: Source, folder: Path, storage: str | None) -> tuple[str | None, list[Path]]:
    """In which folder each process works, and what each node must have for it.

    A job that was submitted with a working directory has a copy of it on each node, where Ray puts the processes.

    Raises:
        RecipeError: The run folder would go with that copy.
    """
    import ray

    here = Path.cwd()
    if ray.get_runtime_context().runtime_env.get("working_dir"):
        if storage is None and folder.is_relative_to(here):
            hint = "--output with a whole path that all nodes share, or engine.storage"
            what = "the run folder lies in Ray's copy of the working directory, which goes with the job"
            raise RecipeError(what, "train.output_dir", hint)
        return None, []
    file = Path(source) if isinstance(source, str | Path) else None
    return str(here), [here, *([file.absolute()] if file is not None and file.is_file() else [])]


def _beside(source: Source, seen: list[Path]) -> list[str]:
    """Folders of modules that a recipe names which the processes get without its file; each node must have them.

    Args:
        source: Of the recipe.
        seen: What each node must have, to which they are added; empty: nodes have a copy of the current folder.
    """
    if not isinstance(source, Recipe):
        return []
    folders = [Path(folder) for folder in folders_beside(source.written_at)]
    if seen:
        seen += folders
        return [str(folder) for folder in folders]
    here = Path.cwd()
    return [str(folder.relative_to(here) if folder.is_relative_to(here) else folder) for folder in folders]
