"""A run on a Ray cluster as its driver sees it: everything checked, started, watched over and brought home.

Task, servers -> Ray Train's workers, servers' actors -> Outcome

The driver is the process of ``perl train``, on the head node or wherever ``ray job submit`` puts it. Who ends it ends
the run; the same command goes on.
"""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
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

from perl.errors import InterruptedRunError, first_line, visible, warn
from perl.launch.channel import Hub
from perl.launch.on_ray.cluster import Cluster, allowed_restarts, answers, uses_gpus
from perl.launch.on_ray.rollout_servers import ServerCommand, started_servers
from perl.launch.on_ray.worker import MAILBOX, Mailbox, ProcessTask, Updates, work
from perl.launch.start import SIGNALS, ProcessFailedError, Signals
from perl.launch.together import goes_on
from perl.recipe.sections import EngineSection
from perl.run.failure import Failure, first_cause
from perl.run.host import handled

_LOOK_SECONDS, _ASK_SECONDS = 0.5, 5.0
# A head may come back. Ray itself waits for a minute, and then ends this process without a word of the run.
_HEAD_LOOK_SECONDS, _HEAD_SECONDS = 5.0, 30.0
_STATE = ".ray"
# Ray keeps the newest and, while that is written, the one before.
_KEPT = 2


def drive(
    cluster: Cluster,
    engine: EngineSection,
    task: ProcessTask,
    command: ServerCommand | None,
    show: Callable[[Updates], None],
) -> Failure:
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
    signals, hub = Signals(), Hub(local=False, names_killed=True)
    task = replace(task, hub=f"{ray.util.get_node_ip_address()}:{hub.port}:{hub.token}")
    with contextlib.closing(hub), contextlib.ExitStack() as opened:
        opened.enter_context(handled(SIGNALS, signals.hand_on))
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # Where memory is short Ray kills whom it likes, and starts this one again too.
        how = {"name": MAILBOX, "num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
        mailbox: Any = ray.remote(Mailbox).options(**how).remote()
        if command is not None:
            opened.enter_context(started_servers(task.servers, command, task.in_memory))
        trainer = opened.enter_context(_trainer(cluster, engine, task))
        try:
            ended = _watched(trainer, mailbox, signals, show, allowed_restarts(engine))
        finally:
            bring_home(task)
    folder, outcome = Path(task.folder), getattr(ended, "return_value", None)
    if isinstance(ended, InterruptedRunError):
        raise InterruptedRunError(ended.mistakes[0].message, hint=goes_on(folder))
    failed, cause = isinstance(ended, TrainingFailedError), first_cause(hub.ends)
    if failed and (cause is None or cause.restartable):
        # A process that cannot be imported has told nothing; Ray knows of it.
        what = cause or visible((str(ended).strip() or type(ended).__name__).splitlines()[-1])[:500]
        hint = f"{goes_on(folder)}; what it printed is in Ray's logs, of its node"
        raise ProcessFailedError(f"failed too often: {what}", hint=hint)
    if cause is not None and (failed or getattr(outcome, "kind", None) == "lost"):
        return cause
    if isinstance(ended, RayError):
        raise ProcessFailedError(f"the Ray cluster is gone: {first_line(ended)}", hint=goes_on(folder))
    if not isinstance(outcome, Failure):
        raise ended
    return outcome


def _watched(
    trainer: TorchTrainer,
    mailbox: Any,  # noqa: ANN401 (a handle of Ray)
    signals: Signals,
    show: Callable[[Updates], None],
    restarts: int,
) -> Any:  # noqa: ANN401 (Ray's result, or what it raised)
    """Runs the training in a thread, while this one listens to signals and shows how far it is."""
    ended: list[Any] = []
    thread = threading.Thread(target=_fit, args=(trainer, restarts, ended), name="perl-ray-train", daemon=True)
    thread.start()
    told = starts = 0
    head, heard = ray.get_runtime_context().gcs_address, time.monotonic()
    while True:
        thread.join(_LOOK_SECONDS)
        silent = time.monotonic() - heard
        if silent > _HEAD_LOOK_SECONDS and answers(head):
            heard = time.monotonic()
        elif silent > _HEAD_SECONDS:
            return RayError(f"its head, {head}, has not answered for {_HEAD_SECONDS:.0f} s")
        over = not thread.is_alive()  # then what was said while it ended is shown
        if len(signals.times) > told and not over:
            told = len(signals.times)
            if told > 1 or not starts:  # nothing is lost of a run whose processes have not started
                return InterruptedRunError("interrupted" + (", the step in hand is lost" if starts else ""))
            line = "stopping after this step, with a checkpoint (again: stop now and lose the step)"
            print(line, file=sys.stderr, flush=True)  # noqa: T201
            mailbox.stop.remote()
        with contextlib.suppress(RayError):
            updates: Updates = ray.get(mailbox.updates.remote(), timeout=_ASK_SECONDS)
            show(updates)
            starts = updates.starts
        if over:
            return ended[0]


def _fit(trainer: TorchTrainer, restarts: int, ended: list[Any]) -> None:
    """Runs the training; Ray's result, or what it raised, goes to the end of a list.

    Ray starts processes again, but not the actor that watches over them, which it may kill where memory is short.
    """
    for left in reversed(range(restarts + 1)):
        try:
            ended.append(trainer.fit())
        except BaseException as error:  # noqa: BLE001 (raised again in the driver's own thread)
            if left and isinstance(error, RayActorError | OutOfMemoryError):
                continue
            ended.append(error)
        return


@contextlib.contextmanager
def _trainer(cluster: Cluster, engine: EngineSection, task: ProcessTask) -> Iterator[TorchTrainer]:
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
                failure_config=FailureConfig(max_failures=allowed_restarts(engine)),
                checkpoint_config=CheckpointConfig(num_to_keep=_KEPT),
                logging_config=LoggingConfig(log_level="ERROR"),
            ),
        )
    finally:
        if not task.keeps:
            shutil.rmtree(folder / _STATE, ignore_errors=True)


def bring_home(task: ProcessTask) -> None:
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
