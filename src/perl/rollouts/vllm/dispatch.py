"""Requests to whichever server has room, whatever servers come and go.

requests -> queue -> server -> Sampled, each request once

Everything here, in ``liveness.py`` and in ``policy_versions.py`` runs in one asyncio loop.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from perl.errors import BrokenPromiseError, PerlError, RolloutError
from perl.rollouts.engine import EngineSampling, OnGroup, Request, Sampled
from perl.rollouts.vllm.answers import AccessError, ChangedServerError, GrowingGroup, Part, ServerDownError
from perl.rollouts.vllm.http import DYING_SECONDS, FIRST_TOKEN_SECONDS, VllmServer
from perl.rollouts.vllm.liveness import HEALTH_SECONDS, Servers
from perl.rollouts.vllm.members import Member, Version
from perl.rollouts.vllm.policy_versions import Versions
from perl.rollouts.vllm.transport import Connections
from perl.run.host import Fleet

MOST_OUTSTANDING = 256
"""Completions that one server writes at a time; more wait here, for whichever server has room."""

# Versions that servers and folders keep although nothing asks for them: the current one, and one that a slow server
# may still be reading.
_KEPT = 2
# Times that a request is repeated, whatever the reason, and answers lost in a row after which a server that reports
# itself healthy is dropped for a while.
_MOST_LOSSES, _MOST_IN_A_ROW = 6, 3
_CLOSE_SECONDS = 2.0


class Rollouts(concurrent.futures.Future[list[list[Sampled]]]):
    """The requests of one call: their completions, in the order of the requests, or the first error."""

    def __init__(self, count: int) -> None:
        """Waits for so many requests."""
        super().__init__()
        self._groups: dict[int, list[Sampled]] = {}
        self._count = count
        if not count:
            self.set_result([])

    def put(self, position: int, group: list[Sampled]) -> None:
        """Answers a request."""
        self._groups[position] = group
        if len(self._groups) == self._count:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it has failed
                self.set_result([self._groups[position] for position in range(self._count)])

    def fail(self, error: BaseException) -> None:
        """Ends the wait; the first error counts."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.set_exception(error)


@dataclass(eq=False)
class _QueuedRequest:
    """A request on its way; ``member`` is the server that has it in hand, ``before`` the one that lost its answer.

    Of one that continues, ``group`` is what there is of the completions of the request that it began as, ``places``
    which of them it asks for, and ``stop`` tells its server to give it up.
    """

    number: int
    position: int
    request: Request
    sampling: EngineSampling
    version: Version
    rollouts: Rollouts
    on_group: OnGroup | None
    group: GrowingGroup | None = None
    places: tuple[int, ...] = ()
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    member: Member | None = None
    task: asyncio.Task[None] | None = None
    losses: int = 0
    before: Member | None = None


