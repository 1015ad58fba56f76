"""Carries out cells, some at a time, each an ordinary run in a process of its own.

cells -> DIR/cells/NAME, a run folder each -> how each ended

Kill this process, or one of a cell, and nothing is lost but the steps in hand: the same call goes on. What a cell used
is kept in ``DIR/usage.jsonl``, which outlives a kill too.
"""

import json
import logging
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from perl.errors import EXIT_DONE, EXIT_INTERRUPTED, InterruptedRunError, PerlError, RunFolderError
from perl.recipe.sections import ModelSection
from perl.run.folder import Run
from perl.run.logs import log_rows
from perl.run.progress import progress
from perl.run.signals import handled
from perl.run.warned import warn
from perl.training.studies.cells import Cell
from perl.training.studies.choose import score_of
from perl.training.studies.nursery import Job

# The program `perl`, which forks for each command instead of being started anew.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from perl.training.studies.nursery import main; "
    "from perl.cli.commands import run; main(run)"
)
_BASE = ".base-"
KILLED = "killed"
"""How a cell's process ended that is begun once more: for want of memory beside the others, or by another's hand."""
logger = logging.getLogger("perl")
# Whether there is a GPU is asked of its driver's library, also by what is imported: torch's own way to ask uses the
# GPU, and then no fork can.
_NO_GPU_YET = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass(frozen=True)
class Ended:
    """How a cell ended.

    Attributes:
        status: ``done``, ``paused`` (for halving), ``failed``, ``lost`` (with its node, for no reason of its own),
            ``interrupted`` or ``not begun``.
        reason: Of a failure, in one line.
    """

    status: str
    reason: str = ""


@dataclass(frozen=True)
class Conduct:
    """How cells are carried out, which decides no result.

    Attributes:
        folder: Of the study.
        recipe: As ``perl train`` takes it.
        every: Overrides of every cell.
        at_once: Cells at the same time.
        threads: Of each.
        budget: Core-seconds after which no cell is begun; None: no limit.
        model: The base that all cells have and map; None: each loads its own.
        alone: Titles of arms whose cells change the weights of the servers that all share, so that no other cell may
            use these meanwhile.
        ray: Address of the Ray cluster on which cells train; None: on this machine.
        processes: Of a cell, the most that one has.
        on_cpu: No cell trains on a GPU.
        score: Of which adapter; a done cell without that of its last one is scored again.
    """

    folder: Path
    recipe: str
    every: tuple[str, ...] = ()
    at_once: int = 1
    threads: int = 1
    budget: float | None = None
    model: ModelSection | None = None
    alone: frozenset[str] = frozenset()
    score: str = "final"
    ray: str | None = None
    processes: int = 1
    on_cpu: bool = True

    def may_begin(self, cell: Cell, running: Collection[Cell]) -> bool:
        """Whether a cell can train beside those that do."""
        together = not any(one.candidate.title in self.alone for one in (cell, *running))
        return not running or (len(running) < self.at_once and together)

    def arguments(self, cell: Cell) -> list[str]:
        """Of the command that trains a cell, without its folder."""
        return ["train", self.recipe, *self.every, *cell.overrides]

    def command(self, cell: Cell) -> str:
        """That trains a cell alone, for a person to paste, with as many threads."""
        return f"OMP_NUM_THREADS={self.threads} " + shlex.join(["perl", *self.arguments(cell)])

    def run_of(self, cell: Cell) -> Path:
        """A cell's run folder."""
        return self.folder / "cells" / cell.stage / cell.name

    def log_of(self, cell: Cell) -> Path:
        """What a cell's processes printed."""
        return self.folder / "logs" / f"{cell.name}.log"

    @property
    def usage(self) -> Path:
        """A row for each process of a cell that ended."""
        return self.folder / "usage.jsonl"


