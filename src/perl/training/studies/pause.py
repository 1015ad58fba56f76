"""Ends a cell after a step, for the time being: whether it goes on is decided beside the others.

step -> whether to stop
"""

from collections.abc import Mapping
from typing import Any

from perl.run.host import Host


class PausedAfter(Host):
    """A host that stops its run once a step was logged; the same command goes on from the checkpoint."""

    def __init__(self, step: int) -> None:
        """Takes the step."""
        self._step, self._reached = step, False

    def logged(self, step: int, logs: Mapping[str, Any]) -> None:  # noqa: ARG002 (the host's signature)
        """A step was logged."""
        self._reached = self._reached or step >= self._step

    def stop_asked(self) -> bool:
        """Whether it was this one or a later one."""
        return self._reached
