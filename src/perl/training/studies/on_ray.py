"""The cells of a study as tasks of a Ray cluster: sent there with what is done of them, and brought home.

Job -> files in Ray's object store -> a process on a node -> run folder here, how it ended
"""

import json
import queue
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perl.errors import EXIT_FAILED, MissingExtraError, PerlError, RecipeError, first_line, raise_all
from perl.recipe.optional_packages import Package, missing_package
from perl.recipe.sections import EngineSection
from perl.training.on_ray import seen_by_nodes
from perl.training.studies.nursery import Job

# A cell in a process of its own, which is told its run folder at last.
_PROGRAM = (
    "import json, sys; from perl.cli.commands import run; from perl.training.studies.nursery import alone; "
    "sys.exit(alone(run, *json.loads(sys.argv[1]), sys.argv[2]))"
)
_INCOMING, _BEFORE = ".incoming-", ".before-"


@dataclass(frozen=True)
class OnRay:
    """What cells of a study need of a cluster.

    Attributes:
        address: Of the cluster: HOST:PORT, auto or local.
        threads: CPU threads of a process.
        processes: Of a cell.
        on_cpu: No cell trains on a GPU.
    """

    address: str
    threads: int = 1
    processes: int = 1
    on_cpu: bool = True


@contextmanager
def cells_on_ray(how: OnRay, recipe: str, folder: Path) -> Iterator["RayCells"]:
    """Inside, cells train on the cluster that a study names.

    Args:
        how: Where, and what a cell takes.
        recipe: As ``perl train`` takes it.
        folder: Of the study.

    Raises:
        MissingExtraError: Ray is absent.
        RecipeError: The cluster does not answer, a node of it has not what cells need, or none has room for a cell.
    """
    raise_all(MissingExtraError, [*missing_package("ray", Package(("ray",), "ray", "ray"), "ray")])
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from perl.launch.on_ray.cluster import check_nodes, connected
    from perl.launch.on_ray.desk import Desk

    for name in ("cells", "logs"):
        (folder / name).mkdir(exist_ok=True)
    with connected(EngineSection(name="ray", address=how.address)) as cluster:
        gpus = how.processes if cluster.gpus and not how.on_cpu else 0
        cores = how.threads * how.processes
        if not any(of >= gpus and have >= cores for of, have in cluster.sizes.values()):
            what = f"a cell of {cores} threads" + (f" and {gpus} GPUs" if gpus else "")
            raise RecipeError(f"{what} fits on no node of {cluster.address}", "ray", "fewer threads")
        # What cells write is brought home, so that nodes need the recipe alone.
        cwd, seen = seen_by_nodes(recipe, folder.absolute(), "brought home")
        check_nodes(cluster, seen, storage=None, shared=None)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        desk = ray.remote(Desk).options(num_cpus=0, max_concurrency=64, scheduling_strategy=here).remote()
        yield RayCells(desk, cwd, how.threads, {"num_cpus": cores, "num_gpus": gpus})


class RayCells:
    """Starts cells on a cluster; see :class:`perl.training.studies.carry_out.Nursery`.

    Attributes:
        base: None: each loads its own.
    """

    def __init__(self, desk: Any, cwd: str | None, threads: int, takes: dict[str, Any]) -> None:  # noqa: ANN401 (of Ray)
        """Takes what every cell needs.

        Args:
            desk: Where cells hear that the study stops.
            cwd: In which relative paths are meant; None: where Ray puts a task.
            threads: CPU threads of a cell.
            takes: What Ray reserves for it.
        """
        self.base: Path | None = None
        self._desk, self._cwd, self._threads, self._takes = desk, cwd, threads, takes
        self._ends: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()  # which a signal may fill

    def begin(self, job: Job) -> None:
        """Sends a cell."""
        import ray

        from perl.launch.on_ray.cells import RemoteCell, pieces, train_cell

        folder, before = Path(job.output), _beside(job, _BEFORE)
        if before.exists() and not folder.exists():  # a kill came between the two
            before.rename(folder)
        files: dict[str, list[Any]] = {}
        for name, content in pieces(folder):
            files.setdefault(name, []).append(ray.put(content))
        program = ("-P", "-c", _PROGRAM, json.dumps([list(job.arguments), job.until]))
        cell = RemoteCell(folder.name, program, files, self._threads, self._cwd)
        # Ray would start it again elsewhere, from what it was sent; the study does that, from what is here.
        how = self._takes | {"scheduling_strategy": "SPREAD"}
        task = ray.remote(train_cell).options(**how, max_retries=0, num_returns="streaming")
        coming = task.remote(cell, self._desk)
        threading.Thread(target=self._bring, args=(job, coming), name=f"perl-{job.name}", daemon=True).start()

    def stop(self) -> None:
        """Asks all cells to stop after their step."""
        threading.Thread(target=self._desk.stop.remote, daemon=True).start()  # amid any call of Ray

    def end(self) -> None:
        """Waits for none of them any more."""
        self._ends.put(None)

    def next(self) -> dict[str, Any]:
        """The next cell that ends.

        Raises:
            PerlError: They were given up.
        """
        report = self._ends.get()
        if report is None:
            raise PerlError("the cells on the Ray cluster were given up", hint="the same command goes on")
        return report

    def _bring(self, job: Job, coming: Any) -> None:  # noqa: ANN401 (a generator of Ray's references)
        report = {"name": job.name, "code": EXIT_FAILED, "cpu": 0.0, "peak": 0}
        try:
            report |= _brought(job, coming)
        except Exception as error:  # noqa: BLE001 (whatever ends a cell on a cluster ends this one alone)
            with suppress(OSError), Path(job.log).open("a", encoding="utf-8") as log:
                log.write(f"error: the cell was lost on the Ray cluster: {_how_lost(error)}\n")
        self._ends.put(report)


def _how_lost(error: Exception) -> str:
    from ray.exceptions import NodeDiedError, OutOfMemoryError, WorkerCrashedError

    how: dict[type[Exception], str] = {
        NodeDiedError: "its node is gone",
        OutOfMemoryError: "its node had too little memory left",
        WorkerCrashedError: "what waited for it on its node was killed",
    }
    known = next((text for kind, text in how.items() if isinstance(error, kind)), None)
    return known or f"{type(error).__name__}: {first_line(error)}"


def _brought(job: Job, coming: Any) -> dict[str, Any]:  # noqa: ANN401 (a generator of Ray's references)
    """Takes what comes of a cell; its run folder is the new one or the one before, never a part of one."""
    import ray

    from perl.launch.on_ray.cells import ENDED, PIECE, PRINTED, add_piece

    folder, incoming, before = Path(job.output), _beside(job, _INCOMING), _beside(job, _BEFORE)
    shutil.rmtree(incoming, ignore_errors=True)
    ended: dict[str, Any] = {}
    for reference in coming:
        kind, *what = ray.get(reference)
        if kind == PIECE:
            add_piece(incoming, *what)
        elif kind == PRINTED:
            with Path(job.log).open("ab") as log:
                log.write(what[0])
        elif kind == ENDED:
            ended = dict(zip(("code", "cpu", "peak"), what, strict=True))
    if incoming.exists():
        shutil.rmtree(before, ignore_errors=True)
        if folder.exists():
            folder.rename(before)
        incoming.rename(folder)
        shutil.rmtree(before, ignore_errors=True)
    return ended


def _beside(job: Job, prefix: str) -> Path:
    folder = Path(job.output)
    return folder.with_name(f"{prefix}{folder.name}")
