"""The processes of a run, from its start to its end: they agree on what is run, share its folder, and end together.

Recipe on each process -> the same Recipe on all, or one line that names the process and what differs
"""

import contextlib
import itertools
import json
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from perl.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    InterruptedRunError,
    PerlError,
    RecipeError,
    RunFolderError,
    first_line,
)
from perl.launch.meeting import (
    PATIENCE_SECONDS,
    Meeting,
    MeetingError,
    check_machine,
    check_size,
    difference,
    meeting,
    processes_here,
    statement,
)
from perl.launch.watch import CAUSE_SECONDS, END, End, LostProcessError, PeerMonitor, reports_failure
from perl.policy.checkpoint import latest_step
from perl.recipe import Recipe
from perl.recipe.recipe import rank, world_size
from perl.run.folder import Run
from perl.run.host import handled, host
from perl.run.joint_work import Processes, spread_files
from perl.run.launched import adopt_launcher, started_by_us, taken_over, who

logger = logging.getLogger("perl")

# In which a file that the main process has written must be seen by all; network file systems cache for seconds.
FOLDER_SECONDS = 30.0
_SHOWN = ".together-"
_names = itertools.count()


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of one run; of a run of one process every method returns at once."""

    meeting: Meeting | None = None
    watch: PeerMonitor | None = None

    def on_loss(self, hint: Callable[[], str]) -> None:
        """Says what the same command does after one of the processes has ended."""
        if self.watch is not None:
            self.watch.hint = hint

    def agreed(self, recipe: Recipe) -> Recipe:
        """The recipe, once it is known that all processes are there and have it, and the same versions.

        Args:
            recipe: As this process has read it.

        Raises:
            RecipeError: There are other than the recipe asks for, or a process differs; the line names it.
            MissingExtraError: The strategy is not installed.
        """
        written = ("engine", "strategy") in recipe.written_at.origins
        strategy = taken_over(recipe.engine.strategy, written=written)
        if strategy != recipe.engine.strategy:
            recipe = replace(recipe, engine=recipe.engine.model_copy(update={"strategy": strategy}))
        try:
            if recipe.engine.on_ray and not host().is_ray:
                hint = "perl train RECIPE alone, which has Ray start the processes"
                raise RecipeError("ray, but a launcher has started this process", "engine.name", hint)
            check_size(recipe.engine.processes)
            if self.meeting is not None:
                check_machine(recipe.engine, processes_here())
        except PerlError as error:
            raise recipe.located(error) from None
        self.on_loss(lambda: goes_on(recipe.output_dir))
        # Of the engine's settings the strategy alone must be the same.
        self.compare({**recipe.as_dict(), "strategy": recipe.engine.strategy}, "recipe")
        return recipe

    def compare(self, settings: Mapping[str, Any], what: str, packages: Sequence[str] = ()) -> None:
        """Sees that all processes are there, with the same settings and the same versions.

        Args:
            settings: Of what this process does, as JSON has them.
            what: Of what they are, as ``recipe``.
            packages: Whose versions count too.

        Raises:
            RecipeError: A process differs; the line names it.
        """
        if self.meeting is None or self.watch is None:
            return
        own = statement(settings, packages)
        self.meeting.put("statement", own)
        if self.meeting.rank == 0:
            ours, found = json.loads(json.dumps(own)), ""
            for other in range(1, self.meeting.size):
                theirs = self.meeting.get("statement", other, self.watch.look, PATIENCE_SECONDS)
                found = found or difference(other, theirs, ours, what)
            self.meeting.put("agreement", found)
        else:
            found = self.meeting.get("agreement", 0, self.watch.look)
        if found:
            raise RecipeError(found, "launcher", "all processes must run the same")

    def share(self, run: Run) -> None:
        """Sees that all processes find the run folder of the main one, and has a lost one recorded there.

        Args:
            run: Of this process.

        Raises:
            RunFolderError: A process does not; the line names it.
        """
        if self.watch is not None and self.meeting is not None and self.meeting.rank == 0:
            self.watch.at_loss = lambda error: run.record(status="failed", error=str(error))
        self.find(run.path)

    def find(self, folder: Path) -> None:
        """Sees that all processes find the folder of the main one, which exists there.

        Args:
            folder: As this process calls it.

        Raises:
            RunFolderError: A process does not; the line names it.
        """
        if self.meeting is None or self.watch is None or host().keeps_files:
            return
        if self.meeting.rank == 0:
            found = self._not_sharing(folder)
            self.meeting.put("shared", found)
        else:
            token = self.meeting.get("token", 0, self.watch.look)
            seen = wait_until(lambda: token in _listed(folder), self.watch.look)
            self.meeting.put("seen", "" if seen else who(self.meeting.rank, os.getpid(), socket.gethostname()))
            found = self.meeting.get("shared", 0, self.watch.look)
        if found:
            raise RunFolderError(found, str(folder), "all processes need one folder, as on a shared file system")

    @property
    def ending(self) -> bool:
        """Whether another process has ended before its time, and this one does so too."""
        return self.watch is not None and self.watch.cause() is not None

    def _not_sharing(self, folder: Path) -> str:
        """On the main process: what is wrong with a process that does not see a file in the folder."""
        assert self.meeting is not None  # noqa: S101 (only called for several)
        assert self.watch is not None  # noqa: S101
        for old in folder.glob(f"{_SHOWN}*"):
            old.unlink(missing_ok=True)
        token = folder / f"{_SHOWN}{secrets.token_hex(8)}"
        token.touch()
        try:
            self.meeting.put("token", token.name)
            blind = [self.meeting.get("seen", other, self.watch.look) for other in range(1, self.meeting.size)]
        finally:
            token.unlink(missing_ok=True)
        return next((f"{name} does not see it as rank 0 does" for name in blind if name), "")

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """What the end of another process makes of the work inside is raised as that: its rank, and its error.

        Raises:
            LostProcessError: Another process has ended.
        """
        try:
            yield
        except LostProcessError:
            raise
        except (Exception, KeyboardInterrupt) as error:
            end = self._behind(error)
            if end is None or self.watch is None:
                raise
            raise self.watch.lost(end) from error

    def _behind(self, error: BaseException) -> End | None:
        """The end of another process that caused this error; None: it is this process's own."""
        if self.watch is None:
            return None
        # A collective raises one when the process at the other end is gone.
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            return self.watch.cause(CAUSE_SECONDS)
        return self.watch.cause() if isinstance(error, KeyboardInterrupt) else None

    def wait_for_main(self) -> None:
        """Waits until the main process has done its part, however long that takes.

        Raises:
            LostProcessError: It has ended before its time.
        """
        if self.watch is not None:
            self.watch.wait_for_main()

    def leave(self, error: BaseException | None) -> None:
        """Tells the others, and the launcher, how this process ends; see :func:`together`."""
        if self.meeting is None or self.watch is None:
            return
        own = _end_of(error, self.meeting.rank)
        if started_by_us():
            with contextlib.suppress(RuntimeError):  # the launcher is gone
                self.meeting.put(END, asdict(own))
        cause = self.watch.cause()
        main = self.watch.close(own)
        if not isinstance(error, PerlError):
            return
        if own.kind == "lost":
            error.already_reported = cause is None or not reports_failure(cause, self.meeting.rank)
        elif self.meeting.rank > 0 and own.kind in ("mistake", "stopped") and not error.already_reported:
            told = main is not None and main.tells_of(own)
            error.already_reported = started_by_us() or own.kind == "stopped" or told


