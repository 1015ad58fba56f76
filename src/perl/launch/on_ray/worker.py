"""A process of a run that Ray Train has started: what it does, and what Ray knows that the run must hear.

task -> the run as any process trains it -> how it ends, for the driver's hub; mailbox, Ray Train -> Host

Ray runs the loop in a thread that is not the main one, where no signal arrives; whoever stops the run says so in the
mailbox, an actor that lives as long as the driver. Who has failed, the processes and the driver hear over its hub.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
from filelock import FileLock, Timeout
from ray.exceptions import RayError
from ray.train import Checkpoint

# Private: the public call is a barrier of all processes, so that the mistake of one would look as if it were lost.
from ray.train.v2._internal.execution.context import get_train_context

from perl.errors import EXIT_INTERRUPTED, InterruptedRunError, PerlError, RecipeError
from perl.launch.channel import tell_launcher
from perl.launch.on_ray.rollout_servers import KEY_VARIABLE, RayFleet
from perl.policy.checkpoint import latest_step
from perl.recipe.layers import find_in
from perl.recipe.recipe import is_first_process, rank
from perl.run.failure import Failure
from perl.run.folder import LOCK
from perl.run.host import Host, hosted_by
from perl.run.launched import HUB

MAILBOX = "perl-mailbox"
"""Name of the actor in the run's namespace."""

_LOOK_SECONDS = 1.0
_ASK_SECONDS = 60.0
# In which a process that was killed lets go of the run folder.
_LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class ProcessTask:
    """What every process does.

    Attributes:
        train: ``perl.train``, which the room above hands in.
        recipe: As its first argument.
        overrides: As its second.
        beside: Folders of modules that the recipe's rewards name.
        folder: The run folder; where files are kept for the run, one of this name in a place of the process's own.
        cwd: In which relative paths are meant; None: where Ray has put the process.
        servers: How many are started for the run; 0: none.
        in_memory: Folder of updates on the servers' nodes.
        key: Of the servers.
        name: Of the run in Ray's storage.
        keeps: Ray's storage, which keeps the run's files; None: the processes share the run folder.
        hub: Address, port and token of the driver's; the driver sets it.
    """

    train: Callable[..., Any]
    recipe: Any
    overrides: Sequence[str]
    beside: Sequence[str]
    folder: str
    cwd: str | None
    servers: int
    in_memory: str
    key: str
    name: str
    keeps: str | None
    hub: str = ""


@dataclass
class Updates:
    """What came since the driver last asked.

    Attributes:
        step: The newest that was logged.
        text: Its numbers as a line shows them.
        lines: Warnings of the processes.
        starts: How often the main process has started.
    """

    step: int = 0
    text: str = ""
    lines: list[str] = field(default_factory=list)
    starts: int = 0


class Mailbox:
    """The class of an actor where a run's driver and its processes leave what the others must know."""

    def __init__(self) -> None:
        """Nothing was said yet."""
        self._updates, self._stop = Updates(), False

    def start(self) -> int:
        """The main process has started; how often it had before."""
        self._updates.starts += 1
        return self._updates.starts - 1

    def log(self, step: int, text: str) -> None:
        """A step was logged."""
        self._updates.step, self._updates.text = step, text

    def say(self, line: str) -> None:
        """A process has something to say to the user."""
        self._updates.lines.append(line)

    def updates(self) -> Updates:
        """What there is to show; lines are given once."""
        found, self._updates = self._updates, replace(self._updates, lines=[])
        return found

    def stop(self) -> None:
        """The run is to end after the step in hand."""
        self._stop = True

    def stop_asked(self) -> bool:
        """Whether somebody has asked for that."""
        return self._stop


