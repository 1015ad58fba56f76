"""The cells of a study as tasks of a Ray cluster: sent there with what is done of them, and brought home.

Job -> files in Ray's object store -> a process on a node -> run folder here, how it ended
"""

import json
import logging
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.errors import EXIT_FAILED, EXIT_INTERRUPTED, MissingExtraError, PerlError, RecipeError, first_line, raise_all
from perl.recipe.optional_packages import Package, missing_package
from perl.recipe.sections import EngineSection
from perl.training.on_ray import seen_by_nodes
from perl.training.studies.nursery import Job

if TYPE_CHECKING:
    from perl.launch.on_ray.cells import End

# A cell in a process of its own, which is told its parent and its run folder at last. It ends with its parent from
# before what takes seconds to import.
_PROGRAM = (
    "import json, sys; from perl.training.studies.nursery import alone, end_with; "
    f"end_with(int(sys.argv[2])) or sys.exit({EXIT_INTERRUPTED}); "
    "from perl.cli.commands import run; sys.exit(alone(run, *json.loads(sys.argv[1]), sys.argv[3]))"
)
logger = logging.getLogger("perl")
_NO_MEMORY = "its node had too little memory left"
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
    """Starts cells on a cluster; see :class:`perl.training.studies.crew.Nursery`.

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
        self._lock, self._stopped = threading.Lock(), False
        self._out: dict[str, Any] = {}  # what comes of each cell
        self._placed: set[str] = set()  # those of which a node has begun

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
        with self._lock:
            self._out[job.name] = coming
            self._placed.discard(job.name)
            stopped = self._stopped
        if stopped:
            self._take_back(job.name)
        threading.Thread(target=self._bring, args=(job, coming), name=f"perl-{job.name}", daemon=True).start()

    def stop(self) -> None:
        """Asks all cells to stop after their step, and takes back those for which no node had room yet."""
        threading.Thread(target=self._stop, daemon=True).start()  # amid any call of Ray

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

    def _stop(self) -> None:
        self._desk.stop.remote()
        with self._lock:
            self._stopped = True
            names = list(self._out)
        left = [name for name in names if not self._take_back(name)]
        if left:
            logger.info("waits until %d cells have a checkpoint: %s", len(left), ", ".join(left))

    def _take_back(self, name: str) -> bool:
        """Cancels a cell that no node has begun; whether it was one."""
        import ray
        from ray.exceptions import RayError

        with self._lock:
            if name in self._placed or name not in self._out:
                return False
            coming = self._out.pop(name)
        with suppress(RayError):
            ray.cancel(coming)
        self._ends.put({"name": name, "code": EXIT_INTERRUPTED, "cpu": 0.0, "peak": 0})
        return True

    def _place(self, name: str) -> None:
        with self._lock:
            self._placed.add(name)

    def _bring(self, job: Job, coming: Any) -> None:  # noqa: ANN401 (a generator of Ray's references)
        report: dict[str, Any] = {"name": job.name, "code": EXIT_FAILED, "cpu": 0.0, "peak": 0}
        lost = ""
        try:
            ended = _brought(job, coming, lambda: self._place(job.name))
            report |= {"code": ended.code, "cpu": ended.cpu, "peak": ended.peak}
            if ended.lost:
                lost = "its node heard nothing of the study for minutes"
        except Exception as error:  # noqa: BLE001 (whatever ends a cell on a cluster ends this one alone)
            lost = _how_lost(error)
        with self._lock:
            if self._out.get(job.name) is not coming:
                return  # it was taken back
            del self._out[job.name]
        if lost:
            report["lost"] = lost != _NO_MEMORY  # which it would want elsewhere too
            with suppress(OSError), Path(job.log).open("a", encoding="utf-8") as log:
                log.write(f"error: the cell was lost on the Ray cluster: {lost}\n")
        self._ends.put(report)


def _how_lost(error: Exception) -> str:
    from ray.exceptions import NodeDiedError, OutOfMemoryError, WorkerCrashedError

    how: dict[type[Exception], str] = {
        NodeDiedError: "its node is gone",
        OutOfMemoryError: _NO_MEMORY,
        WorkerCrashedError: "what waited for it on its node was killed",
    }
    known = next((text for kind, text in how.items() if isinstance(error, kind)), None)
    return known or f"{type(error).__name__}: {first_line(error)}"


def _brought(job: Job, coming: Any, begun: Callable[[], None]) -> "End":  # noqa: ANN401 (a generator of references)
    """Takes what comes of a cell; its run folder is the new one or the one before, never a part of one."""
    import ray

    from perl.launch.on_ray.cells import BEGUN, ENDED, PIECE, PRINTED, add_piece

    folder, incoming, before = Path(job.output), _beside(job, _INCOMING), _beside(job, _BEFORE)
    shutil.rmtree(incoming, ignore_errors=True)
    ended: End | None = None
    for reference in coming:
        kind, *what = ray.get(reference)
        if kind == BEGUN:
            begun()
        elif kind == PIECE:
            add_piece(incoming, *what)
        elif kind == PRINTED:
            with Path(job.log).open("ab") as log:
                log.write(what[0])
        elif kind == ENDED:
            ended = what[0]
    if ended is None:
        raise PerlError("it ended without a word")
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
