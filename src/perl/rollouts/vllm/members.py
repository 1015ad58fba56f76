"""What the pool knows of a vLLM server, of its answers that never came, and of an update: records.

what a server answers -> Member; Update -> Version
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from perl.errors import BrokenPromiseError
from perl.rollouts.engine import ExpectedLogProbs, Form
from perl.rollouts.vllm.answers import ServerFacts, ServerIdentity
from perl.rollouts.vllm.http import VllmServer

CUTS = 3
"""Answers cut off after the same time, while none that took longer ever came, that are no chance."""
# How equal these times are, and the shortest timeout that anybody would set.
_SPREAD, _SHORTEST_TIMEOUT_SECONDS = 0.1, 2.0


class ServerState(Enum):
    """What a server may be asked."""

    DOWN = auto()
    """Nothing: it does not answer, or cannot be used before something is fixed. It is probed."""
    UPDATING = auto()
    """No completions: it is being given the current version."""
    READY = auto()
    """Completions: it has the current version."""
    REFUSED = auto()
    """Nothing: it answers, but not like the policy, or lets nobody in. It is probed for another process."""


@dataclass(eq=False)
class Version:
    """An update as servers know it.

    Attributes:
        form: None: the base as the servers serve it.
        path: Its folder as servers see it; of merged weights also their label on the servers.
        forget: Deletes the folder.
        proof: What a server that has it must answer; None: nothing is known.
        users: Requests and loads under way that need it.
    """

    name: str
    form: Form | None
    path: str = ""
    forget: Callable[[], None] | None = None
    proof: ExpectedLogProbs | None = None
    users: int = 0


@dataclass
class LostAnswers:
    """Answers of a server that reports itself healthy which never came: lost by chance, or cut off for their length.

    A proxy with a timeout must not go unnoticed: if requests were repeated until a short answer gets through, a run
    would see short completions only.

    Attributes:
        in_a_row: Lost since the last answer that came. Those that were under way together count once: a proxy that is
            restarted takes all of them.
    """

    in_a_row: int = 0
    _longest_seconds: float = 0.0
    _last_loss: float = -1.0
    _cuts: list[float] = field(default_factory=list)

    def came(self, began: float, ended: float) -> None:
        """An answer came; times in seconds of any clock."""
        self.in_a_row = 0
        self._longest_seconds = max(self._longest_seconds, ended - began)
        self._cuts = [seconds for seconds in self._cuts if seconds > self._longest_seconds]

    def lost(self, began: float, ended: float) -> None:
        """An answer did not come."""
        if began <= self._last_loss:
            return  # it was under way when the one before was lost
        self._last_loss = ended
        self.in_a_row += 1
        if ended - began > max(self._longest_seconds, _SHORTEST_TIMEOUT_SECONDS):
            self._cuts.append(ended - began)

    @property
    def cut_after_seconds(self) -> float | None:
        """After how long something between ends answers that take longer; None: nothing does, as far as is known."""
        latest = self._cuts[-CUTS:]
        if len(latest) < CUTS or max(latest) - min(latest) > _SPREAD * max(latest):
            return None
        return sum(latest) / CUTS


@dataclass(eq=False)
class Member:
    """A server of the pool.

    Attributes:
        position: Among all servers.
        error: Why it is not ready.
        identity: What it was when it was met; each answer is of this server or none.
        versions: Names of the updates that it has.
        failed: The process that has failed a comparison with the policy, and how; another one may be used again.
        outstanding: Completions that it is to write.
        answered: When its last answer came, by the loop's clock.
        tasks: What is under way there; cancelled when it is dropped.
        watch: Looks whether it hangs.
        losses: What became of its answers.
    """

    server: VllmServer
    position: int = 0
    state: ServerState = ServerState.DOWN
    error: Exception | None = None
    facts: ServerFacts | None = None
    identity: ServerIdentity | None = None
    versions: set[str] = field(default_factory=set)
    failed: tuple[object, BrokenPromiseError] | None = None
    outstanding: int = 0
    answered: float = -math.inf
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    watch: asyncio.Task[None] | None = None
    losses: LostAnswers = field(default_factory=LostAnswers)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    looks: int = 0
    seen: ServerIdentity | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return self.server.url

    @property
    def takes_weights(self) -> bool:
        """Whether it has a label for its weights."""
        return self.facts is None or self.facts.takes_weights

    def forget(self) -> None:
        """It may be another server from now on."""
        self.identity, self.versions = None, set()
