"""Servers that come, go and hang.

servers -> those that serve

A server serves once it has answered like the current version. It is lost when it does not answer, writes nothing while
completions are due, or is not the server that was proven any more, and is probed until it is back.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from perl.errors import BrokenPromiseError, Mistake, PerlError, RolloutError, raise_all
from perl.rollouts.vllm.answers import AccessError, ServerDownError
from perl.rollouts.vllm.held_versions import Member, Versions
from perl.rollouts.vllm.http import VllmServer
from perl.rollouts.vllm.weight_labels import RENEW_SECONDS
from perl.run.warned import warn

_REVIVE_SECONDS, _LONGEST_REVIVE_SECONDS = 1.0, 10.0
HEALTH_SECONDS = 5.0
_WATCH_SECONDS = 5.0
_SAY_SECONDS = 15.0
_GO_ON = "start one again; the same command goes on"

_log = logging.getLogger("perl")

T = TypeVar("T")


class Work(Protocol):
    """What the servers are for."""

    def more(self) -> None:
        """A server serves."""
        ...

    def take_back(self, member: Member) -> int:
        """A server is lost; returns how many requests it had."""
        ...

    def waits(self) -> bool:
        """Whether a request waits for a server."""
        ...

    def end(self, error: BaseException) -> None:
        """No request will be answered."""
        ...


class Servers:
    """All servers, whether they serve or not.

    Attributes:
        members: In the order of their addresses.
        lost: How often one was.
        begun: Whether all took an update of the run; from then on one that is wrong is lost, instead of ending it.
    """

    def __init__(
        self,
        servers: Sequence[VllmServer],
        versions: Versions,
        work: Work,
        timeout_seconds: float,
        stall_seconds: float,
    ) -> None:
        """Connects to nothing yet.

        Args:
            servers: To use.
            versions: What they must answer with.
            work: Notified when one serves or is lost.
            timeout_seconds: Without any server, after which the work ends.
            stall_seconds: Without a sign of life, after which a server is lost.
        """
        self.members = [Member(server) for server in servers]
        self.lost = 0
        self.begun = False
        self._versions, self._work = versions, work
        self._timeout, self._stall = timeout_seconds, stall_seconds
        self._waiters: set[asyncio.Future[None]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._said: set[str] = set()

    async def connect(self) -> None:
        """Returns once a server serves.

        Raises:
            PerlError: A server that answers is not what it must be.
            RolloutError: None answers for too long.
        """
        self.spawn(self._starve())
        self.spawn(self._renew())

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
            if outcome is None:
                self._serve(member)
            else:
                member.reason = str(outcome)
                warn("PRL338", "rollouts: %s does not answer yet: %s", member.url, member.reason)
                self.spawn(self._revive(member))
        await self._someone()

    def serving(self) -> list[Member]:
        """Those that serve."""
        return [member for member in self.members if member.serving]

    async def each(self, ask: Callable[[Member], Coroutine[Any, Any, T]]) -> dict[str, T]:
        """By address: what each server that serves answers.

        Args:
            ask: The question.

        Returns:
            At least one answer; servers that fail are lost.

        Raises:
            PerlError: Whatever a server must be fixed for.
            RolloutError: None answers for too long.
        """
        while True:
            await self._someone()
            tasks = {member: asyncio.create_task(ask(member)) for member in self.serving()}
            for member, task in tasks.items():
                member.tasks.add(task)
                task.add_done_callback(member.tasks.discard)
            found = await self._settle(tasks)
            if found:
                return found

    async def _settle(self, tasks: Mapping[Member, asyncio.Task[T]]) -> dict[str, T]:
        """The results of tasks that ask servers; of those that fail, none."""
        found, mistakes = {}, []
        await asyncio.wait(tasks.values())
        for member, task in tasks.items():
            error = None if task.cancelled() else task.exception()
            if isinstance(error, ServerDownError) or (self.begun and isinstance(error, PerlError)):
                self.lose(member, str(error))
            elif error is not None:
                mistakes.append(error)
            elif not task.cancelled():
                found[member.url] = task.result()
        if mistakes:
            raise mistakes[0]
        return found

    async def _someone(self) -> None:
        """Returns once a server serves."""
        while not self.serving():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def _serve(self, member: Member) -> None:
        member.serving = True
        member.watch = self.spawn(self._watch(member))
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._work.more()

    def lose(self, member: Member, reason: str) -> None:
        """A server does not answer: what is under way there is stopped, and it is probed until it is back."""
        if not member.serving:
            return
        member.serving, member.reason = False, reason
        member.forget()
        for task in [*member.tasks, member.watch]:
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        self.lost += 1
        back = self._work.take_back(member)
        warn("PRL338", "rollouts: %s is lost (%s); %d requests are sent again", member.url, reason, back)
        self.spawn(self._revive(member))
        self._work.more()

    async def _revive(self, member: Member) -> None:
        """Waits until a server is there, and right."""
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            pause = min(max(_REVIVE_SECONDS, 1.5 * pause), _LONGEST_REVIVE_SECONDS)
            try:
                member.forget()
                await member.server.health(HEALTH_SECONDS)
                await self._versions.prove(member)
                member.denied = False
                break
            except ServerDownError as error:
                member.reason, member.refuted, member.denied = str(error), False, False
                _log.debug("rollouts: %s is not back: %s", member.url, member.reason)
            except PerlError as error:
                member.reason = str(error)
                member.refuted, member.denied = isinstance(error, BrokenPromiseError), isinstance(error, AccessError)
                if member.reason not in self._said:
                    self._said.add(member.reason)
                    warn("PRL339", "rollouts: not used: %s", member.reason)
                if all(other.refuted for other in self.members):  # then there is nothing to wait for
                    reasons = "; ".join(other.reason for other in self.members)
                    hint = "start the servers with the command of `perl rollout command`"
                    self._end(BrokenPromiseError(reasons, "rollout", hint))
        warn("PRL338", "rollouts: %s serves", member.url)
        self._serve(member)

    async def _renew(self) -> None:
        """Shows other runs that the merged weights on the servers have an owner."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            await asyncio.gather(*map(self._renew_label, self.serving()))

    async def _renew_label(self, member: Member) -> None:
        try:
            if not await member.label.renew():
                self.lose(member, "for a while this process could not say whose its weights are")
        except ServerDownError:
            return  # which is found out elsewhere
        except PerlError as error:
            self.lose(member, str(error))

    async def _watch(self, member: Member) -> None:
        """Loses a server that hangs: no answer, or no token is read or written while completions are due."""
        clock = asyncio.get_running_loop().time
        moved, tokens = clock(), None
        while member.serving:
            await asyncio.sleep(min(_WATCH_SECONDS, self._stall / 4))
            if not member.tasks:
                moved = clock()
                continue
            try:
                await member.server.health(self._stall)
                counted = await member.server.tokens_so_far(self._stall)
            except (ServerDownError, PerlError) as error:
                self.lose(member, str(error))
                return
            if counted is None or counted != tokens or not member.outstanding:
                moved, tokens = clock(), counted
            elif clock() - moved > self._stall:
                self.lose(member, f"neither reads nor writes a token for {self._stall:.0f} seconds")

    async def _starve(self) -> None:
        """While no server serves and a request waits: logs it, and gives up in the end."""
        clock = asyncio.get_running_loop().time
        since = logged = None
        while True:
            await asyncio.sleep(min(1.0, self._timeout / 10))
            if self.serving() or not (self._work.waits() or self._waiters):
                since = logged = None
                continue
            since = since or clock()
            left = since + self._timeout - clock()
            reasons = "; ".join(f"{member.url}: {member.reason}" for member in self.members)
            if all(member.denied for member in self.members):
                self._end(RolloutError(f"no vLLM server lets this run in: {reasons}"))
                since = logged = None
            elif left <= 0:
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

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Does something beside the requests; a defect in it ends them."""

        def ended(task: asyncio.Task[None]) -> None:
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