class RayHost(Host):
    """What the run hears of the driver and of Ray."""

    is_ray = True

    def __init__(self, task: ProcessTask) -> None:
        """Looks into the mailbox from now on."""
        self.keeps_files = task.keeps is not None
        self.fleet = RayFleet(task.servers, task.in_memory) if task.servers else None
        os.environ[KEY_VARIABLE] = task.key
        self._mailbox = ray.get_actor(MAILBOX)
        self._stop, self._over = False, threading.Event()
        threading.Thread(target=self._listen, name="perl-mailbox", daemon=True).start()

    def close(self) -> None:
        """Listens no more."""
        self._over.set()

    def stop_asked(self) -> bool:
        """See :class:`perl.run.host.Host`."""
        return self._stop

    def leaves(self) -> bool:
        """See :class:`perl.run.host.Host`: what Ray Train has told this process, which asks no other one."""
        return get_train_context().preemption_context.preemption_info is not None

    def logged(self, step: int, logs: Mapping[str, Any]) -> None:
        """See :class:`perl.run.host.Host`."""
        reward = logs.get("reward")
        self._mailbox.log.remote(step, f"reward {reward:.3f}" if isinstance(reward, int | float) else "")

    def saved(self, folder: Path) -> None:
        """Hands the main process's folder to Ray's storage, whose newest copy a start goes on from."""
        if not self.keeps_files:
            return
        whole = Checkpoint.from_directory(str(folder)) if is_first_process() else None
        ray.train.report({}, checkpoint=whole)

    def say(self, line: str) -> None:
        """A line for the user."""
        self._mailbox.say.remote(line)

    def _listen(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            try:
                self._stop = self._stop or ray.get(self._mailbox.stop_asked.remote(), timeout=_ASK_SECONDS)
            except RayError:  # the driver is gone, and soon this process
                continue


class _ToDriver(logging.Handler):
    """Warnings of this package, to who looks at the driver."""

    def __init__(self, who: RayHost) -> None:
        super().__init__(logging.WARNING)
        self._host = who

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            self._host.say(self.format(record))


def work(task: ProcessTask) -> Failure:
    """The loop of a worker: trains, or goes on.

    Returns:
        What is the same however often it is started again: done, stopped, a mistake.

    Raises:
        Exception: What another start may mend: another process was lost, or something unexpected has happened.
    """
    # All processes of a start are in one group, and those of the next one in another.
    os.environ[HUB] = f"{task.hub}/{ray.util.get_current_placement_group().id.hex()}"
    mailbox = ray.get_actor(MAILBOX)
    with _place(task) as folder:
        place = RayHost(task)
        handler = _ToDriver(place)
        logging.getLogger("perl").addHandler(handler)
        try:
            before = ray.get(mailbox.start.remote(), timeout=_ASK_SECONDS) if is_first_process() else 0
            if before:
                step = latest_step(folder / "checkpoints")
                where = f"from step {step}" if step else "from the start, since there is no checkpoint"
                place.say(f"a process was lost; Ray has started all of them again, time {before}: they go on {where}")
            with hosted_by(place):
                outcome = _trained(task, folder, place)
            tell_launcher(outcome)  # which has not heard of one that was refused before it met the others
            return outcome
        finally:
            logging.getLogger("perl").removeHandler(handler)
            place.close()


def _trained(task: ProcessTask, folder: Path, place: RayHost) -> Failure:
    try:
        try:
            os.chdir(task.cwd or os.curdir)  # where relative paths are meant
        except OSError as error:
            hint = "a folder that all nodes share, or `ray job submit --working-dir . -- perl train RECIPE`"
            raise RecipeError(f"{Failure.of(None, rank()).who} does not see {task.cwd}", "", hint) from error
        find_in(task.beside)
        task.train(task.recipe, task.overrides, folder)
    except PerlError as error:
        if error.restartable and error.exit_code != EXIT_INTERRUPTED:
            raise
        if isinstance(error, InterruptedRunError):  # after a step, on all processes alike
            place.saved(folder)
        return Failure.of(error, rank())
    place.saved(folder)
    return Failure.of(None, rank())


@contextlib.contextmanager
def _place(task: ProcessTask) -> Iterator[Path]:
    """The run folder of this process: the one that all share, or one of its own with what Ray's storage has kept."""
    if not task.keeps:
        folder = Path(task.folder)
        if is_first_process() and folder.is_dir():  # a process that was killed lets go of it
            with contextlib.suppress(Timeout, OSError), FileLock(folder / LOCK, timeout=_LOCK_SECONDS):
                pass  # who holds it longer is told of later
        yield folder
        return
    place = hashlib.sha256(f"{task.keeps}/{task.name}".encode()).hexdigest()[:12]
    own = Path(tempfile.gettempdir(), f"perl-rl-run-{os.getuid()}-{place}-{rank()}")
    shutil.rmtree(own, ignore_errors=True)  # of a process that was killed
    own.mkdir(mode=0o700)  # an error where somebody else has it
    folder = own / Path(task.folder).name
    try:
        kept = ray.train.get_checkpoint()
        if kept is not None:
            with kept.as_directory() as copy:
                shutil.copytree(copy, folder)
        yield folder
    finally:
        shutil.rmtree(own, ignore_errors=True)