def carry_out(
    conduct: Conduct,
    hire: "Hire",
    cells: Sequence[Cell],
    until: Mapping[str, int] | None = None,
    noted: "Noted" = lambda _: None,
) -> dict[str, Ended]:
    """Trains cells to their end, or to a step.

    Args:
        conduct: How.
        hire: As :func:`crew` gives it.
        cells: Those that are done already are left as they are.
        until: Name -> step after which a cell pauses; those that are beyond it are left too. None: all go to the end.
        noted: Is given how cells have ended, whenever one has.

    Returns:
        How each ended, by name.

    Raises:
        InterruptedRunError: Ctrl-C or SIGTERM; the cells in hand have checkpoints, and the same call goes on.
        PerlError: The process that starts cells is gone.
    """
    until = until or {}
    ended = {cell.name: Ended(status) for cell in cells if (status := _before(conduct, cell, until.get(cell.name)))}
    waiting = [cell for cell in cells if cell.name not in ended]
    noted(ended)
    if not waiting:
        return ended
    nursery = hire()
    with _stoppable(nursery) as stopping, progress(len(cells), "cells", len(ended), "cells") as shown:

        def one_more() -> None:
            shown.update()
            noted(ended)

        _work_off(conduct, waiting, until, nursery, ended, one_more, stopping)
    if stopping():
        done = sum(one.status == "done" for one in ended.values())
        what = f"stopped; {done} of {len(cells)} cells are done"
        raise InterruptedRunError(what, str(conduct.folder), "the same command goes on")
    return ended


def _before(conduct: Conduct, cell: Cell, until: int | None) -> str:
    """What a cell is already, as far as nothing is left to do; empty: something is."""
    try:
        run = Run.read(conduct.run_of(cell))
    except RunFolderError:
        return ""
    if run.status == "done":
        if until is not None or conduct.score != "final" or score_of(run.path) is not None:
            return "done"
        run.record(status="interrupted")  # its evaluation is lost: what it drew is scored again after its last step
        return ""
    return "paused" if until is not None and run.status == "interrupted" and last_step(run) >= until else ""


def last_step(run: Run) -> int:
    """The last step that a run has logged."""
    rows = log_rows(run.metrics.read_text(encoding="utf-8")) if run.metrics.is_file() else []
    return int(rows[-1]["step"]) if rows else 0


def _work_off(
    conduct: Conduct,
    waiting: list[Cell],
    until: Mapping[str, int],
    nursery: "Starter",
    ended: dict[str, Ended],
    one_more: Callable[[], None],
    stopping: Callable[[], bool],
) -> None:
    """Begins cells as others end, until none waits."""
    running: dict[str, tuple[Cell, float, int]] = {}
    tried: set[str] = set()  # cells that were ended from outside once, which says nothing of them
    while running or waiting:
        while waiting and not stopping() and conduct.may_begin(waiting[0], [one for one, _, _ in running.values()]):
            if conduct.budget is not None and used(conduct) >= conduct.budget:
                ended |= {cell.name: Ended("not begun", "the budget was used up") for cell in waiting}
                waiting.clear()
                break
            cell = waiting.pop(0)
            log = conduct.log_of(cell)
            running[cell.name] = cell, time.monotonic(), log.stat().st_size if log.exists() else 0
            nursery.begin(_job(conduct, cell, until.get(cell.name), nursery.base))
        if stopping():
            waiting.clear()
        if not running:
            break
        try:
            report = nursery.next()
        except PerlError:
            if stopping():
                break  # a second signal has ended all at once
            raise
        cell, began, printed = running.pop(report["name"])
        row = {**report, "wall": round(time.monotonic() - began, 3)}
        with conduct.usage.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        until_here = until.get(cell.name)
        how = _outcome(report, until_here, conduct.log_of(cell), printed, stopped=stopping())
        if how.status in ("lost", KILLED) and cell.name not in tried and not stopping():
            logger.info("%s is begun once more: %s", cell.name, how.reason)
            tried.add(cell.name)
            waiting.append(cell)
            continue
        if how.status == KILLED:
            twice = Ended("failed", f"{how.reason} twice, perhaps for want of memory")
            how = twice if cell.name in tried else Ended("interrupted")
        ended[cell.name] = how
        one_more()


