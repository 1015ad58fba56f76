"""Which update a vLLM server answers with, and how it comes to have it.

Version, server -> an answer with that version

Knows nothing of queues or of servers that do not answer: a :class:`~perl.rollouts.vllm_http.ServerDownError` goes
through.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from perl.errors import PerlError, Problem, RolloutError, raise_all
from perl.rollouts.engine import EngineSampling, Form, Request
from perl.rollouts.lost_answers import LostAnswers
from perl.rollouts.vllm_http import (
    DEV_MODE,
    LORA_FLAGS,
    UNTOUCHED,
    AdapterGoneError,
    ServerDownError,
    ServerFacts,
    VllmServer,
)

_MOST_TRIES = 3
# For the first token that a server writes, when it still warms up.
FIRST_TOKEN_SECONDS = 180.0

T = TypeVar("T")


@dataclass(eq=False)
class Version:
    """An update as servers know it.

    Attributes:
        form: None: the base as the servers serve it.
        path: Its folder as servers see it.
        folder: The same here, if it is ours to delete.
        users: Requests that need it and are not answered.
    """

    name: str
    form: Form | None
    path: str = ""
    folder: Path | None = None
    users: int = 0


@dataclass(eq=False)
class Member:
    """A server and what is known of it.

    Attributes:
        adapters: Names that it serves; another set once it was found to have forgotten them.
        weights: Merged weights that it holds, if they are ours.
        trusted: Nobody needs to look whether it is still the server that it was.
        compared: What it writes was compared with the policy since it last began to serve.
        outstanding: Completions that it is asked for.
        lost: What became of its answers.
        denied: It refuses access, and will until something is mended.
        tasks: What is under way there; cancelled when it is lost.
    """

    server: VllmServer
    serving: bool = False
    facts: ServerFacts | None = None
    adapters: set[str] = field(default_factory=set)
    weights: str | None = None
    trusted: bool = False
    compared: bool = False
    outstanding: int = 0
    lost: LostAnswers = field(default_factory=LostAnswers)
    denied: bool = False
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    watch: asyncio.Task[None] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    reason: str = "was not asked yet"

    @property
    def url(self) -> str:
        """Its address."""
        return self.server.url


class Versions:
    """The base that all servers serve, and the updates to it that they must answer with.

    Attributes:
        current: What new requests are answered with.
        reloads: How often a server was given again what it had forgotten.
    """

    def __init__(self, base_name: str | None, leads: bool) -> None:
        """Begins with the base.

        Args:
            base_name: Name under which all must serve it; None: that of the first server that answers.
            leads: Whether this process loads updates; the others only where they find them absent.
        """
        self.current = Version("", None)
        self.reloads = 0
        self._base_name, self._leads = base_name, leads
        self._names: set[str] = set()
        self._foreign: dict[str, str] = {}  # weights of someone else, by url, that the caller was told of
        self._longest_tokens = 0
        self._needed: Form | None = None

    @property
    def leads(self) -> bool:
        """Whether this process loads updates."""
        return self._leads

    def take(self, version: Version) -> None:
        """Makes a version the current one."""
        self.current = version
        self._names.add(version.name)

    def model(self, version: Version) -> str:
        """The name to ask a server for."""
        return version.name if version.form == "adapter" else (self._base_name or "")

    async def meet(self, member: Member) -> None:
        """Asks a server what it is.

        Raises:
            PerlError: It serves another base than the others, or cannot hold what is needed.
        """
        facts = await member.server.facts()
        problems = []
        if self._base_name is None:
            self._base_name = facts.base_name
        elif facts.base_name != self._base_name:
            hint = "all servers must serve one base, under one --served-model-name"
            problems.append(Problem(f"{member.url} serves {facts.base_name}, not {self._base_name}", hint=hint))
        raise_all(PerlError, problems + self._unable(member.url, facts))
        member.facts, member.trusted = facts, True

    def check(self, longest_tokens: int, form: Form | None, members: list[Member]) -> None:
        """Refuses servers that cannot do what is needed, now and when they come back.

        Args:
            longest_tokens: Of a prompt with its completion.
            form: In which they will be given updates; None: it is not known yet.
            members: Those that may have answered.
        """
        self._longest_tokens, self._needed = longest_tokens, form
        raise_all(PerlError, [p for m in members if m.facts for p in self._unable(m.url, m.facts)])

    def _unable(self, url: str, facts: ServerFacts) -> list[Problem]:
        found = []
        if facts.longest < self._longest_tokens:
            hint = f"start it with --max-model-len {self._longest_tokens}, or ask for shorter completions"
            message = f"{url} holds {facts.longest} tokens of prompt and completion, {self._longest_tokens} are needed"
            found.append(Problem(message, hint=hint))
        if self._needed == "adapter" and not facts.loads_adapters:
            found.append(Problem(f"{url} cannot load adapters", hint=LORA_FLAGS))
        if self._needed == "merged" and not facts.takes_weights:
            found.append(Problem(f"{url} cannot take weights", hint=DEV_MODE))
        return found

    async def answer(self, member: Member, version: Version, ask: Callable[[str], Awaitable[T]]) -> T:
        """What a server answers with a version, which is loaded again if it turns out to have forgotten it.

        Args:
            member: The server.
            version: That must answer.
            ask: The request, given the name to ask for.
        """
        for _ in range(_MOST_TRIES):
            adapters = member.adapters
            await self.ensure(member, version)
            if version.form == "merged" and not await self._holds(member, version):
                continue
            try:
                answer = await ask(self.model(version))
            except AdapterGoneError:
                if member.adapters is adapters:  # the first to find out
                    member.adapters, member.trusted = set(), False
                continue
            # Restarted since it was asked what it holds, or given other weights, it may have answered with those.
            if version.form != "merged" or await self._holds(member, version):
                return answer
        raise ServerDownError(f"forgets {version.name or 'its model'} again and again")

    async def _holds(self, member: Member, version: Version) -> bool:
        if await member.server.weight_version() == version.name:
            return True
        if not member.lock.locked():
            member.weights, member.trusted = None, False
        return False

    async def ensure(self, member: Member, version: Version, again: bool = True) -> None:
        """Loads a version on a server that does not have it.

        Args:
            member: The server.
            version: That it shall have.
            again: It had it before, as far as is known.

        Raises:
            PerlError: It cannot, before something is mended.
        """
        async with member.lock:
            if not member.trusted:
                await self.meet(member)
            if version.form == "adapter" and version.name not in member.adapters:
                await member.server.load_adapter(version.name, version.path)
                member.adapters.add(version.name)
            elif version.form == "merged" and member.weights != version.name:
                await self._take_over(member, version)
            else:
                return
            self.reloads += again

    async def _take_over(self, member: Member, version: Version) -> None:
        """Puts merged weights on a server whose weights are the base's or ours, or which the caller knows of."""
        held = await member.server.weight_version()
        if held != version.name:
            if held not in (None, UNTOUCHED, *self._names) and self._foreign.get(member.url) != held:
                if not self._leads:  # they may be those that come next
                    raise ServerDownError(f"holds the weights {held}")
                raise RolloutError(f"{member.url} got weights from someone else ({held})", hint="restart it")
            await member.server.load_weights(version.name, version.path)
        self._foreign.pop(member.url, None)
        member.weights = version.name

    async def stranger(self, member: Member) -> str | None:
        """Name of the weights that someone else put on a server; the next merged ones may take their place."""
        held = await member.server.weight_version()
        if held in (None, UNTOUCHED, *self._names):
            return None
        self._foreign[member.url] = str(held)
        return held

    async def prove(self, member: Member) -> None:
        """Makes a server write a token with the current version.

        Raises:
            ServerDownError: It does not.
            PerlError: It is not what it must be.
        """
        while True:
            version = self.current
            await self.ensure(member, version)
            held = await member.server.weight_version()
            # Weights of someone else that the caller was told of may wait for the base, but not serve an adapter.
            known = self._foreign.get(member.url) if version.form is None else None
            if self._leads and held not in (None, UNTOUCHED, *self._names, known):
                raise PerlError(f"{member.url} got weights from someone else ({held})", hint="restart it")
            token = member.server.complete(self.model(version), Request((0,), 1), EngineSampling(1.0, 1, ()))
            try:
                await asyncio.wait_for(token, FIRST_TOKEN_SECONDS)
            except TimeoutError:
                raise ServerDownError(f"writes nothing within {FIRST_TOKEN_SECONDS:.0f} seconds") from None
            except AdapterGoneError:
                raise ServerDownError("was restarted once more") from None
            if version is self.current:
                return
