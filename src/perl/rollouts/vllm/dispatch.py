"""Requests to whichever server has room, whatever servers come and go.

requests -> queue -> server -> Sampled, each request once

Everything here, in ``liveness.py`` and in ``held_versions.py`` runs in one asyncio loop.
"""

import asyncio
import contextlib
import functools
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from perl.errors import PerlError, RolloutError
from perl.rollouts.engine import EngineSampling, OnGroup, Request, Sampled
from perl.rollouts.vllm.answers import AccessError, ServerDownError
from perl.rollouts.vllm.connections import Connections
from perl.rollouts.vllm.giving import FIRST_TOKEN_SECONDS
from perl.rollouts.vllm.growing import GrowingGroup
from perl.rollouts.vllm.held_versions import (
    ChangedServerError,
    LateServerError,
    Versions,
)
from perl.rollouts.vllm.http import DYING_SECONDS, VllmServer
from perl.rollouts.vllm.liveness import HEALTH_SECONDS, Servers
from perl.rollouts.vllm.lost_answers import MOST_IN_A_ROW, MOST_LOSSES
from perl.rollouts.vllm.members import Member, Version
from perl.rollouts.vllm.shared_health import SharedHealth
from perl.run.host import Fleet

MOST_OUTSTANDING = 256
"""Completions that one server writes at a time; more wait here, for whichever server has room."""

# Other processes may still ask for the version before the current one, and for a folder on a server that came back.
_KEPT_NAMES, _KEPT_FOLDERS = 2, 4
# Errors that servers answer to one request, after which the request and not the server is at fault.
_MOST_REFUSALS = 4
_CLOSE_SECONDS = 2.0
_SLICE_SECONDS = 0.2


class Rollouts:
    """The requests of one call, answered one by one."""

    def __init__(self, count: int) -> None:
        """Waits for so many requests."""
        self._groups: list[list[Sampled] | None] = [None] * count
        self._left = count
        self._done = threading.Event()
        self._error: BaseException | None = None
        if not count:
            self._done.set()

    def result(self) -> list[list[Sampled]]:
        """The completions of each request, in the order of the requests; waits for them.

        Raises:
            RolloutError: A server refuses a request, or none answers for too long.
        """
        while not self._done.wait(_SLICE_SECONDS):  # in slices, so that Ctrl-C is heard
            pass
        if self._error is not None:
            raise self._error
        return [group for group in self._groups if group is not None]

    def put(self, position: int, group: list[Sampled]) -> None:
        """Answers a request."""
        if self._groups[position] is not None:
            raise RuntimeError(f"request {position} was answered twice")
        self._groups[position] = group
        self._left -= 1
        if not self._left:
            self._done.set()

    def fail(self, error: BaseException) -> None:
        """Ends the wait; the first error counts."""
        if not self._done.is_set():
            self._error = error
            self._done.set()


@dataclass(eq=False)
class _Job:
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
    refusals: int = 0
    losses: int = 0
    before: Member | None = None


@dataclass(frozen=True)
class Place:
    """Where this process is among those that use the same servers.

    Attributes:
        rank: Its number.
        ranks: How many there are.
        run: Name of the run, the same on all of them; None: it shares nothing with others.
        ahead: Updates behind the newest that the others may still ask for.
    """

    rank: int = 0
    ranks: int = 1
    run: str | None = None
    ahead: int = 0


