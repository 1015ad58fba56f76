"""Servers that come, go and hang: each is in one state of :class:`~perl.rollouts.vllm.members.ServerState`.

servers -> those that are ready

A server is dropped when it does not answer, follow an update in time or write anything while completions are due, or
is not the server that was proven any more. Then it is probed until it is back, has the current version, and has proven
that it answers like it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from perl.errors import BrokenPromiseError, Mistake, PerlError, RolloutError, raise_all, warn
from perl.rollouts.vllm.answers import AccessError, ServerDownError
from perl.rollouts.vllm.http import VllmServer
from perl.rollouts.vllm.members import Member, ServerState
from perl.rollouts.vllm.policy_versions import Versions
from perl.run.host import Fleet

HEALTH_SECONDS = 5.0
LEAST_SECONDS, TIMES_AS_LONG = 30.0, 4.0
"""Once one server has followed an update, the others have this many times as long as that took, at least so long."""

_PROBE_SECONDS, _LONGEST_PROBE_SECONDS = 1.0, 10.0
_WATCH_SECONDS = 5.0
_SAY_SECONDS = 15.0
_GO_ON = "start one again; the same command goes on"
_AS_PRINTED = "start the servers with the command of `perl rollout command`"

_log = logging.getLogger("perl")

T = TypeVar("T")


class ServerWork(Protocol):
    """What the servers are for."""

    def more(self) -> None:
        """A server is ready."""

    def take_back(self, member: Member) -> int:
        """A server was dropped; returns how many requests it had."""

    def waits(self) -> bool:
        """Whether a request waits for a server."""

    def end(self, error: BaseException) -> None:
        """No request will be answered."""


class Servers:
    """All servers, ready or not.

    Attributes:
        members: In the order of their addresses.
        lost: How often one was dropped.
        begun: Whether all took an update of the run; from then on one that is wrong is dropped, instead of ending it.
    """

    def __init__(
        self,
        servers: Sequence[VllmServer],
        versions: Versions,
        work: ServerWork,
        timeout_seconds: float,
        stall_seconds: float,
        fleet: Fleet | None = None,
    ) -> None:
        """Connects to nothing yet.

        Args:
            servers: To use.
            versions: What they must answer with.
            work: Notified when one is ready or dropped.
            timeout_seconds: Without any server, after which the work ends.
            stall_seconds: Without a sign of life, after which a server is dropped.
            fleet: Says where a server is now; None: it stays where it is.
        """
        self.members = [Member(server, position) for position, server in enumerate(servers)]
        self.lost, self.begun = 0, False
        self._versions, self._work, self._fleet = versions, work, fleet
        self._timeout, self._stall = timeout_seconds, stall_seconds
        self._waiters: set[asyncio.Future[None]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._said: set[str] = set()

    async def connect(self) -> None:
        """Returns once a server is ready.

        Raises:
            PerlError: A server that answers is not what it must be.
            RolloutError: None answers for too long.
        """
        self.spawn(self._starve())

        async def meet(member: Member) -> None:
            await member.server.health(HEALTH_SECONDS)
            await self._versions.meet(member)

        outcomes = await asyncio.gather(*map(meet, self.members), return_exceptions=True)
        mistakes: list[Mistake] = []
        for outcome in outcomes:
            if isinstance(outcome, PerlError):
                mistakes += outcome.mistakes
            elif outcome is not None and not isinstance(outcome, ServerDownError):
                raise outcome
        raise_all(PerlError, mistakes)
        for member, outcome in zip(self.members, outcomes, strict=True):
            if isinstance(outcome, ServerDownError):
                member.error = outcome
                warn("PRL338", "rollouts: %s does not answer yet: %s", member.url, outcome)
                self.spawn(self._bring_back(member))
            else:
                self._serve(member)
        await self._wait_for_any_server()

    def ready(self) -> list[Member]:
        """Those that are."""
        return [member for member in self.members if member.state is ServerState.READY]

    async def each(self, ask: Callable[[Member], Coroutine[Any, Any, T]]) -> dict[str, T]:
        """By address: what each server answers that is ready.

        Args:
            ask: The question.

        Returns:
            At least one answer. Servers that fail are dropped, and so are those that take much longer than the first
            one, once the run has begun.

        Raises:
            PerlError: Whatever a server must be fixed for.
            RolloutError: None answers for too long.
        """
        while True:
            await self._wait_for_any_server()
            tasks = {member: asyncio.create_task(ask(member)) for member in self.ready()}
            for member, task in tasks.items():
                member.tasks.add(task)
                task.add_done_callback(member.tasks.discard)
            await self._in_time(tasks)
            found, mistakes = {}, []
            for member, task in tasks.items():
                error = None if task.cancelled() else task.exception()
                if isinstance(error, ServerDownError) or (self.begun and isinstance(error, PerlError)):
                    self.drop(member, error)
                elif error is not None:
                    mistakes.append(error)
                elif not task.cancelled():
                    found[member.url] = task.result()
            if mistakes:
                raise mistakes[0]
            if found:
                return found

    async def update(self) -> None:
        """Gives the current version to all servers that are ready; the others get it when they come back.

        Raises:
            PerlError: A server cannot take the run's first update before something is fixed.
            RolloutError: None answers for too long.
        """
        version = self._versions.current

        async def load(member: Member) -> None:
            member.state = ServerState.UPDATING
            try:
                await self._versions.load(member, version)
            finally:
                if member.state is ServerState.UPDATING:
                    member.state = ServerState.READY
                    self._work.more()

        await self.each(load)
        # The base, put back over weights that another run left, does not show that servers take this run's updates.
        self.begun |= self._versions.needed in (None, version.form)

    async def _in_time(self, tasks: Mapping[Member, asyncio.Task[T]]) -> None:
        """Returns when all tasks are done; drops servers that are late."""
        clock = asyncio.get_running_loop().time
        began, pending = clock(), set(tasks.values())
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if self.begun and any(not task.cancelled() and task.exception() is None for task in done):
                seconds = max(LEAST_SECONDS, TIMES_AS_LONG * (clock() - began))
                _, pending = await asyncio.wait(pending, timeout=seconds) if pending else ((), pending)
                break
        for member, task in tasks.items():
            if task in pending:
                self.drop(member, ServerDownError("does not follow the other servers in time"))
                task.cancel()
        await asyncio.wait(tasks.values())

    async def _wait_for_any_server(self) -> None:
        """Returns once a server is ready."""
        while not self.ready():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def _serve(self, member: Member) -> None:
        member.state, member.error, member.failed = ServerState.READY, None, None
        member.losses.in_a_row = 0
        member.watch = self.spawn(self._watch(member))
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._work.more()

    def drop(self, member: Member, error: Exception) -> None:
        """A server is not to be used: what is under way there is stopped, and it is probed until it is back."""
        if member.state not in (ServerState.READY, ServerState.UPDATING):
            return
        self._take_out(member, error)
        for task in [*member.tasks, member.watch]:
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        self.lost += 1
        back = self._work.take_back(member)
        warn("PRL338", "rollouts: %s is lost (%s); %d requests are sent again", member.url, error, back)
        self.spawn(self._bring_back(member))
        self._work.more()

    def _take_out(self, member: Member, error: Exception) -> None:
        """Notes why a server is not used; where none answers like the policy there is nothing to wait for."""
        member.error, member.state = error, ServerState.DOWN
        if isinstance(error, BrokenPromiseError | AccessError):
            member.state = ServerState.REFUSED
        if isinstance(error, BrokenPromiseError) and member.identity is not None:
            member.failed = (member.identity.process, member.identity.base), error
        if all(other.state is ServerState.REFUSED for other in self.members):
            reasons = "; ".join(str(other.error) for other in self.members)
            if any(isinstance(other.error, BrokenPromiseError) for other in self.members):
                self._end(BrokenPromiseError(reasons, "rollout", _AS_PRINTED))
            self._end(RolloutError(f"no vLLM server lets this run in: {reasons}"))

    async def _bring_back(self, member: Member) -> None:
        """Waits until a server is there, and right."""
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            pause = min(max(_PROBE_SECONDS, 1.5 * pause), _LONGEST_PROBE_SECONDS)
            try:
                if self._fleet is not None:  # it may have been started again elsewhere
                    try:
                        await member.server.move(await self._fleet.address(member.position))
                    except OSError as error:
                        raise ServerDownError(str(error)) from None
                await member.server.health(HEALTH_SECONDS)
                while await self._versions.readmit(member) is not self._versions.current:
                    pass
                break
            except (ServerDownError, PerlError) as error:
                self._take_out(member, error)
                if isinstance(error, PerlError) and str(error) not in self._said:
                    self._said.add(str(error))
                    warn("PRL339", "rollouts: not used: %s", error)
                _log.debug("rollouts: %s is not back: %s", member.url, error)
        warn("PRL338", "rollouts: %s serves", member.url)
        self._serve(member)

    async def _watch(self, member: Member) -> None:
        """Drops a server that hangs: no answer, or no token is read or written while completions are due."""
        clock = asyncio.get_running_loop().time
        moved, tokens = clock(), None
        interval = min(_WATCH_SECONDS, self._stall / 4)
        while True:
            await asyncio.sleep(interval)
            if not member.tasks or clock() - member.answered < interval:  # an answer is a sign of life too
                moved = clock()
                continue
            try:
                await member.server.health(self._stall)
                counted = await member.server.tokens_so_far(self._stall)
            except (ServerDownError, PerlError) as error:
                self.drop(member, error)
                return
            if counted is None or counted != tokens or not member.outstanding:
                moved, tokens = clock(), counted
            elif clock() - moved > self._stall:
                self.drop(member, ServerDownError(f"neither reads nor writes a token for {self._stall:.0f} seconds"))
                return

    async def _starve(self) -> None:
        """While no server is ready and a request waits: logs it, and gives up in the end."""
        clock = asyncio.get_running_loop().time
        since = logged = None
        while True:
            await asyncio.sleep(min(1.0, self._timeout / 10))
            up = any(member.state in (ServerState.READY, ServerState.UPDATING) for member in self.members)
            if up or not (self._work.waits() or self._waiters):
                since = logged = None
                continue
            since = since or clock()
            left = since + self._timeout - clock()
            reasons = "; ".join(f"{member.url}: {member.error}" for member in self.members)
            if left <= 0:
                message = f"no vLLM server answers, for {self._timeout:.0f} seconds: {reasons}"
                self._end(RolloutError(message, hint=_GO_ON))
                since = logged = None
            elif logged is None or clock() - logged >= _SAY_SECONDS:
                logged = clock()
                warn("PRL338", "rollouts: no vLLM server answers, %.0f seconds left: %s", left, reasons)

    def _end(self, error: BaseException) -> None:
        self._work.end(error)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Does something beside the requests; a defect in it ends them."""

        def ended(task: asyncio.Task[T]) -> None:
            self._background.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self._end(error)

        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(ended)
        return task

    async def stop(self) -> None:
        """Stops all that is under way."""
        tasks = [*self._background, *(task for member in self.members for task in member.tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