def _job(conduct: Conduct, cell: Cell, until: int | None, base: Path | None) -> Job:
    return Job(
        name=cell.name,
        arguments=tuple(conduct.arguments(cell)),
        log=str(conduct.log_of(cell)),
        output=str(conduct.run_of(cell)),
        until=until,
        base=str(base) if base is not None else "",
        model=conduct.model.model_dump() if base is not None and conduct.model is not None else None,
    )


def _outcome(report: Mapping[str, Any], until: int | None, log: Path, printed: int, *, stopped: bool) -> Ended:
    code = report["code"]
    if code == EXIT_DONE:
        return Ended("done")
    if report.get("lost"):
        return Ended("interrupted") if stopped else Ended("lost", last_error(log, printed))
    if stopped and code == -signal.SIGTERM:  # it had not begun to train
        return Ended("interrupted")
    if code == EXIT_INTERRUPTED and (until is not None or stopped):
        return Ended("interrupted" if stopped else "paused")
    if code < 0:
        status = KILLED if code == -signal.SIGKILL else "failed"
        return Ended(status, f"its process was ended by {signal.Signals(-code).name}")
    return Ended("failed", last_error(log, printed) or f"exit code {code}")


def last_error(log: Path, begin: int = 0) -> str:
    """The last line of a log that tells of an error, else the last one; of an absent log nothing.

    Args:
        log: The file.
        begin: Bytes of it that were there before.
    """
    try:
        with log.open("rb") as file:
            file.seek(begin)
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1].removeprefix("error: ").strip()


def used(conduct: Conduct) -> float:
    """Core-seconds of all processes of cells that have ended."""
    return sum(float(row["cpu"]) for row in usage_rows(conduct.folder))


def usage_rows(folder: Path) -> list[dict[str, Any]]:
    """What each process of a cell used: name, code, cpu (core-seconds), wall (seconds), peak (bytes)."""
    path = folder / "usage.jsonl"
    return log_rows(path.read_text(encoding="utf-8")) if path.is_file() else []


class Starter(Protocol):
    """What starts cells, each in a process.

    Attributes:
        base: Folder with the base that they map; None: each loads its own.
    """

    base: Path | None

    def begin(self, job: Job) -> None:
        """Begins a cell."""
        ...

    def stop(self) -> None:
        """Asks all cells to stop after their step."""
        ...

    def end(self) -> None:
        """Ends all of them at once."""
        ...

    def next(self) -> dict[str, Any]:
        """The next cell that ends: name, code, cpu (core-seconds), peak (bytes), and whether it was lost, if known."""
        ...


