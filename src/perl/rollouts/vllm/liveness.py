"""Servers that come, go and hang.

servers -> those that serve

A server serves once it has answered like the current version. It is lost when it does not answer, writes nothing while
completions are due, or is not the server that was proven any more, and is probed until it is back. One that gets a new
version later than most is late: it serves, and is given no requests before it has that version and has proven itself.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from perl.errors import BrokenPromiseError, Mistake, PerlError, RolloutError, raise_all
from perl.rollouts.vllm.answers import AccessError, ServerDownError
from perl.rollouts.vllm.held_versions import LateServerError, Versions
from perl.rollouts.vllm.http import VllmServer
from perl.rollouts.vllm.members import Member
from perl.rollouts.vllm.quorum import enough
from perl.rollouts.vllm.shared_health import SharedHealth
from perl.rollouts.vllm.weight_labels import RENEW_SECONDS
from perl.run.host import Fleet
from perl.run.warned import warn

_REVIVE_SECONDS, _LONGEST_REVIVE_SECONDS = 1.0, 10.0
HEALTH_SECONDS = 5.0
_WATCH_SECONDS = 5.0
_SAY_SECONDS = 15.0
# For so long a process waits for what the main process loads on a server, before it loads it itself.
_AWAIT_SECONDS = {"adapter": 120.0, "merged": 1800.0}
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.2, 3.0
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
        late: How often one was late with a version.
        begun: Whether all took an update of the run; from then on one that is wrong is lost, instead of ending it.
    """

    def __init__(
        self,
        servers: Sequence[VllmServer],
        versions: Versions,
        work: Work,
        health: SharedHealth,
        timeout_seconds: float,
        stall_seconds: float,
        fleet: Fleet | None = None,
    ) -> None:
        """Connects to nothing yet.

        Args:
            servers: To use.
            versions: What they must answer with.
            work: Notified when one serves or is lost.
            health: What other processes of this machine know of them.
            timeout_seconds: Without any server, after which the work ends.
            stall_seconds: Without a sign of life, after which a server is lost.
            fleet: Says where a server is now; None: it stays where it is.
        """
        self.members = [Member(server, position) for position, server in enumerate(servers)]
        self._fleet = fleet
        self.lost = self.late = 0
        self.begun = False
        self._versions, self._work, self._health = versions, work, health
        self._timeout, self._stall = timeout_seconds, stall_seconds
        self._waiters: set[asyncio.Future[None]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._said: set[str | tuple[str, str]] = set()

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

    def ready(self) -> list[Member]:
        """Those that serve and are not late with the current version."""
        return [member for member in self.members if member.serving and not member.late]

    async def each(self, ask: Callable[[Member], Coroutine[Any, Any, T]], *, most: bool = False) -> dict[str, T]:
        """By address: what each server answers that serves and is not late.

        Args:
            ask: The question.
            most: The answers of most are enough; the others are late then.

        Returns:
            At least one answer; servers that fail are lost.

        Raises:
            PerlError: Whatever a server must be fixed for.
            RolloutError: None answers for too long.
        """
        while True:
            await self._someone()
            tasks = {member: asyncio.create_task(ask(member)) for member in self.ready()}
            for member, task in tasks.items():
                member.tasks.add(task)
                task.add_done_callback(member.tasks.discard)
            late = await enough(tasks.values(), _succeeded) if most else set()
            for member, task in tasks.items():
                if task in late:
                    task.cancel()
                    self._leave_behind(member)
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

    async def bring_up(self) -> None:
        """Returns once enough servers have the current version; the others get it meanwhile.

        Raises:
            RolloutError: None answers for too long.
        """
        members = self.serving()
        for member in members:
            member.late = True
            if member.catching_up is None or member.catching_up.done():
                self._catch_up(member, self._load)
        tasks = {member: member.catching_up for member in members if member.catching_up is not None}
        late = await enough(tasks.values(), lambda task: _succeeded(task) and task.result())
        for member, task in tasks.items():
            if task in late and member.late:
                self.late += 1
                self._say_late(member)
                member.behind = True
        await self._someone()

    def wait_for(self, member: Member) -> None:
        """A server does not have the current version yet, which the main process, another one, is giving it."""
        if member.serving and not member.late:
            self.late += 1
            member.late = True
            self._catch_up(member, self._await)

    def _leave_behind(self, member: Member) -> None:
        """A server does not answer while most do: it proves itself before it is given more requests."""
        if member.serving and not member.late:
            self.late += 1
            self._say_late(member)
            member.late = member.behind = True
            self._catch_up(member, self._load)

    def _say_late(self, member: Member) -> None:
        """Logs it once for each server."""
        if (member.url, "late") not in self._said:
            self._said.add((member.url, "late"))
            warn("PRL338", "rollouts: %s is late with an update; until it has it, it gets no requests", member.url)

    def _catch_up(self, member: Member, get: Callable[[Member], Coroutine[Any, Any, None]]) -> None:
        """Begins to get a server to have the current version; then it is given requests."""

        async def catch_up() -> bool:
            try:
                await get(member)
            except (ServerDownError, PerlError) as error:
                self.lose(member, str(error))
                return False
            member.late = member.behind = False
            self._wake()
            self._work.more()
            return True

        member.catching_up = task = self.spawn(catch_up())
        member.tasks.add(task)
        task.add_done_callback(member.tasks.discard)

    async def _load(self, member: Member) -> None:
        """Loads the current version; a server that is behind proves itself. Either may change meanwhile."""
        versions, loaded = self._versions, None
        while loaded is None or loaded[0] is not versions.current or loaded[1] is not versions.current.proof:
            loaded = versions.current, versions.current.proof
            if not member.behind:
                await versions.ensure(member, loaded[0], again=False)
            if member.behind:  # which it may have become meanwhile
                await versions.prove(member, again=False)

    async def _await(self, member: Member) -> None:
        """Waits for what the main process loads; where that does not come, loads it."""
        clock = asyncio.get_running_loop().time
        pause, until, awaited = _LOOK_SECONDS, 0.0, None
        while True:
            if awaited is not self._versions.current:
                awaited = self._versions.current
                until = clock() + _AWAIT_SECONDS[awaited.form or "merged"]
            if await self._versions.has_arrived(member):
                with contextlib.suppress(LateServerError):  # the main process has begun with the next one
                    await self._load(member)
                    return
            elif clock() > until:
                member.awaited = None
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_LOOK_SECONDS)

    async def _someone(self) -> None:
        """Returns once a server serves and is not late."""
        while not self.ready():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def _serve(self, member: Member) -> None:
        member.serving = True
        member.watch = self.spawn(self._watch(member))
        self._wake()
        self._work.more()

    def _wake(self) -> None:
        """Whoever waits for a server looks again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

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
                await self._look_for(member)
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

    async def _look_for(self, member: Member) -> None:
        """Finds a server that may have been started again elsewhere.

        Raises:
            ServerDownError: It is nowhere.
        """
        if self._fleet is None:
            return
        try:
            url = await self._fleet.address(member.position)
        except OSError as error:
            raise ServerDownError(str(error)) from None
        await member.server.move(url)

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
        interval = min(_WATCH_SECONDS, self._stall / 4)

        async def ask() -> float | None:
            await member.server.health(self._stall)
            return await member.server.tokens_so_far(self._stall)

        while member.serving:
            await asyncio.sleep(interval)
            if not member.tasks or clock() - member.answered < interval:  # an answer is a sign of life too
                moved = clock()
                continue
            try:
                counted = (await self._health.of(member.url, ask, interval)).tokens
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


def _succeeded(task: asyncio.Task[Any]) -> bool:
    """Whether a task that is done has a result."""
    return not task.cancelled() and task.exception() is None
