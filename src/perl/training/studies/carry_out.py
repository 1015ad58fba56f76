"""Carries out cells, some at a time, each an ordinary run in a process of its own.

cells -> DIR/cells/STAGE/NAME, a run folder each -> how each ended

Kill this process, or one of a cell, and nothing is lost but the steps in hand: the same call goes on. What a cell used
and scored is kept in ``DIR/usage.jsonl`` and ``DIR/scores.jsonl``, which outlive a kill too.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perl.errors import EXIT_DONE, EXIT_INTERRUPTED, InterruptedRunError, PerlError, RunFolderError
from perl.run.folder import Run
from perl.run.logs import read_log
from perl.run.progress import progress
from perl.run.signals import handled
from perl.training.studies.cells import Cell
from perl.training.studies.choose import score_of
from perl.training.studies.conduct import GOES_ON, Conduct, Ended, add_score, add_usage, last_error, used
from perl.training.studies.crew import Hire, Starter
from perl.training.studies.nursery import Job

Noted = Callable[[Mapping[str, Ended]], object]
"""Is given how cells have ended, by name."""
# How a process ended that is begun once more: for want of memory beside the others, or by another's hand.
_KILLED = "killed"
logger = logging.getLogger("perl")


def carry_out(
    conduct: Conduct,
    hire: Hire,
    cells: Sequence[Cell],
    until: Mapping[str, int] | None = None,
    noted: Noted = lambda _: None,
) -> dict[str, Ended]:
    """Trains cells to their end, or to a step.

    Args:
        conduct: How.
        hire: As :func:`perl.training.studies.crew.crew` gives it.
        cells: Those that are done already are left as they are.
        until: Name -> step after which a cell pauses; those that are beyond it are left too. None: all go to the end.
        noted: Is given how cells have ended, at first, whenever one has, and at last.

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
    starter = hire()
    with _stoppable(starter) as stopping, progress(len(cells), "cells", len(ended), "cells") as shown:

        def one_more() -> None:
            shown.update()
            noted(ended)

        _work_off(conduct, waiting, until, starter, ended, one_more, stopping)
    noted(ended)
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
        score = score_of(run.path, conduct.score)
        if score is not None:
            add_score(conduct.folder, cell.name, score)  # of one that ended when its study had been killed
        if until is not None or conduct.score != "final" or score is not None:
            return "done"
        run.record(status="interrupted")  # its evaluation is lost: what it drew is scored again after its last step
        return ""
    return "paused" if until is not None and run.status == "interrupted" and last_step(run) >= until else ""


def last_step(run: Run) -> int:
    """The last step that a run has logged."""
    rows = read_log(run.metrics)
    return int(rows[-1]["step"]) if rows else 0


def _work_off(
    conduct: Conduct,
    waiting: list[Cell],
    until: Mapping[str, int],
    starter: Starter,
    ended: dict[str, Ended],
    one_more: Callable[[], None],
    stopping: Callable[[], bool],
) -> None:
    """Begins cells as others end, until none waits."""
    running: dict[str, tuple[Cell, float, int]] = {}
    begun_again: set[str] = set()
    while running or waiting:
        while waiting and not stopping() and conduct.may_begin(waiting[0], [one for one, _, _ in running.values()]):
            if conduct.budget is not None and used(conduct) >= conduct.budget:
                ended |= {cell.name: Ended("not begun", "the budget was used up") for cell in waiting}
                waiting.clear()
                break
            cell = waiting.pop(0)
            log = conduct.log_of(cell)
            running[cell.name] = cell, time.monotonic(), log.stat().st_size if log.exists() else 0
            starter.begin(_job(conduct, cell, until.get(cell.name), starter.base))
        if stopping():
            waiting.clear()
        if not running:
            break
        try:
            report = starter.next()
        except PerlError:
            if stopping():
                break  # a second signal has ended all at once
            raise
        cell, began, printed = running.pop(report["name"])
        add_usage(conduct.folder, {**report, "wall": round(time.monotonic() - began, 3)})
        how = _outcome(conduct, cell, report, until.get(cell.name), printed, stopped=stopping())
        if how.status in ("lost", _KILLED) and cell.name not in begun_again and not stopping():
            logger.info("%s is begun once more: %s", cell.name, how.reason)
            begun_again.add(cell.name)
            waiting.append(cell)
            continue
        if how.status == _KILLED:
            how = Ended("failed", f"{how.reason} again, perhaps for want of memory")
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


def _outcome(
    conduct: Conduct, cell: Cell, report: Mapping[str, Any], until: int | None, printed: int, *, stopped: bool
) -> Ended:
    code, log = report["code"], conduct.log_of(cell)
    if code == EXIT_DONE:
        score = score_of(conduct.run_of(cell), conduct.score)
        if score is not None:
            add_score(conduct.folder, cell.name, score)
        return Ended("done")
    asked = code in (EXIT_INTERRUPTED, -signal.SIGTERM)  # the latter before it had begun to train
    if stopped and (asked or report.get("lost") or code == -signal.SIGKILL):
        return Ended("interrupted", GOES_ON)
    if report.get("lost"):
        return Ended("lost", last_error(log, printed))
    if asked and until is not None and _has_reached(conduct.run_of(cell), until):
        return Ended("paused")
    if asked or code == -signal.SIGKILL:
        return Ended(_KILLED, f"its process was ended by {'SIGTERM' if asked else 'SIGKILL'}")
    if code < 0:
        return Ended("failed", f"its process was ended by {signal.Signals(-code).name}")
    return Ended("failed", last_error(log, printed) or f"exit code {code}")


def _has_reached(folder: Path, step: int) -> bool:
    try:
        return last_step(Run.read(folder)) >= step
    except RunFolderError:
        return False


@contextmanager
def _stoppable(starter: Starter) -> Iterator[Callable[[], bool]]:
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
            starter.stop()
        else:
            starter.end()

    with handled((signal.SIGINT, signal.SIGTERM), on_signal):
        yield lambda: bool(asked)
