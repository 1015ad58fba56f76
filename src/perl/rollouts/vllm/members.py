"""What a process knows of each vLLM server, and of each update that servers are given: two records.

what servers answer -> Member; Update -> Version
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from perl.rollouts.engine import Form, Proof
from perl.rollouts.vllm.answers import ServerFacts, Standing
from perl.rollouts.vllm.http import VllmServer
from perl.rollouts.vllm.lost_answers import LostAnswers
from perl.rollouts.vllm.weight_labels import WeightLabel
from perl.run.host import Fleet


@dataclass(eq=False)
class Version:
    """An update as servers know it.

    Attributes:
        form: None: the base as the servers serve it.
        path: Its folder as servers see it.
        fleet: Brings that folder to the servers and tells them of it; None: they see it, and this process tells them.
        forget: Deletes it, if that is up to this process.
        proof: What a server that has it must answer; None: nothing is known.
        users: Requests that need it and are not answered, and servers that read it.
    """

    name: str
    form: Form | None
    path: str = ""
    fleet: Fleet | None = None
    forget: Callable[[], None] | None = None
    proof: Proof | None = None
    users: int = 0


@dataclass(eq=False)
class Member:
    """A server and what is known of it.

    Attributes:
        position: Among all servers.
        standing: What it was when it was met; each answer is of this server or none.
        adapters: Names of this run's that it serves.
        weights: Merged weights that it holds, if they are ours.
        label: The server's string for it.
        trusted: Nobody needs to look whether it is still the server that it was.
        compared: What it writes was compared with the policy since it last began to serve.
        late: It serves, and is given no requests before it has the current version.
        behind: It was late when others began to answer with that version, and must prove itself before it does.
        catching_up: Gives it the current version.
        awaited: Version that the main process, another one, is giving it as far as is known here.
        refuted: It answers, and not like the policy.
        barred: The process that failed a comparison, after which only another process is used.
        outstanding: Completions that it is to write.
        lost: What became of its answers.
        denied: It refuses access, and will until something is fixed.
        answered: When its last answer came, by the loop's clock.
        tasks: What is under way there; cancelled when it is lost.
    """

    server: VllmServer
    position: int = 0
    serving: bool = False
    facts: ServerFacts | None = None
    standing: Standing | None = None
    adapters: set[str] = field(default_factory=set)
    weights: str | None = None
    trusted: bool = False
    compared: bool = False
    late: bool = False
    behind: bool = False
    catching_up: asyncio.Task[bool] | None = None
    awaited: str | None = None
    refuted: bool = False
    barred: tuple[str | None, str] | None = None
    outstanding: int = 0
    lost: LostAnswers = field(default_factory=LostAnswers)
    denied: bool = False
    answered: float = -math.inf
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    watch: asyncio.Task[None] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    looks: int = 0
    seen: Standing | None = None
    reason: str = "was not contacted yet"

    def __post_init__(self) -> None:
        """Has no label yet."""
        self.label = WeightLabel(self.server)

    @property
    def url(self) -> str:
        """Its address."""
        return self.server.url

    def forget(self) -> None:
        """It may be another server from now on."""
        self.trusted = self.compared = self.late = self.behind = False
        self.awaited = None
        self.standing, self.weights = None, None
        self.adapters = set()
        self.label.forget()