@contextlib.contextmanager
def together() -> Iterator[ProcessGroup]:
    """The processes of a run, which end together: what one of them raises inside ends the others too.

    Inside, SIGTERM does what Ctrl-C does: it raises KeyboardInterrupt where the program stands. The main process may
    have more to do than the others, which wait for it at the end, however long it takes: nobody leaves before the run
    is done.

    Raises:
        LostProcessError: Another process has ended.
        RecipeError: A launcher started this process in a way that cannot be understood.
    """
    adopt_launcher()
    if world_size() == 1:
        with _sigterm_as_interrupt(ProcessGroup()):
            yield ProcessGroup()
        return
    place = meeting(str(next(_names)))
    group = ProcessGroup(place, _watch(place))
    with _sigterm_as_interrupt(group):
        try:
            with group.named():
                yield group
                group.wait_for_main()
        except BaseException as error:
            group.leave(error)
            raise
        group.leave(None)


def _watch(place: Meeting) -> PeerMonitor:
    """The connections of this process; a run that has failed before it came is an error that another one tells."""
    try:
        return PeerMonitor(place)
    except (LostProcessError, MeetingError) as error:
        if started_by_us():
            with contextlib.suppress(RuntimeError):  # the launcher is gone
                place.put(END, asdict(_end_of(error, place.rank)))
        error.already_reported = started_by_us() or isinstance(error, LostProcessError)
        raise


