"""A run on a Ray cluster as its driver sees it: everything checked, started, watched over and brought home.

Task, servers -> Ray Train's workers, servers' actors -> Outcome

The driver is the process of ``perl train``, on the head node or wherever ``ray job submit`` puts it. Who ends it ends
the run; the same command goes on.
"""

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.train import (
    CheckpointConfig,
    FailureConfig,
    LoggingConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from perl.errors import InterruptedRunError, first_line
from perl.launch.on_ray.cluster import Cluster
from perl.launch.on_ray.desk import Desk, News
from perl.launch.on_ray.own_cluster import keep_logs
from perl.launch.on_ray.rollout_servers import DESK, ServerCommand, started_servers
from perl.launch.on_ray.room import uses_gpus
from perl.launch.on_ray.worker import Outcome, Task, decided, work
from perl.launch.start import ProcessFailedError
from perl.launch.together import goes_on
from perl.launch.watch import GRACE_SECONDS
from perl.recipe.sections import EngineSection
from perl.run.host import handled
from perl.run.warned import warn

RESTARTS = 3
"""Failures after which the processes are started again, unless a recipe says how many."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_SECONDS = 0.5
# For the others to end too once one process has ended for good; by then each has heard of it or has ended itself.
_SECONDS_TO_END = GRACE_SECONDS + 12.0
_STATE, _LOGS = ".ray", "ray-logs"
# Ray keeps the newest and, while that is written, the one before.
_KEPT = 2


@dataclass
class _Signals:
    """What this process was sent: the first ends the run after a step, if one has begun, the second at once."""

    count: int = 0

    def take(self, number: int, _frame: FrameType | None = None) -> None:
        if number == signal.SIGHUP and self.count:
            return  # a terminal that closes after Ctrl-C asks for no more
        self.count += 1


def drive(
    cluster: Cluster, engine: EngineSection, task: Task, command: ServerCommand | None, show: Callable[[News], None]
) -> Outcome:
    """Starts the servers and the processes, and waits for their end.

    Args:
        cluster: That was reached.
        engine: Of the recipe.
        task: Of each process.
        command: How a server is started; None: none is.
        show: Given what there is to show, twice a second.

    Returns:
        How the run has ended, in order.

    Raises:
        InterruptedRunError: The second signal came.
        ProcessFailedError: The processes failed more often than they are started again.
    """
    signals = _Signals()
    with contextlib.ExitStack() as opened:
        opened.enter_context(handled(_SIGNALS, signals.take))
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        how = {"name": DESK, "num_cpus": 0, "max_concurrency": 16, "scheduling_strategy": here}
        desk: Any = ray.remote(Desk).options(**how).remote()
        if command is not None:
            opened.enter_context(started_servers(task.servers, command, task.in_memory))
        trainer = opened.enter_context(_trainer(cluster, engine, task))
        try:
            ended = _watched(trainer, desk, signals, show, patient=not cluster.let_go)
        finally:
            bring_home(task)
        return _outcome(ended, _ends(desk), Path(task.folder), cluster)


def _watched(
    trainer: TorchTrainer,
    desk: Any,  # noqa: ANN401 (a handle of Ray)
    signals: _Signals,
    show: Callable[[News], None],
    *,
    patient: bool,
) -> Any:  # noqa: ANN401 (Ray's result, or what it raised; None: processes have ended for good, as the desk knows)
    """Runs the training in a thread, while this one listens to signals and shows how far it is.

    Where one process has ended for good and others did not hear of it, Ray starts all of them again to learn the same:
    that is waited for only if nothing else would end them.
    """
    ended: list[Any] = []

    def fit() -> None:
        try:
            ended.append(trainer.fit())
        except BaseException as error:  # noqa: BLE001 (raised again below)
            ended.append(error)

    thread = threading.Thread(target=fit, name="perl-ray-train", daemon=True)
    thread.start()
    told, starts, first_end = 0, 0, 0.0
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        if signals.count > told:
            told = signals.count
            if told > 1 or not starts:  # nothing is lost of a run whose processes have not started
                return InterruptedRunError("interrupted" + (", the step in hand is lost" if starts else ""))
            _say("stopping after this step, with a checkpoint (again: stop now and lose the step)")
            desk.stop.remote()
        with contextlib.suppress(RayError):
            news: News = ray.get(desk.news.remote(), timeout=10 * _LOOK_SECONDS)
            show(news)
            starts = news.starts
            first_end = first_end or (time.monotonic() if news.ends else 0.0)
        if first_end and not patient and time.monotonic() > first_end + _SECONDS_TO_END:
            return None
    with contextlib.suppress(RayError):  # what was said while it ended
        show(ray.get(desk.news.remote(), timeout=10 * _LOOK_SECONDS))
    return ended[0]


def _ends(desk: Any) -> dict[int, Outcome]:  # noqa: ANN401 (a handle of Ray)
    """How processes have ended that need not be started again."""
    with contextlib.suppress(RayError):
        found: dict[int, Outcome] = ray.get(desk.ends.remote(), timeout=10 * _LOOK_SECONDS)
        return found
    return {}


def _outcome(
    ended: Any,  # noqa: ANN401 (Ray's result, or what ended it)
    ends: Mapping[int, Outcome],
    folder: Path,
    cluster: Cluster,
) -> Outcome:
    if isinstance(ended, InterruptedRunError):
        raise InterruptedRunError(ended.mistakes[0].message, hint=goes_on(folder))
    given_up = ended is None or isinstance(ended, TrainingFailedError)
    if ends and (given_up or getattr(ended, "return_value", Outcome()).lost):
        return decided(ends)
    if isinstance(ended, TrainingFailedError):
        logs = keep_logs(Path(cluster.logs), folder / _LOGS) if cluster.own else f"{cluster.logs} of its node"
        hint = f"{goes_on(folder)}; what it printed is in {logs}"
        raise ProcessFailedError(f"failed too often: {_cause(ended)}", hint=hint)
    if ended is None or isinstance(ended, RayError):
        what = first_line(ended) if ended else "what its processes have said is lost"
        raise ProcessFailedError(f"the Ray cluster is gone: {what}", hint=goes_on(folder))
    if isinstance(ended, BaseException):
        raise ended
    outcome: Outcome = ended.return_value
    return outcome


def _cause(error: TrainingFailedError) -> str:
    """The errors of the workers; where some were lost, those, since the others fail for want of them."""
    failures = dict(sorted(getattr(error, "worker_failures", {}).items()))
    beneath = {rank: getattr(failure, "health_check_failure", failure) for rank, failure in failures.items()}
    lost = {rank: _how_lost(failure) for rank, failure in beneath.items() if isinstance(failure, RayActorError)}
    others = [f"rank {rank}: {_last_line(failure)}" for rank, failure in failures.items()]
    lines = [f"rank {rank} {how}" for rank, how in lost.items()] or others
    return "; ".join(lines[:3]) or first_line(getattr(error, "controller_failure", error))[:500]


def _how_lost(failure: RayActorError) -> str:
    if "OUT_OF_MEMORY" in str(failure):
        return "was ended by Ray, since its node had too little memory left"
    if "NODE_DIED" in str(failure) or "node was terminated" in str(failure):
        return "was on a node that is gone"
    return "ended without a word, as a process does that is killed or calls os._exit"


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1][:500] if lines else type(error).__name__


@contextlib.contextmanager
def _trainer(cluster: Cluster, engine: EngineSection, task: Task) -> Iterator[TorchTrainer]:
    """Ray Train's trainer; what it writes of itself where no storage is named goes with the block."""
    on_gpus = uses_gpus(cluster, engine)
    folder = Path(task.folder).resolve()
    state = engine.storage or str(folder / _STATE)
    # Where nothing is kept, what an earlier start has written of itself must not be gone on with.
    name = task.name if task.keeps else f"{task.name}-{time.time_ns()}"
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # relative paths are meant where the command is typed
    try:
        yield TorchTrainer(
            work,
            train_loop_config=task,  # whatever the loop takes
            scaling_config=ScalingConfig(num_workers=engine.processes or 1, use_gpu=on_gpus),
            torch_config=TorchConfig(backend="nccl" if on_gpus else "gloo"),
            run_config=RunConfig(
                name=name,
                storage_path=state,
                failure_config=FailureConfig(max_failures=RESTARTS if engine.restarts is None else engine.restarts),
                checkpoint_config=CheckpointConfig(num_to_keep=_KEPT),
                logging_config=LoggingConfig(log_level="ERROR"),
            ),
        )
    finally:
        if not task.keeps:
            shutil.rmtree(folder / _STATE, ignore_errors=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def bring_home(task: Task) -> None:
    """Copies the newest state of a run from Ray's storage into the run folder, if it has any yet.

    What an earlier start has left there and the newest state does not have, as rotated checkpoints, goes.
    """
    if task.keeps is None:
        return
    folder = Path(task.folder)
    try:
        result = Result.from_path(f"{task.keeps.rstrip('/')}/{task.name}")
        if result.checkpoint is None:
            return
        with result.checkpoint.as_directory() as copy:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            shutil.copytree(copy, folder, dirs_exist_ok=True)
    except (OSError, ValueError, RuntimeError, shutil.Error) as error:
        warn("PRL345", "%s: nothing of this run could be brought from there: %s", task.keeps, first_line(error))
