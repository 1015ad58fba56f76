"""Shows how far a long piece of work is: a live line on a terminal, a line now and then in a log."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

logger = logging.getLogger("perl")

# Between two lines in a log.
_SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """How much of a piece of work is done, updated from any thread.

    Attributes:
        done: Units, those that were done before included.
        note: What else a line says at its end; an empty text: nothing.
    """

    def __init__(self, total: int, label: str, done: int, unit: str) -> None:
        """See :func:`progress`."""
        self.total, self.done, self._label, self._before, self._unit = total, done, label, done, unit
        self._started = time.monotonic()
        self._bar = live_line(total, label, done)
        self.note: Callable[[], str] = str
        self.silent = not self._bar.disable or not logger.isEnabledFor(logging.INFO)

    def update(self, count: int = 1) -> None:
        """So many more are done."""
        self.done += count
        if not self._bar.disable and (note := self.note()):
            self._bar.set_description_str(f"{self._label}, {note}", refresh=False)
        self._bar.update(count)

    def line(self) -> str:
        """The state for a log, with the time left once there is something to judge it by."""
        elapsed, new = time.monotonic() - self._started, self.done - self._before
        left = duration(elapsed / new * (self.total - self.done)) if new else "not known yet"
        line = f"{self._label}: {self.done:,}/{self.total:,} {self._unit} in {duration(elapsed)}, ETA {left}"
        return f"{line}, {note}" if (note := self.note()) else line

    def say(self, line: str) -> None:
        """Writes a line above the bar."""
        self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        """Takes the bar away."""
        self._bar.close()


@contextmanager
def progress(total: int, label: str, done: int = 0, unit: str = "completions") -> Iterator[Progress]:
    """A bar on a terminal, else a line about every half minute, even while nothing new is done.

    Args:
        total: Units of work.
        label: What is being done.
        done: Units that are done already; the time left is judged by the others.
        unit: What is counted.
    """
    state, over = Progress(total, label, done, unit), threading.Event()

    def report() -> None:
        while not over.wait(_SECONDS_BETWEEN_LINES):
            logger.info("%s", state.line())

    reporter = threading.Thread(target=report, name="progress", daemon=True)
    if not state.silent:
        reporter.start()
    try:
        yield state
    finally:
        over.set()
        if reporter.is_alive():
            reporter.join()
        state.close()


def live_line(total: int, label: str, done: int = 0, *, timed: bool = True, asked: bool = False) -> tqdm:
    """A progress bar with rate and time left on a terminal; nothing where the output is a file or a pipe.

    Args:
        total: Units of work.
        label: What is being done.
        done: Units that are done already.
        timed: Whether the line says the time left as the mean rate has it; False: its text does.
        asked: Whether somebody asked for this very line, which is shown then whatever the level of our log.
    """
    hidden = not sys.stderr.isatty() or not (asked or logger.isEnabledFor(logging.INFO))
    return tqdm(
        total=total,
        initial=done,
        desc=label,
        disable=hidden,
        leave=False,
        dynamic_ncols=True,
        bar_format="{n_fmt}/{total_fmt} |{bar:20}| {desc}" + ("  ETA {remaining}" if timed else ""),
    )


def duration(seconds: float) -> str:
    """Seconds as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
