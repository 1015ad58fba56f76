"""How long a training will still take: what a step takes, and what comes between steps now and then.

seconds of steps, seconds between them -> seconds left

A mean over all of the time would count an evaluation that comes every fiftieth step as part of each step, and would
know nothing of one that has not come yet.
"""

import statistics
from collections import deque
from dataclasses import dataclass, field

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
        return (last - step) * (self.step_seconds + between) + sum(
            work.times(step, last) * self._of(work) for work in self.recurring
        )

    def _of(self, work: Recurring) -> float:
        """Seconds that a piece of work takes; before it has come as long as a step for as many completions."""
        if work.seconds:
            return statistics.fmean(work.seconds)
        return (self.step_seconds or 0.0) * work.completions / self._completions if self._completions else 0.0