@contextlib.contextmanager
def _sigterm_as_interrupt(group: ProcessGroup) -> Iterator[None]:
    """Handles SIGTERM inside; a process that ends because of another one needs the time to say so, and goes on."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not group.ending:
            signal.default_int_handler(number, frame)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handled([signal.SIGTERM], interrupt):
        yield


def goes_on(folder: Path) -> str:
    """What the same command does with a run folder whose processes have ended."""
    step = latest_step(folder / "checkpoints")
    return f"the same command goes on from step {step}" if step else "the same command starts anew"


@contextlib.contextmanager
def log_on_main() -> Iterator[None]:
    """What all processes find alike inside, the main one says; errors are said by whoever has them."""
    level = logger.level
    if rank() > 0:
        logger.setLevel(max(level, logging.ERROR))
    try:
        yield
    finally:
        logger.setLevel(level)


def wait_until(seen: Callable[[], bool], look: Callable[[], None] = lambda: None) -> bool:
    """Waits until this process sees what the main process has written; a network file system may show it late.

    Args:
        seen: Whether it does now.
        look: Called meanwhile; raises if waiting is of no use any more.

    Returns:
        False: it does not after :data:`FOLDER_SECONDS`.
    """
    end = time.monotonic() + FOLDER_SECONDS
    while not seen():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
        look()
    return True


def see_files(folder: Path, processes: Processes) -> None:
    """Waits until every process sees the files of a folder as the main process does, by their names and sizes.

    Args:
        folder: Which the main process has written; all processes call this at once.
        processes: Those of the run.

    Raises:
        RunFolderError: This process does not see them in time.
    """
    if host().keeps_files:
        spread_files(folder, processes)
    wanted: dict[str, int] = processes.by_main(lambda: _sizes(folder))
    if not wait_until(lambda: wanted.items() <= _sizes(folder).items()):
        found = _sizes(folder)
        name = next(name for name, size in wanted.items() if found.get(name) != size)
        there = f"{found[name]} bytes long" if name in found else "absent"
        what = f"{who(processes.rank, os.getpid(), socket.gethostname())} does not see {name} as rank 0 does: {there}"
        raise RunFolderError(what, str(folder), "all processes need one folder, as on a shared file system")


def _sizes(folder: Path) -> dict[str, int]:
    """The files of a folder and their sizes; opened, since a file system may remember the size of before."""
    found = {}
    for name in _listed(folder):
        with contextlib.suppress(OSError), (folder / name).open("rb") as file:
            found[name] = os.fstat(file.fileno()).st_size
    return found


def _listed(folder: Path) -> list[str]:
    """What a folder holds; listed, since a file system may remember what was absent."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _end_of(error: BaseException | None, number: int) -> End:
    """How a process ends that this error leaves."""
    here: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname()}
    if error is None:
        return End(number, "done", code=0, **here)
    if isinstance(error, LostProcessError):
        return End(number, "lost", str(error), error.exit_code, **here)
    if isinstance(error, PerlError):
        copied = number > 0 and error.already_reported  # of another process, whose end says it
        kind = "stopped" if isinstance(error, InterruptedRunError) else "lost" if copied else "mistake"
        text, message = str(error)[:2000], error.mistakes[0].message[:2000]
        return End(number, kind, text, error.exit_code, message=message, **here)  # type: ignore[arg-type]
    if isinstance(error, KeyboardInterrupt):
        return End(number, "interrupted", "interrupted", EXIT_INTERRUPTED, **here)
    return End(number, "error", f"{type(error).__name__}: {first_line(error)}"[:2000], EXIT_FAILED, **here)
