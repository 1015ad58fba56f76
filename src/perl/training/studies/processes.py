"""The cells of a study as processes: `perl train` for each, in a run folder of its own, some at a time.

cells -> DIR/cells/STAGE/NAME, DIR/logs/NAME.log, how each ended

A cell is an ordinary run: kill it, or the study, and the same command goes on from its checkpoint. Cells that outlive a
study that was killed go on to their end, and the next start of the study waits for them.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from perl.errors import EXIT_DONE, EXIT_INTERRUPTED, InterruptedRunError, RunFolderError
from perl.run.folder import LOCK, Run, is_held
from perl.run.host import handled
from perl.run.logs import read_log
from perl.run.progress import Progress, progress
from perl.training.studies.cells import Cell
from perl.training.studies.plan import Study

GOES_ON = "the same command goes on with it"
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class CellEnd:
    """How a cell ended.

    Attributes:
        status: ``done``, ``paused`` (for halving), ``ended early`` (by it), ``failed``, ``interrupted`` or
            ``not begun``.
        reason: Why, in one line.
    """

    status: str
    reason: str = ""


@dataclass
class _Running:
    """A process of a cell.

    Attributes:
        printed: Bytes of its log that were there before.
        asked: Whether it was asked to pause.
    """

    cell: Cell
    process: subprocess.Popen[bytes]
    printed: int
    asked: bool = False


@dataclass
class CellProcesses:
    """Trains the cells of a study, and knows how they ended.

    Attributes:
        folder: Of the study.
        ended: How cells have ended in this call, by name; of the others their run folders tell.
    """

    study: Study
    folder: Path
    ended: dict[str, CellEnd] = field(default_factory=dict)
    _running: dict[str, _Running] = field(default_factory=dict)
    _signals: int = 0  # that came

    def run_of(self, cell: Cell) -> Path:
        """A cell's run folder."""
        return self.folder / "cells" / cell.stage / cell.name

    def end_of(self, cell: Cell) -> CellEnd:
        """How a cell has ended, or was left by an earlier call."""
        if cell.name in self.ended:
            return self.ended[cell.name]
        status = _status(self.run_of(cell))
        if status == "failed":
            return CellEnd(status, f"{_last_error(self._log_of(cell))}; the same command tries it again")
        return CellEnd("done") if status == "done" else CellEnd("interrupted" if status else "not begun", GOES_ON)

    def train(self, cells: Sequence[Cell], pause_at: Mapping[str, int] | None = None) -> None:
        """Trains cells to their end, or to a step; those that are complete are left as they are.

        Args:
            cells: Which.
            pause_at: Name -> step after which a cell is stopped, with a checkpoint; None: all go to the end.

        Raises:
            InterruptedRunError: Ctrl-C or SIGTERM; the cells in hand have checkpoints, and the same call goes on.
        """
        pause_at = pause_at or {}
        for name in ("cells", "logs"):
            (self.folder / name).mkdir(exist_ok=True)
        waiting = [cell for cell in cells if not self._is_complete(cell, pause_at)]
        killed: set[str] = set()
        with self._stoppable(), progress(len(cells), "cells", len(cells) - len(waiting), "cells") as shown:
            while self._running or (waiting and not self._signals):
                self._begin_some(waiting, pause_at, shown)
                time.sleep(_LOOK_SECONDS)
                for name, running in list(self._running.items()):
                    if running.process.poll() is None:
                        to_pause = name in pause_at and not running.asked
                        if to_pause and last_step(self.run_of(running.cell)) >= pause_at[name]:
                            running.asked = True
                            running.process.send_signal(signal.SIGTERM)
                        continue
                    del self._running[name]
                    if self._note_end(running, pause_at) and name not in killed:
                        killed.add(name)
                        waiting.append(running.cell)  # once more
                    else:
                        shown.update()
        if self._signals:
            done = sum(self.end_of(cell).status == "done" for cell in cells)
            what = f"stopped; {done} of {len(cells)} cells are done"
            raise InterruptedRunError(what, str(self.folder), "the same command goes on")

    def _is_complete(self, cell: Cell, pause_at: Mapping[str, int]) -> bool:
        """Whether nothing is left to do for a cell, which is noted then."""
        run, at = self.run_of(cell), pause_at.get(cell.name)
        status = _status(run)
        paused = at is not None and status not in ("", "failed") and last_step(run) >= at and not is_held(run / LOCK)
        if status == "done" or paused:
            self.ended[cell.name] = CellEnd("done" if status == "done" else "paused")
        return status == "done" or paused

    def _begin_some(self, waiting: list[Cell], pause_at: Mapping[str, int], shown: Progress) -> None:
        """Begins cells while there is room; those that a killed study has left at work take theirs."""
        if len(self._running) >= self.study.file.at_once:
            return
        held = [cell for cell in waiting if is_held(self.run_of(cell) / LOCK)]
        for cell in [cell for cell in waiting if cell not in held]:
            if self._signals or len(self._running) + len(held) >= self.study.file.at_once:
                return
            waiting.remove(cell)
            if self._is_complete(cell, pause_at):  # by such a process
                shown.update()
            else:
                command = [sys.executable, "-P", "-m", "perl", *self.study.arguments(cell)]
                with self._log_of(cell).open("ab") as log:
                    printed = log.tell()
                    process = subprocess.Popen(  # noqa: S603 (ourselves)
                        [*command, "-o", str(self.run_of(cell))],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env={**os.environ, "OMP_NUM_THREADS": str(self.study.file.threads)},
                        start_new_session=True,  # a terminal's Ctrl-C comes by the study alone
                    )
                self._running[cell.name] = _Running(cell, process, printed)
                if self._signals:  # one came meanwhile
                    process.send_signal(signal.SIGTERM)

    def _note_end(self, running: _Running, pause_at: Mapping[str, int]) -> bool:
        """Notes how a process ended; returns whether it was killed, as for want of memory beside the others."""
        cell, code = running.cell, running.process.returncode
        stopped = code in (EXIT_INTERRUPTED, -signal.SIGTERM)  # the latter before it had begun to train
        if code == EXIT_DONE:
            self.ended[cell.name] = CellEnd("done")
            return False
        if stopped and self._is_complete(cell, pause_at):
            return False
        if stopped and self._signals:
            self.ended[cell.name] = CellEnd("interrupted", GOES_ON)
            return False
        by = "SIGTERM" if stopped else signal.Signals(-code).name if code < 0 else ""
        why = f"its process was ended by {by}, perhaps for want of memory" if by else ""
        self.ended[cell.name] = CellEnd("failed", why or _last_error(self._log_of(cell), running.printed))
        return bool(by)

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Inside, a first signal stops all cells after their step, a second one at once; only the main thread hears."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(*_: object) -> None:
            self._signals += 1
            for running in list(self._running.values()):
                running.process.send_signal(signal.SIGTERM)

        with handled((signal.SIGINT, signal.SIGTERM), on_signal):
            yield

    def _log_of(self, cell: Cell) -> Path:
        return self.folder / "logs" / f"{cell.name}.log"


def last_step(run: Path) -> int:
    """The last step that a run has logged; 0: none."""
    rows = read_log(run / "metrics.jsonl")
    return int(rows[-1].get("step") or 0) if rows else 0


def _status(run: Path) -> str:
    """Status of a run; empty: there is no run."""
    try:
        return Run.read(run).status
    except RunFolderError:
        return ""


def _last_error(log: Path, begin: int = 0) -> str:
    """The last line of a log that tells of an error, else the last one; of an absent log nothing.

    Args:
        log: The file.
        begin: Bytes of it that were there before.
    """
    text = log.read_bytes()[begin:].decode(errors="replace") if log.is_file() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it printed nothing"])[-1].removeprefix("error: ").strip()
