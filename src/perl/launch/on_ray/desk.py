"""Where a run's driver, its processes and its servers leave what the others must know: an actor beside the run.

stop asked by the driver -> processes; steps and lines of processes -> driver; updates -> servers

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
    """

    step: int = 0
    text: str = ""
    lines: list[str] = field(default_factory=list)


class Desk:
    """The actor's class; its methods are called by name through Ray."""

    def __init__(self) -> None:
        """Nothing was said yet."""
        self._news, self._stop, self._starts = News(), False, 0
        self._updates: dict[str, Any] = {}
        self._lock = threading.Lock()

    def start(self) -> int:
        """The main process has started; how often it had before."""
        self._starts += 1
        return self._starts - 1

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
            found = replace(self._news)
            self._news.lines = []
            return found

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
