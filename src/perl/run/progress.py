"""How far a long piece of work is, as a live line on a terminal or a line now and then in a log; what time is left.

units done -> lines; seconds of steps, seconds between them -> seconds left

A mean over all of the time of a training would count an evaluation that comes every fiftieth step as part of each step,
and would know nothing of one that has not come yet.
"""

import logging
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tqdm import tqdm

logger = logging.getLogger("perl")

# Between two lines in a log, and between two looks at what a live line says.
_SECONDS_BETWEEN_LINES, _SECONDS_BETWEEN_LOOKS = 30.0, 1.0


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
        self.pause = _SECONDS_BETWEEN_LINES if self._bar.disable else _SECONDS_BETWEEN_LOOKS

    def update(self, count: int = 1) -> None:
        """So many more are done."""
        self.done += count
        if not self._bar.disable:
            self.show(refresh=False)
        self._bar.update(count)

    def show(self, *, refresh: bool = True) -> None:
        """Renews the live line, or says the state in the log."""
        if self._bar.disable:
            logger.info("%s", self.line())
        else:  # what changes comes first: a narrow terminal cuts the end
            self._bar.set_description_str(", ".join(filter(None, (self.note(), self._label))), refresh=refresh)

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
        while not over.wait(state.pause):
            state.show()

    reporter = threading.Thread(target=report, name="progress", daemon=True)
    if logger.isEnabledFor(logging.INFO):
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
        bar_format="{n_fmt}/{total_fmt} |{bar:10}| " + ("ETA {remaining}  {desc}" if timed else "{desc}"),
    )


def duration(seconds: float) -> str:
    """Seconds as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# Steps that the newest mean is of. The first ones are slower: caches are empty, kernels are compiled.
_NEWEST = 20
_WARM_UP = 2


@dataclass
class Recurring:
    """Work that comes after every so many steps: an evaluation.

    Attributes:
        every: Optimizer steps from one to the next.
        completions: That it samples, by which it is judged before it has come; 0: nothing is known.
        seconds: What it took each time.
    """

    every: int
    completions: int = 0
    seconds: list[float] = field(default_factory=list)

    def is_due(self, step: int) -> bool:
        """Whether it comes after a step."""
        return step % self.every == 0

    def times(self, after: int, last: int) -> int:
        """How often it comes after a step, the last one included."""
        return last // self.every - after // self.every


class TimeLeft:
    """Counts, and says what is left.

    Attributes:
        recurring: What comes between steps.
    """

    def __init__(self, recurring: tuple[Recurring, ...] = (), completions_per_step: int = 0) -> None:
        """Nothing was timed yet.

        Args:
            recurring: What comes between steps.
            completions_per_step: By which an evaluation is judged that has not come yet; 0: it is not.
        """
        self.recurring = recurring
        self._completions = completions_per_step
        self._steps: deque[float] = deque(maxlen=_NEWEST)
        self._between: deque[float] = deque(maxlen=_NEWEST)
        self._first: list[float] = []

    def add_step(self, seconds: float) -> None:
        """A step took so long."""
        (self._first if len(self._first) < _WARM_UP else self._steps).append(seconds)

    def add_between(self, step: int, seconds: float) -> None:
        """So long passed from the end of a step to the begin of the next one."""
        due = [work for work in self.recurring if work.is_due(step)]
        usual = statistics.median(self._between) if self._between else 0.0
        if not due:
            self._between.append(seconds)
        for work in due:
            work.seconds.append(max(0.0, seconds - usual) / len(due))

    @property
    def step_seconds(self) -> float | None:
        """What a step takes now; None: none was timed."""
        timed = self._steps or self._first
        return statistics.fmean(timed) if timed else None

    def left(self, step: int, last: int) -> float | None:
        """Seconds from the end of a step to the end of the last one.

        Args:
            step: The one that is done.
            last: The last one.

        Returns:
            None before a step was timed.
        """
        if self.step_seconds is None:
            return None
        between = statistics.fmean(self._between) if self._between else 0.0
        seconds = (last - step) * (self.step_seconds + between)
        for work in self.recurring:
            times = work.times(step, last)
            if work.seconds:
                seconds += times * statistics.fmean(work.seconds)
            elif self._completions:  # before it has come: as long as a step for as many completions
                seconds += times * self.step_seconds * work.completions / self._completions
        return seconds
