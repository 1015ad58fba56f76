"""A process of a run that Ray Train has started: what it does, and what Ray knows that the run must hear.

task -> the run as any process trains it -> Outcome; desk, Ray Train -> Host

Ray runs the loop in a thread that is not the main one, where no signal arrives; whoever stops the run says so at the
desk.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
from filelock import FileLock, Timeout
from ray.exceptions import RayError
from ray.train import Checkpoint

from perl.errors import EXIT_DONE, EXIT_INTERRUPTED, InterruptedRunError, Mistake, PerlError, ProcessError
from perl.launch.meeting import MeetingError
from perl.launch.on_ray.rollout_servers import DESK, KEY_VARIABLE, RayFleet
from perl.policy.checkpoint import latest_step
from perl.recipe.recipe import is_first_process, rank
from perl.run.folder import LOCK
from perl.run.host import Host, hosted_by

_LOOK_SECONDS = 1.0
_ASK_SECONDS = 60.0
# In which a process that was killed lets go of the run folder.
_LOCK_SECONDS = 60.0

_SHOWN = (
    ("reward", "reward {:.3f}"),
    ("teacher/kl", "KL to the teacher {:.3f}"),
    ("completions/mean_length", "length {:.1f}"),
)


@dataclass(frozen=True)
class Task:
    """What every process does.

    Attributes:
        train: ``perl.train``, which the room above hands in.
        recipe: As its first argument.
        overrides: As its second.
        folder: The run folder; where files are kept for the run, one of this name in a place of the process's own.
        cwd: In which relative paths are meant; None: where Ray has put the process.
        servers: How many are started for the run; 0: none.
        in_memory: Folder of updates on the servers' nodes.
        key: Of the servers.
        name: Of the run in Ray's storage.
        keeps: Ray's storage, which keeps the run's files; None: the processes share the run folder.
    """

    train: Callable[..., Any]
    recipe: Any
    overrides: Sequence[str]
    folder: str
    cwd: str | None
    servers: int
    in_memory: str
    key: str
    name: str
    keeps: str | None


@dataclass(frozen=True)
class Outcome:
    """How a process has ended that was not to be started again.

    Attributes:
        code: Exit code of the command.
        kind: Class of the error; empty: none.
        mistakes: Its lines.
    """

    code: int = EXIT_DONE
    kind: str = ""
    mistakes: tuple[Mistake, ...] = ()


class RayHost(Host):
    """What the run hears of the driver and of Ray."""

    is_ray = True

    def __init__(self, task: Task) -> None:
        """Listens at the desk from now on."""
        self.keeps_files = task.keeps is not None
        self.fleet = RayFleet(task.servers, task.in_memory) if task.servers else None
        os.environ[KEY_VARIABLE] = task.key
        self._desk = ray.get_actor(DESK)
        self._stop, self._over = False, threading.Event()
        self._preempted = False
        threading.Thread(target=self._listen, name="perl-desk", daemon=True).start()

    def close(self) -> None:
        """Listens no more."""
        self._over.set()

    def stop_asked(self) -> bool:
        """See :class:`perl.run.host.Host`."""
        return self._stop

    def save_asked(self) -> bool:
        """See :class:`perl.run.host.Host`; once for each notice of a preemption."""
        known, self._preempted = self._preempted, ray.train.get_preemption_info() is not None
        return self._preempted and not known

    def logged(self, step: int, logs: Mapping[str, Any]) -> None:
        """See :class:`perl.run.host.Host`."""
        shown = [text.format(float(logs[name])) for name, text in _SHOWN if isinstance(logs.get(name), int | float)]
        self._desk.log.remote(step, "  ".join(shown))

    def saved(self, folder: Path) -> None:
        """Hands the main process's folder to Ray's storage, whose newest copy a start goes on from."""
        if not self.keeps_files:
            return
        whole = Checkpoint.from_directory(str(folder)) if is_first_process() else None
        ray.train.report({}, checkpoint=whole)

    def say_that_it_starts_again(self, folder: Path) -> None:
        """A line for the user, unless this is the first start."""
        before = ray.get(self._desk.start.remote(), timeout=_ASK_SECONDS)
        if before:
            step = latest_step(folder / "checkpoints")
            where = f"from step {step}" if step else "from the start, since there is no checkpoint"
            self.say(f"a process was lost; Ray has started all of them again, time {before}: they go on {where}")

    def say(self, line: str) -> None:
        """A line for the user."""
        self._desk.say.remote(line)

    def _listen(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            try:
                self._stop = self._stop or ray.get(self._desk.stop_asked.remote(), timeout=_ASK_SECONDS)
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


def work(task: Task) -> Outcome:
    """The loop of a worker: trains, or goes on.

    Returns:
        What is the same however often it is started again: done, stopped, a mistake.

    Raises:
        Exception: What another start may mend: another process was lost, or something unexpected has happened.
    """
    with _place(task) as folder:
        who = RayHost(task)
        handler = _ToDriver(who)
        logging.getLogger("perl").addHandler(handler)
        try:
            if is_first_process():
                who.say_that_it_starts_again(folder)
            with hosted_by(who):
                return _trained(task, folder, who)
        finally:
            logging.getLogger("perl").removeHandler(handler)
            who.close()


def _trained(task: Task, folder: Path, who: RayHost) -> Outcome:
    try:
        task.train(task.recipe, task.overrides, folder)
    except PerlError as error:
        again = getattr(error, "restartable", isinstance(error, ProcessError | MeetingError))
        if again and error.exit_code != EXIT_INTERRUPTED:
            raise
        if isinstance(error, InterruptedRunError):  # after a step, on all processes alike
            who.saved(folder)
        return Outcome(error.exit_code, type(error).__name__, error.mistakes)
    who.saved(folder)
    return Outcome()


@contextlib.contextmanager
def _place(task: Task) -> Iterator[Path]:
    """The run folder of this process: the one that all share, or one of its own with what Ray's storage has kept."""
    if task.cwd is not None:
        os.chdir(task.cwd)
    if not task.keeps:
        folder = Path(task.folder)
        if is_first_process():
            _wait_for_lock(folder)
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


def _wait_for_lock(folder: Path) -> None:
    """Waits until a process that was killed has let go of the folder; who holds it longer is told of later."""
    if folder.is_dir():
        with contextlib.suppress(Timeout, OSError), FileLock(folder / LOCK, timeout=_LOCK_SECONDS):
            return
