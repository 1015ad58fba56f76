"""The processes of a run, from its start to its end: they agree on what is run, share its folder, and end together.

Recipe on each process -> the same Recipe on all, or one line that names the process and what differs
"""

import contextlib
import itertools
import json
import logging
import os
import platform
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from perl.errors import PerlError, RecipeError, RunFolderError
from perl.launch.channel import CAUSE_SECONDS, PeerMonitor, open_channel, reports_failure
from perl.launch.meeting import (
    PATIENCE_SECONDS,
    check_machine,
    check_size,
    meeting,
    processes_here,
)
from perl.policy.checkpoint import latest_step
from perl.recipe import Recipe
from perl.recipe.recipe import rank, world_size
from perl.run.failure import Failure, LostProcessError
from perl.run.folder import Run, differences, installed_versions
from perl.run.host import handled, host
from perl.run.joint_work import Processes, spread_files
from perl.run.launched import adopt_launcher, started_by_us, taken_over

logger = logging.getLogger("perl")

# In which a file that the main process has written must be seen by all; network file systems cache for seconds.
FOLDER_SECONDS = 30.0
_SHOWN = ".together-"
_names = itertools.count()


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of one run; of a run of one process every method returns at once."""

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
            if self.watch is not None:
                check_machine(recipe.engine, processes_here())
        except PerlError as error:
            raise recipe.located(error) from None
        self.on_loss(lambda: goes_on(recipe.output_dir))
        shared = {name: getattr(recipe.engine, name) for name in ("strategy", "shards")}  # others may differ
        self.compare({**recipe.as_dict(), **shared}, "recipe")
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
        if self.watch is None:
            return
        place, look = self.watch.meeting, self.watch.look
        versions = {"python": platform.python_version(), **installed_versions(packages)}
        own = {"settings": dict(settings), "versions": versions, "who": Failure.of(None, place.rank).who}
        place.put("statement", own)
        if place.rank == 0:
            ours, lines = json.loads(json.dumps(own)), []
            for other in range(1, place.size):
                theirs = place.get("statement", other, look, PATIENCE_SECONDS)
                for kind, topic in (("settings", f"another {what}"), ("versions", "other versions")):
                    found = differences(ours[kind], theirs[kind])
                    lines += [f"{theirs['who']} has {topic} than rank 0: {'; '.join(found[:3])}"] if found else []
            place.put("agreement", lines[:1])
        differing = place.get("agreement", 0, look)
        if differing:
            raise RecipeError(differing[0], "launcher", "all processes must run the same")

    def share(self, run: Run) -> None:
        """Sees that all processes find the run folder of the main one, and has a lost one recorded there.

        Args:
            run: Of this process.

        Raises:
            RunFolderError: A process does not; the line names it.
        """
        if self.watch is not None and self.watch.meeting.rank == 0:
            self.watch.at_loss = lambda error: run.record(status="failed", error=str(error))
        self.find(run.path)

    def find(self, folder: Path) -> None:
        """Sees that all processes find the folder of the main one, which exists there.

        Args:
            folder: As this process calls it.

        Raises:
            RunFolderError: A process does not; the line names it.
        """
        if self.watch is None or host().keeps_files:
            return
        place, look = self.watch.meeting, self.watch.look
        if place.rank == 0:
            for old in folder.glob(f"{_SHOWN}*"):
                old.unlink(missing_ok=True)
            shown = folder / f"{_SHOWN}{secrets.token_hex(8)}"
            shown.touch()
            try:
                place.put("token", shown.name)
                unable = [place.get("seen", other, look) for other in range(1, place.size)]
            finally:
                shown.unlink(missing_ok=True)
            place.put("shared", [name for name in unable if name])
        else:
            token = place.get("token", 0, look)
            seen = wait_until(lambda: token in _listed(folder), look)
            place.put("seen", "" if seen else Failure.of(None, place.rank).who)
        blind = place.get("shared", 0, look)
        if blind:
            hint = "all processes need one folder, as on a shared file system"
            raise RunFolderError(f"{blind[0]} does not see it as rank 0 does", str(folder), hint)

    @property
    def ending(self) -> bool:
        """Whether another process has ended before its time, and this one does so too."""
        return self.watch is not None and self.watch.channel.cause() is not None

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
            end = None
            if self.watch is not None and isinstance(error, RuntimeError | KeyboardInterrupt):
                # A collective raises a RuntimeError when the process at the other end is gone.
                by_peer = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
                end = self.watch.channel.cause(CAUSE_SECONDS if by_peer else 0.0)
            if end is None or self.watch is None:
                raise
            raise self.watch.lost(end) from error

    def leave(self, error: BaseException | None) -> None:
        """Tells the others, and the launcher, how this process ends; see :func:`together`."""
        if self.watch is None:
            return
        place = self.watch.meeting
        own, cause = Failure.of(error, place.rank), self.watch.channel.cause()
        main = self.watch.close(own)
        if not isinstance(error, PerlError):
            return
        if isinstance(error, LostProcessError):
            error.already_reported = cause is None or not reports_failure(cause, place.rank)
        elif place.rank > 0 and own.kind in ("mistake", "stopped"):
            error.already_reported = started_by_us() or own.kind == "stopped" or bool(main and main.tells_of(own))


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
    if world_size() == 1 and not started_by_us():
        with _sigterm_as_interrupt(ProcessGroup()):
            yield ProcessGroup()
        return
    place = meeting(str(next(_names)))
    try:
        watch = PeerMonitor(open_channel(place), place)
    except LostProcessError as error:  # of before it came, which another one tells
        error.already_reported = True
        raise
    group = ProcessGroup(watch)
    with _sigterm_as_interrupt(group):
        try:
            with group.named():
                yield group
                watch.wait_for_main()
        except BaseException as error:
            group.leave(error)
            raise
        group.leave(None)


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
        what = f"{Failure.of(None, processes.rank).who} does not see {name} as rank 0 does: {there}"
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
