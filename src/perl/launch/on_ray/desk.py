"""Where a run's driver, its processes and its servers leave what the others must know: an actor beside the run.

stop asked by the driver -> processes; steps, lines and ends of processes -> driver; updates -> servers

The actor lives as long as the driver. What waits for nothing else belongs here, and nothing that takes time.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass
class News:
    """What came since the driver last asked.

    Attributes:
        step: The newest that was logged.
        text: Its numbers as a line shows them.
        lines: Warnings of the processes.
        starts: How often the main process has started.
        ends: How many processes have ended for good.
    """

    step: int = 0
    text: str = ""
    lines: list[str] = field(default_factory=list)
    starts: int = 0
    ends: int = 0


class Desk:
    """The actor's class; its methods are called by name through Ray."""

    def __init__(self) -> None:
        """Nothing was said yet."""
        self._news, self._stop = News(), False
        self._ends: dict[int, Any] = {}
        self._updates: dict[str, Any] = {}
        self._lock = threading.Lock()

    def start(self) -> int:
        """The main process has started; how often it had before."""
        with self._lock:
            self._news.starts += 1
            return self._news.starts - 1

    def log(self, step: int, text: str) -> None:
        """A step was logged."""
        with self._lock:
            self._news.step, self._news.text = step, text

    def say(self, line: str) -> None:
        """A process has something to say to the user."""
        with self._lock:
            self._news.lines.append(line)

    def news(self) -> News:
        """What there is to show; lines are given once."""
        with self._lock:
            found = replace(self._news, ends=len(self._ends))
            self._news.lines = []
            return found

    def end(self, rank: int, outcome: Any) -> None:  # noqa: ANN401 (Outcome of the module that imports this one)
        """A process has ended as it would each time that it is started; the first word counts."""
        self._ends.setdefault(rank, outcome)

    def ends(self) -> dict[int, Any]:
        """How processes have ended that need not be started again, by their ranks, the first one first."""
        return dict(self._ends)

    def stop(self) -> None:
        """The run is to end after the step in hand."""
        self._stop = True

    def stop_asked(self) -> bool:
        """Whether somebody has asked for that."""
        return self._stop

    def publish(self, name: str, files: Sequence[Any]) -> None:
        """Keeps where the files of an update are in Ray's object store.

        Args:
            name: Of the update.
            files: One reference, in a list so that Ray does not fetch it for this actor.
        """
        self._updates[name] = files[0]

    def update(self, name: str) -> list[Any]:
        """The reference of an update's files, in a list; empty: it is not kept any more."""
        return [self._updates[name]] if name in self._updates else []

    def updates(self) -> list[str]:
        """Names of those that are kept."""
        return list(self._updates)

    def clear(self) -> None:
        """None of the updates is needed any more."""
        self._updates.clear()

    def forget(self, name: str) -> None:
        """An update is not needed any more."""
        self._updates.pop(name, None)