class Dispatcher:
    """The queue before the servers. Its methods are called within the loop.

    Attributes:
        retried: Requests that were sent again.
        continued: Requests for the rest of completions that another version had begun.
    """

    def __init__(
        self,
        servers: Sequence[VllmServer],
        *,
        base_name: str | None,
        main: bool,
        timeout_seconds: float,
        stall_seconds: float,
        place: Place,
        connections: Connections,
        fleet: Fleet | None = None,
    ) -> None:
        """Connects to nothing yet; see :class:`perl.rollouts.vllm.servers.ServerPool`."""
        self.versions = Versions(base_name, main)
        self._health = SharedHealth(place.run)
        self.servers = Servers(servers, self.versions, self, self._health, timeout_seconds, stall_seconds, fleet)
        self.retried = self.continued = 0
        self._ahead = place.ahead
        self._most_in_hand = connections.completions
        # Where this process begins: each has the same number of servers before the next one's first.
        first = place.rank * len(servers) // place.ranks
        self._order = {m: (i - first) % len(servers) for i, m in enumerate(self.servers.members)}
        self._tried = False
        self._kept: list[Version] = []
        self._unloads = main and fleet is None
        if main and fleet is not None:
            self.versions.needless = self._needless  # unloaded with the next update
        self._jobs: dict[int, _Job] = {}  # all that are not answered, by number
        self._queue: deque[_Job] = deque()  # of these, those that no server has in hand; lowest number first
        self._next_number = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._callbacks = ThreadPoolExecutor(1, "perl-rollouts")  # a slow reward must not stop the loop

    async def load(self, version: Version) -> None:
        """Makes a version the current one; merged weights wait until nothing is under way.

        The first one must reach all servers, so that one that is not fit for the run ends it. Later ones must reach
        enough of them: see ``quorum.py``.

        Raises:
            PerlError: A server cannot load it before something is fixed.
        """
        if version.form == "merged":
            await self._idle.wait()
        self._kept.append(version)
        self.versions.take(version)
        if self.versions.main:
            if any(m.facts and version.name in m.facts.adapters for m in self.servers.members):
                raise PerlError(f"a server has an adapter named {version.name} already", hint="choose another name")
            for member in self.servers.members:
                member.trusted = False  # a new adapter would also fit a server that was restarted with another base
            if self.servers.begun:
                await self.servers.bring_up()
            else:
                await self.servers.each(lambda member: self.versions.ensure(member, version, again=False))
            # The base, put back over weights that another run left, does not show that servers take this run's updates.
            self.servers.begun |= self.versions.needed in (None, version.form)
        else:  # the main process loads it
            for member in self.servers.serving():
                member.trusted, member.awaited = False, version.name
        for job in self._jobs.values():
            if job.group is not None:
                job.stop.set()
        self._retire()

    async def start(self, requests: Sequence[Request], sampling: EngineSampling, on_group: OnGroup | None) -> Rollouts:
        """Queues requests for the current version."""
        rollouts, version = Rollouts(len(requests)), self.versions.current
        for position, request in enumerate(requests):
            number = self._next_number
            self._next_number += request.count  # one for each completion, which may come to be asked for by itself
            job = _Job(number, position, request, sampling, version, rollouts, on_group)
            if request.continues:
                job.group, job.places = GrowingGroup(request, sampling), tuple(range(request.count))
            self._jobs[job.number] = job
            self._queue.append(job)
            version.users += 1
            self._idle.clear()
        self.more()
        return rollouts

    async def trial(self, request: Request, sampling: EngineSampling) -> dict[str, list[Sampled]]:
        """By address: what each server that serves writes; at least one.

        The first time all must answer. Later on those that are late are given nothing before they have proven
        themselves, if there is a proof, and are compared at the next trial.
        """

        async def ask(member: Member) -> list[Sampled]:
            version = self.versions.current
            answer = self.versions.answer(
                member, version, lambda model: member.server.complete(model, request, sampling)
            )
            try:
                answers = await asyncio.wait_for(answer, FIRST_TOKEN_SECONDS)
            except TimeoutError:
                raise ServerDownError(f"writes nothing within {FIRST_TOKEN_SECONDS:.0f} seconds") from None
            member.compared = True
            name = version.name or self.versions.model(version)
            return [Sampled(token_ids, log_probs, name) for token_ids, log_probs in answers]

        most = self._tried and self.versions.current.proof is not None
        found = await self.servers.each(ask, most=most)
        for member in self.servers.serving():
            member.compared = member.compared and member.url in found
        self._tried = True
        return found

    async def unload(self, belongs: Callable[[str, str], bool]) -> int:
        """Makes servers forget adapters that are not ours.

        Args:
            belongs: Whether one is to be forgotten, by its name and its folder as the server sees it.

        Returns:
            How many were.
        """

        async def unload(member: Member) -> int:
            if member.standing is None or member.facts is None or not member.facts.loads_adapters:
                return 0
            names = [name for name, path in member.standing.adapters.items() if belongs(name, path)]
            for name in names:
                await member.server.unload_adapter(name)
            return len(names)

        return sum((await self.servers.each(unload)).values())

    async def drop(self, failures: Mapping[str, str]) -> None:
        """Loses servers that failed a comparison, by address, until another process answers there.

        Args:
            failures: The reason of each.
        """
        for member in self.servers.members:
            reason = failures.get(member.url)
            if reason is not None and member.standing is not None:
                member.barred = member.standing.process, " ".join(member.standing.base)
                self.servers.lose(member, reason)

    async def close(self) -> bool:
        """Stops everything; servers that answer at once forget what was loaded.

        Returns:
            Whether all did that may know something of it.
        """
        self.end(RolloutError("the engine was closed"))
        await self.servers.stop()
        released = (asyncio.wait_for(member.label.release(), _CLOSE_SECONDS) for member in self.servers.serving())
        await asyncio.gather(*map(_quietly, released))
        if self._unloads:  # else the servers end with the run
            ours = {version.name for version in self._kept}
            forget = [
                _quietly(member.server.unload_adapter(name, _CLOSE_SECONDS))
                for member in self.servers.serving()
                for name in sorted(member.adapters & ours)
            ]
            await asyncio.gather(*forget)
        forgotten = all(member.serving or member.facts is None for member in self.servers.members)
        for member in self.servers.members:
            await member.server.close()
        self._health.close()
        self._callbacks.shutdown(wait=False, cancel_futures=True)
        return forgotten

    def more(self) -> None:
        """Gives requests to servers, the first one first, each to the server with the fewest completions to write.

        Among those with equally few each process begins at another one, since none knows what the others ask for.
        """
        while self._queue and len(self._jobs) - len(self._queue) < self._most_in_hand:
            count = self._queue[0].request.count
            room = [m for m in self.servers.ready() if not m.outstanding or m.outstanding + count <= MOST_OUTSTANDING]
            if not room:
                return
            job = self._queue.popleft()
            if job.group is not None:
                self._renew(job)
            member = min(room, key=lambda m: (m is job.before, m.outstanding, self._order[m]))
            member.outstanding += count
            job.member, job.task = member, asyncio.create_task(self._run(member, job))
            member.tasks.add(job.task)
            job.task.add_done_callback(functools.partial(self._ended, job, member))

    def take_back(self, member: Member) -> int:
        """Puts what a lost server had in hand to the front of the queue."""
        back = [job for job in self._jobs.values() if job.member is member]
        for job in back:
            job.member = job.task = None
        member.outstanding = member.lost.in_a_row = 0
        self._queue = deque(sorted([*back, *self._queue], key=lambda job: job.number))
        self.retried += len(back)
        return len(back)

    def waits(self) -> bool:
        """Whether a request waits for a server."""
        return bool(self._queue)

    def end(self, error: BaseException) -> None:
        """No request will be answered."""
        for rollouts in {job.rollouts for job in self._jobs.values()}:
            self._fail(rollouts, error)

    async def _run(self, member: Member, job: _Job) -> None:
        """Asks a server; the request is answered, or back in the queue, or its call has failed."""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            answers = await self.versions.answer(member, job.version, functools.partial(self._ask, member, job))
        except LateServerError:
            self.servers.wait_for(member)
            self._put_back(member, job)
            return
        except (ChangedServerError, AccessError) as error:  # it may answer with anything; others may let us in
            self.servers.lose(member, str(error))
            return
        except ServerDownError as error:
            await self._lost(member, job, error, began)
            return
        except RolloutError as error:
            self._fail(job.rollouts, error)
            return
        except PerlError as error:  # restarted in a way that must be fixed; others go on
            self.servers.lose(member, str(error))
            return
        member.answered = clock()
        member.lost.came(began, member.answered)
        self._drop(job)
        if job.group is not None:
            self._go_on(job, job.group.add(job.places, answers, self._name(job.version)))
            answers = job.group.sampled() if job.group.finished else []
        if answers:
            self._callbacks.submit(self._deliver, job, answers, asyncio.get_running_loop())
        self._retire()
        self.more()

    async def _ask(self, member: Member, job: _Job, model: str) -> list[Any]:
        """Completions, or parts of those of a request that continues."""
        if job.group is not None:
            return await member.server.stream(model, job.request, job.sampling, job.stop)
        answers = await member.server.complete(model, job.request, job.sampling, tries=1, counted=True)
        return [Sampled(token_ids, log_probs, self._name(job.version)) for token_ids, log_probs in answers]

    def _name(self, version: Version) -> str:
        return version.name or self.versions.model(version)

    def _go_on(self, job: _Job, places: Sequence[int]) -> None:
        """What is left of a request that was given up is asked for before all that came after it."""
        first = job.number - job.places[0]
        for of_part, request in job.group.left(places) if job.group is not None else ():
            part = replace(job, number=first + of_part[0], request=request, places=of_part, member=None, task=None)
            self._jobs[part.number] = part
            self._queue.append(part)
            part.version.users += 1
            self._idle.clear()
            self.continued += 1
        self._queue = deque(sorted(self._queue, key=lambda waiting: waiting.number))

    def _renew(self, job: _Job) -> None:
        """A request that continues is asked of the newest version."""
        job.version.users -= 1
        job.version, job.stop = self.versions.current, asyncio.Event()
        job.version.users += 1

    async def _lost(self, member: Member, job: _Job, error: ServerDownError, began: float) -> None:
        """An answer was lost: it alone is requested again, unless its server is unhealthy too."""
        ended = asyncio.get_running_loop().time()
        job.refusals, job.losses = job.refusals + error.answered, job.losses + 1
        if job.refusals >= _MOST_REFUSALS or job.losses >= MOST_LOSSES:
            self._fail(job.rollouts, RolloutError(f"servers fail at a request again and again: {error}"))
            return
        try:
            if error.answered:
                await asyncio.sleep(DYING_SECONDS)
            await member.server.health(HEALTH_SECONDS)
        except (ServerDownError, PerlError):
            self.servers.lose(member, str(error))
            return
        member.lost.lost(began, ended)
        seconds = member.lost.cut_after_seconds
        if seconds is not None:
            what = f"answers of {member.url} that take longer are cut off after {seconds:.3g} seconds: {error}"
            hint = "raise the timeout of the proxy before it (in nginx: proxy_read_timeout), or name the server itself"
            self._fail(job.rollouts, RolloutError(what, hint=hint))
        elif member.lost.in_a_row >= MOST_IN_A_ROW:
            self.servers.lose(member, f"{error}, {MOST_IN_A_ROW} times in a row")
        else:
            self._again(member, job)

    def _again(self, member: Member, job: _Job) -> None:
        """A request is sent again, to another server if one has room."""
        job.before = member
        self.retried += 1
        self._put_back(member, job)

    def _put_back(self, member: Member, job: _Job) -> None:
        """Puts a request back to the front of the queue."""
        member.outstanding -= job.request.count
        job.member = job.task = None
        self._queue = deque(sorted([job, *self._queue], key=lambda waiting: waiting.number))
        self.more()

    def _ended(self, job: _Job, member: Member, task: asyncio.Task[None]) -> None:
        """A defect ends the call instead of leaving it waiting."""
        member.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(job.rollouts, error)

    def _deliver(self, job: _Job, group: list[Sampled], loop: asyncio.AbstractEventLoop) -> None:
        """Hands a group over, in the thread for that."""
        try:
            if job.on_group is not None:
                job.on_group(job.position, group)
            job.rollouts.put(job.position, group)
        except Exception as error:  # noqa: BLE001 (the caller's, who gets it from result)
            job.rollouts.fail(error)
            loop.call_soon_threadsafe(self._fail, job.rollouts, error)

    def _fail(self, rollouts: Rollouts, error: BaseException) -> None:
        """Ends a call and all its requests."""
        rollouts.fail(error)
        dropped = [job for job in self._jobs.values() if job.rollouts is rollouts]
        self._queue = deque(job for job in self._queue if job.rollouts is not rollouts)
        for job in dropped:
            if job.task is not None and job.task is not asyncio.current_task():
                job.task.cancel()
            self._drop(job)
        self.more()

    def _drop(self, job: _Job) -> None:
        """A request needs nothing any more."""
        del self._jobs[job.number]
        job.version.users -= 1
        if job.member is not None:
            job.member.outstanding -= job.request.count
        if not self._jobs:
            self._idle.set()

    def _retire(self) -> None:
        """Forgets versions that nobody needs."""
        for version in self._kept[: -_KEPT_NAMES - self._ahead] if self._unloads else ():
            for member in self.servers.serving():
                if not version.users and version.name in member.adapters:
                    member.adapters.discard(version.name)
                    self.servers.spawn(_quietly(member.server.unload_adapter(version.name)))
        for version in [version for version in self._kept[: 1 - _KEPT_FOLDERS - self._ahead] if not version.users]:
            self._kept.remove(version)
            if version.forget is not None:
                self._callbacks.submit(version.forget)

    def _needless(self, member: Member) -> tuple[str, ...]:
        """Adapters that a server has and that nobody asks for any more."""
        needed = {version.name for version in self._kept[-_KEPT_NAMES - self._ahead :]}
        needed |= {version.name for version in self._kept if version.users}
        return tuple(sorted(member.adapters - needed))


async def _quietly(call: Awaitable[None]) -> None:
    """A call whose failure changes nothing."""
    with contextlib.suppress(ServerDownError, PerlError, TimeoutError):
        await call