class Nursery:
    """The process that forks one for each cell: see ``nursery.py``.

    Attributes:
        base: Folder with the base that its cells map; None: each loads its own.
    """

    def __init__(self, process: subprocess.Popen[bytes], errors: Path) -> None:
        """Takes the process.

        Args:
            process: That says it is ready once it has imported.
            errors: File for what it prints.
        """
        self.process, self._errors = process, errors
        self.base: Path | None = None

    def begin(self, job: Job) -> None:
        """Begins a cell."""
        self._write(asdict(job))

    def stop(self) -> None:
        """Asks all cells to stop after their step."""
        self._write({"stop": True})

    def end(self) -> None:
        """Ends all of them at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def next(self) -> dict[str, Any]:
        """The next cell that ends.

        Raises:
            PerlError: The process is gone.
        """
        while True:
            line = self._pipe(self.process.stdout).readline()
            if not line:
                what = f"the process that starts cells has ended with exit code {self.process.wait()}"
                raise PerlError(what, str(self._errors), "see there; the same command goes on")
            report: dict[str, Any] = json.loads(line)
            if "name" in report:
                return report

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            pipe = self._pipe(self.process.stdin)
            pipe.write(json.dumps(line).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            return  # which the next look at it finds

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None  # noqa: S101 (it was asked for)
        return pipe


Noted = Callable[[Mapping[str, Ended]], object]
"""Is given how cells have ended, by name."""
Hire = Callable[[], Starter]
"""Gives the process that starts cells, which is started when it is first asked for."""


@contextmanager
def crew(conduct: Conduct, check: Callable[[Path], None] = lambda _: None) -> Iterator[Hire]:
    """Inside, cells can be carried out; one process starts all of them, and ends with the block.

    Args:
        conduct: How.
        check: Given the study's folder before that process is started; refuses what cells share and cannot use.
    """
    with ExitStack() as opened:
        started: list[Starter] = []

        def hire() -> Starter:
            if not started:
                check(conduct.folder)
                started.append(opened.enter_context(_started(conduct) if conduct.ray is None else _on_ray(conduct)))
            return started[0]

        yield hire


@contextmanager
def _on_ray(conduct: Conduct) -> Iterator[Starter]:
    from perl.training.studies.on_ray import OnRay, cells_on_ray  # which imports what trains

    assert conduct.ray is not None  # noqa: S101 (of one that has it)
    how = OnRay(conduct.ray, conduct.threads, conduct.processes, conduct.on_cpu)
    with cells_on_ray(how, conduct.recipe, conduct.folder) as cells:
        yield cells


@contextmanager
def _started(conduct: Conduct) -> Iterator[Nursery]:
    """Starts the process, which holds the base in a file where that can be."""
    for name in ("cells", "logs"):
        (conduct.folder / name).mkdir(exist_ok=True)
    for left in conduct.folder.glob(f"{_BASE}*"):  # of a study that was killed; cells of it that end still map it
        shutil.rmtree(left, ignore_errors=True)
    log = conduct.folder / "logs" / "starts.log"
    with log.open("ab") as errors:
        process = subprocess.Popen(  # noqa: S603 (a fixed command)
            [sys.executable, "-P", "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **_NO_GPU_YET, "OMP_NUM_THREADS": str(conduct.threads)},
            start_new_session=True,
        )
    base = conduct.folder / f"{_BASE}{secrets.token_hex(4)}"
    nursery = Nursery(process, log)
    try:
        if conduct.model is not None:
            nursery.base = _held(nursery, base, conduct.model, log.with_name("base.log"))
        yield nursery
    finally:
        assert process.stdin is not None  # noqa: S101 (it was asked for)
        assert process.stdout is not None  # noqa: S101 (so was it)
        process.stdin.close()  # by which it knows
        process.wait()
        process.stdout.close()
        shutil.rmtree(base, ignore_errors=True)


def _held(nursery: Nursery, folder: Path, model: ModelSection, log: Path) -> Path | None:
    """Has the base written where cells map it; None where they have a copy each, on a GPU or since that failed."""
    nursery.begin(Job("base", (), str(log), str(folder), None, str(folder), model.model_dump()))
    code = nursery.next()["code"]
    if code != EXIT_DONE:
        why = last_error(log) or f"exit code {code}"
        warn("PRL346", "the base cannot be shared, each cell loads it: %s", why)
    return folder if code == EXIT_DONE and folder.is_dir() else None


@contextmanager
def _stoppable(nursery: Starter) -> Iterator[Callable[[], bool]]:
    """Inside, a first signal stops all cells after their step, a second one at once; whether one came.

    Only the main thread hears signals; in another one none comes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        asked.append(number)
        if len(asked) == 1:
            nursery.stop()
        else:
            nursery.end()

    with handled((signal.SIGINT, signal.SIGTERM), on_signal):
        yield lambda: bool(asked)