class Dispatcher:
    """The queue before the servers. Its methods are called within the loop.

    Attributes:
        retried: Requests that were sent again.
        continued: Requests for the rest of completions that another version had begun.
    """

    def __init__(
        self,
        servers: Sequence[VllmServer],
        connections: Connections,
        *,
        timeout_seconds: float,
        stall_seconds: float,
        fleet: Fleet | None = None,
    ) -> None:
        """Connects to nothing yet; see :class:`perl.rollouts.vllm.servers.ServerPool`."""
        self.versions = Versions(fleet)
        self.servers = Servers(servers, self.versions, self, timeout_seconds, stall_seconds, fleet)
        self.retried = self.continued = 0
        self._most_in_hand = connections.completions
        self._kept: list[Version] = []
        self._unanswered: dict[int, _QueuedRequest] = {}  # all that are not answered, by number
        self._queue: deque[_QueuedRequest] = deque()  # of these, those that no server has in hand; lowest number first
        self._next_number = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._callbacks = concurrent.futures.ThreadPoolExecutor(
            1, "perl-rollouts"
        )  # a slow reward must not stop the loop

    async def load(self, version: Version) -> None:
        """Makes a version the current one; merged weights wait until nothing is under way.

        Raises:
            PerlError: A server cannot load the first one before something is fixed.
        """
        if version.form == "merged":
            await self._idle.wait()
        self._kept.append(version)
        self.versions.take(version)
        await self.servers.update()
        for queued in self._unanswered.values():
            if queued.group is not None:
                queued.stop.set()
        self._retire()

    async def start(self, requests: Sequence[Request], sampling: EngineSampling, on_group: OnGroup | None) -> Rollouts:
        """Queues requests for the current version."""
        rollouts, version = Rollouts(len(requests)), self.versions.current
        for position, request in enumerate(requests):
            number = self._next_number
            self._next_number += request.count  # one for each completion, which may come to be asked for by itself
            queued = _QueuedRequest(number, position, request, sampling, version, rollouts, on_group)
            if request.continues:
                queued.group, queued.places = GrowingGroup(request, sampling), tuple(range(request.count))
            self._add(queued)
        self.more()
        return rollouts

    async def trial(self, request: Request, sampling: EngineSampling) -> dict[str, list[Sampled]]:
        """By address: what each server that is ready writes; at least one."""
        version = self.versions.current

        async def ask(member: Member) -> list[Sampled]:
            complete = functools.partial(
                member.server.complete, request=request, sampling=sampling, seconds=FIRST_TOKEN_SECONDS
            )
            parts = await self.versions.answer(member, version, complete)
            return [part.sampled(self.versions.named(version)) for part in parts]

        return await self.servers.each(ask)

    async def unload(self, belongs: Callable[[str, str], bool]) -> int:
        """Makes servers forget adapters that are not ours.

        Args:
            belongs: Whether one is to be forgotten, by its name and its folder as the server sees it.

        Returns:
            How many were.
        """

        async def unload(member: Member) -> int:
            if member.identity is None or member.facts is None or not member.facts.loads_adapters:
                return 0
            names = [name for name, path in member.identity.adapters.items() if belongs(name, path)]
            for name in names:
                await member.server.unload_adapter(name)
            return len(names)

        return sum((await self.servers.each(unload)).values())

    async def drop(self, failures: Mapping[str, str]) -> None:
        """Drops servers that failed a comparison, by address, until another process answers there.

        Args:
            failures: The reason of each.
        """
        for member in self.servers.members:
            if member.url in failures:
                self.servers.drop(member, BrokenPromiseError(failures[member.url]))

    async def close(self) -> bool:
        """Stops everything; servers that answer at once forget what was loaded.

        Returns:
            Whether all did that may know something of it.
        """
        self.end(RolloutError("the engine was closed"))
        await self.servers.stop()
        ready = self.servers.ready()
        calls = [self.versions.release(member, _CLOSE_SECONDS) for member in ready]
        calls += [
            member.server.unload_adapter(name, _CLOSE_SECONDS)
            for member in ready
            if member.facts is not None and member.facts.loads_adapters
            for name in sorted(member.versions)
        ]
        await asyncio.gather(*map(_quietly, calls))
        for member in self.servers.members:
            await member.server.close()
        self._callbacks.shutdown(wait=False, cancel_futures=True)
        return all(member in ready or member.facts is None for member in self.servers.members)

    def more(self) -> None:
        """Gives requests to servers, the first one first, each to the server with the fewest completions to write."""
        while self._queue and len(self._unanswered) - len(self._queue) < self._most_in_hand:
            count = self._queue[0].request.count
            room = [m for m in self.servers.ready() if not m.outstanding or m.outstanding + count <= MOST_OUTSTANDING]
            if not room:
                return
            queued = self._queue.popleft()
            if queued.group is not None:  # one that continues is asked of the newest version
                queued.version.users -= 1
                queued.version, queued.stop = self.versions.current, asyncio.Event()
                queued.version.users += 1
            member = min(room, key=lambda m: (m is queued.before, m.outstanding))
            member.outstanding += count
            queued.member, queued.task = member, asyncio.create_task(self._run(member, queued))
            member.tasks.add(queued.task)
            queued.task.add_done_callback(functools.partial(self._ended, queued, member))

    def take_back(self, member: Member) -> int:
        """Puts what a dropped server had in hand to the front of the queue."""
        back = [queued for queued in self._unanswered.values() if queued.member is member]
        for queued in back:
            self._requeue(queued)
        self.retried += len(back)
        return len(back)

    def waits(self) -> bool:
        """Whether a request waits for a server."""
        return bool(self._queue)

    def end(self, error: BaseException) -> None:
        """No request will be answered."""
        for rollouts in {queued.rollouts for queued in self._unanswered.values()}:
            self._fail(rollouts, error)

    async def _run(self, member: Member, queued: _QueuedRequest) -> None:
        """Asks a server; the request is answered, or back in the queue, or its call has failed."""
        clock = asyncio.get_running_loop().time
        began = clock()
        ask: Callable[..., Awaitable[list[Part]]] = functools.partial(member.server.complete, counted=True)
        if queued.group is not None:
            ask = functools.partial(member.server.stream, stop=queued.stop)
        ask = functools.partial(ask, request=queued.request, sampling=queued.sampling)
        try:
            parts = await self.versions.answer(member, queued.version, ask)
        except (ChangedServerError, AccessError) as error:  # it may answer with anything; others may let us in
            self.servers.drop(member, error)
        except ServerDownError as error:
            await self._lost(member, queued, error, began)
        except RolloutError as error:
            self._fail(queued.rollouts, error)
        except PerlError as error:  # restarted in a way that must be fixed; others go on
            self.servers.drop(member, error)
        else:
            member.answered = clock()
            member.losses.came(began, member.answered)
            self._answered(queued, parts)

    def _answered(self, queued: _QueuedRequest, parts: list[Part]) -> None:
        self._remove(queued)
        version = self.versions.named(queued.version)
        answers = [part.sampled(version) for part in parts]
        if queued.group is not None:
            places = queued.group.add(queued.places, parts, version)
            for of_part, request in queued.group.left(places):  # before all that came after it
                number = queued.number - queued.places[0] + of_part[0]
                self._add(replace(queued, number=number, request=request, places=of_part, member=None, task=None))
                self.continued += 1
            answers = queued.group.sampled() if queued.group.finished else []
        if answers:
            self._callbacks.submit(self._deliver, queued, answers, asyncio.get_running_loop())
        self._retire()
        self.more()

    async def _lost(self, member: Member, queued: _QueuedRequest, error: ServerDownError, began: float) -> None:
        """An answer was lost: it alone is requested again, unless its server is unhealthy too."""
        ended = asyncio.get_running_loop().time()
        queued.losses += 1
        if queued.losses >= _MOST_LOSSES:
            self._fail(queued.rollouts, RolloutError(f"servers fail at a request again and again: {error}"))
            return
        try:
            if error.answered:
                await asyncio.sleep(DYING_SECONDS)
            await member.server.health(HEALTH_SECONDS)
        except (ServerDownError, PerlError):
            self.servers.drop(member, error)
            return
        member.losses.lost(began, ended)
        seconds = member.losses.cut_after_seconds
        if seconds is not None:
            what = f"answers of {member.url} that take longer are cut off after {seconds:.3g} seconds: {error}"
            hint = "raise the timeout of the proxy before it (in nginx: proxy_read_timeout), or name the server itself"
            self._fail(queued.rollouts, RolloutError(what, hint=hint))
        elif member.losses.in_a_row >= _MOST_IN_A_ROW:
            self.servers.drop(member, ServerDownError(f"{error}, {_MOST_IN_A_ROW} times in a row"))
        else:
            queued.before = member
            self.retried += 1
            self._requeue(queued)
            self.more()

    def _ended(self, queued: _QueuedRequest, member: Member, task: asyncio.Task[None]) -> None:
        """A defect ends the call instead of leaving it waiting."""
        member.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(queued.rollouts, error)

    def _deliver(self, queued: _QueuedRequest, group: list[Sampled], loop: asyncio.AbstractEventLoop) -> None:
        """Hands a group over, in the thread for that."""
        try:
            if queued.on_group is not None:
                queued.on_group(queued.position, group)
            queued.rollouts.put(queued.position, group)
        except Exception as error:  # noqa: BLE001 (the caller's, who gets it from result)
            queued.rollouts.fail(error)
            loop.call_soon_threadsafe(self._fail, queued.rollouts, error)

    def _fail(self, rollouts: Rollouts, error: BaseException) -> None:
        """Ends a call and all its requests."""
        rollouts.fail(error)
        dropped = [queued for queued in self._unanswered.values() if queued.rollouts is rollouts]
        self._queue = deque(queued for queued in self._queue if queued.rollouts is not rollouts)
        for queued in dropped:
            if queued.task is not None and queued.task is not asyncio.current_task():
                queued.task.cancel()
            self._remove(queued)
        self.more()

    def _add(self, queued: _QueuedRequest) -> None:
        self._unanswered[queued.number] = queued
        queued.version.users += 1
        self._idle.clear()
        self._enqueue(queued)

    def _requeue(self, queued: _QueuedRequest) -> None:
        """Takes a request from its server, back to its place in the queue."""
        if queued.member is not None:
            queued.member.outstanding -= queued.request.count
        queued.member = queued.task = None
        self._enqueue(queued)

    def _enqueue(self, queued: _QueuedRequest) -> None:
        self._queue.append(queued)
        if len(self._queue) > 1 and self._queue[-2].number > queued.number:
            self._queue = deque(sorted(self._queue, key=lambda waiting: waiting.number))

    def _remove(self, queued: _QueuedRequest) -> None:
        """A request needs nothing any more."""
        del self._unanswered[queued.number]
        queued.version.users -= 1
        if queued.member is not None:
            queued.member.outstanding -= queued.request.count
        if not self._unanswered:
            self._idle.set()

    def _retire(self) -> None:
        """Makes servers and folders forget versions that nobody needs."""
        for version in [version for version in self._kept[:-_KEPT] if not version.users]:
            self._kept.remove(version)
            for member in self.servers.ready():
                if version.form == "adapter" and version.name in member.versions:
                    self.servers.spawn(self._unload(member, version.name))
            if version.forget is not None:
                self._callbacks.submit(version.forget)

    async def _unload(self, member: Member, name: str) -> None:
        """Makes a server forget an adapter; if it is stopped before, :meth:`close` does."""
        await _quietly(member.server.unload_adapter(name))
        member.versions.discard(name)


async def _quietly(call: Awaitable[None]) -> None:
    """A call whose failure changes nothing."""
    with contextlib.suppress(ServerDownError, PerlError, TimeoutError):
        await call
