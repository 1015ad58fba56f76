"""Which update a vLLM server answers with, how it comes to have it, and whether it is still the server that was proven.

Version, server -> an answer with that version

What identifies a server is read at the first contact, at each load and after each answer: when its process started, its
base, the label of its weights, the folder of our adapter. An answer that was written across a change is dropped, and
a server that changed is lost until it is proven again. :class:`~perl.rollouts.vllm.http.ServerDownError` goes through.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from perl.errors import BrokenPromiseError, Mistake, PerlError, RolloutError, raise_all
from perl.rollouts.engine import EngineSampling, Form, Proof, Request
from perl.rollouts.vllm.answers import AdapterGoneError, ServerDownError, ServerFacts, Standing
from perl.rollouts.vllm.http import DEV_MODE, LORA_FLAGS, ONE_REPLICA, VllmServer
from perl.rollouts.vllm.lost_answers import LostAnswers
from perl.rollouts.vllm.weight_labels import WeightLabel, finished, is_owned, owner_of

_MOST_TRIES = 3
# For the first token that a server writes, when it still warms up.
FIRST_TOKEN_SECONDS = 180.0
# Answers that come meanwhile are vouched for by one question.
_GATHER_SECONDS = 0.02
_OTHER_SERVERS = "give this run servers that no other run uses, or wait until the other one has ended"

T = TypeVar("T")


class ChangedServerError(ServerDownError):
    """A server is not the one that was proven: what it wrote meanwhile is worth nothing."""


class LateServerError(Exception):
    """A server does not have a version yet that the main process is giving it."""


@dataclass(eq=False)
class Version:
    """An update as servers know it.

    Attributes:
        form: None: the base as the servers serve it.
        path: Its folder as servers see it.
        bring: Puts that folder where a server, by its position, sees it; may raise OSError. None: it does already.
        forget: Deletes it, if that is up to this process.
        proof: What a server that has it must answer; None: nothing is known.
        users: Requests that need it and are not answered, and servers that read it.
    """

    name: str
    form: Form | None
    path: str = ""
    bring: Callable[[int], None] | None = None
    forget: Callable[[], None] | None = None
    proof: Proof | None = None
    users: int = 0


@dataclass(eq=False)
class Member:
    """A server and what is known of it.

    Attributes:
        position: Among all servers.
        standing: What it was when it was met; each answer is of this server or none.
        adapters: Names that it serves.
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


class Versions:
    """The base that all servers serve, and the updates to it that they must answer with.

    Attributes:
        current: What new requests are answered with.
        reloads: How often a server was given again what it had forgotten.
        main: Whether this is the main process, which loads updates.
        needed: In what form updates will come; None: it is not known yet.
    """

    def __init__(self, base_name: str | None, main: bool) -> None:
        """Begins with the base.

        Args:
            base_name: Name under which all must serve it; None: that of the first server that answers.
            main: False: it only loads updates that are absent.
        """
        self.current = Version("", None)
        self.reloads = 0
        self._base_name, self.main = base_name, main
        self._names: set[str] = set()
        self._foreign: dict[str, str] = {}  # weights of another run, by url, that were reported to the caller
        self._adopted: set[str] = set()
        self._longest_tokens = 0
        self.needed: Form | None = None

    def take(self, version: Version) -> None:
        """Makes a version the current one."""
        self.current = version
        self._names.add(version.name)

    def model(self, version: Version) -> str:
        """The name to ask a server for."""
        return version.name if version.form == "adapter" else (self._base_name or "")

    async def meet(self, member: Member) -> None:
        """Reads a server's identity.

        Raises:
            PerlError: It serves another base than the others, or cannot hold what is needed.
            ChangedServerError: It is another one than it was.
        """
        facts = await member.server.facts()
        mistakes = []
        if self._base_name is None:
            self._base_name = facts.base_name
        elif facts.base_name != self._base_name:
            hint = "all servers must serve one base, under one --served-model-name"
            mistakes.append(Mistake(f"{member.url} serves {facts.base_name}, not {self._base_name}", hint=hint))
        raise_all(PerlError, mistakes + self._unable(member.url, facts))
        member.facts = facts
        now = await member.server.standing(facts.takes_weights)
        # The main process changes weights; the others learn of it by the name in the next answer.
        _check_same(member.standing, now, weights=self.main)
        member.standing, member.trusted = replace(now, weights=owner_of(now.weights)), True

    def check(self, longest_tokens: int, form: Form | None, members: list[Member]) -> None:
        """Refuses servers that cannot do what is needed, now and when they come back.

        Args:
            longest_tokens: Of a prompt with its completion.
            form: In which they will be given updates; None: it is not known yet.
            members: Those that may have answered.
        """
        self._longest_tokens, self.needed = longest_tokens, form
        raise_all(PerlError, [p for m in members if m.facts for p in self._unable(m.url, m.facts)])

    def _unable(self, url: str, facts: ServerFacts) -> list[Mistake]:
        found = []
        if facts.longest < self._longest_tokens:
            hint = f"start it with --max-model-len {self._longest_tokens}, or ask for shorter completions"
            message = f"{url} holds {facts.longest} tokens of prompt and completion, {self._longest_tokens} are needed"
            found.append(Mistake(message, hint=hint))
        if self.needed == "adapter" and not facts.loads_adapters:
            found.append(Mistake(f"{url} cannot load adapters", hint=LORA_FLAGS))
        if self.needed is not None and facts.replicas > 1:
            found.append(_several(url, facts.replicas))
        if self.needed == "merged" and not facts.takes_weights:
            found.append(Mistake(f"{url} cannot take weights", hint=DEV_MODE))
        return found

    async def answer(self, member: Member, version: Version, ask: Callable[[str], Awaitable[T]]) -> T:
        """What a server answers with a version, which is loaded again if it turns out to have forgotten it.

        Args:
            member: The server.
            version: That must answer.
            ask: The request, given the name to ask for.

        Raises:
            ChangedServerError: It is not the server that was proven, or not any more.
            LateServerError: The main process is still giving it the version; it was asked nothing.
        """
        for _ in range(_MOST_TRIES):
            await self.ensure(member, version)
            try:
                answer = await ask(self.model(version))
            except AdapterGoneError:
                await self._same(member, version)
                if member.standing is None or member.standing.process is None:
                    raise ChangedServerError(f"has forgotten {version.name}, as after a restart") from None
                member.adapters.discard(version.name)  # someone unloaded it
                continue
            await self._same(member, version)
            return answer
        raise ServerDownError(f"forgets {version.name or 'its model'} again and again")

    async def _same(self, member: Member, version: Version) -> None:
        """Returns if a server is the one that was proven, and had the version all the while.

        Raises:
            ChangedServerError: It is not.
            PerlError: It serves adapters of others, beside which it computes this version wrongly.
        """
        before, now = member.standing, await self._look(member)
        _check_same(before, now, weights=version.form != "merged")
        held = owner_of(now.weights)
        if version.form == "merged" and held != version.name:
            raise ChangedServerError(f"holds the weights {held or 'of the base'}, not {version.name}")
        if version.form == "adapter" and not self.main and version.name not in self._adopted:
            self._adopted.add(version.name)  # the main process may have the same folder under another path
            version.path = now.adapters.get(version.name, version.path)
        if version.form == "adapter" and now.adapters.get(version.name, version.path) != version.path:
            raise ChangedServerError(f"has another adapter under the name {version.name}")
        self._refuse_company(member, version.form, now)

    async def _look(self, member: Member) -> Standing:
        """What a server is, by a question that was begun after this call; those that call meanwhile share it."""
        mine = member.looks
        async with member.looking:
            if member.looks > mine and member.seen is not None:
                return member.seen
            await asyncio.sleep(_GATHER_SECONDS)
            member.looks += 1
            member.seen = None
            member.seen = await member.server.standing(member.facts is None or member.facts.takes_weights)
            return member.seen

    def _refuse_company(self, member: Member, form: Form | None, now: Standing) -> None:
        """Refuses a server whose other users would make it compute a version wrongly."""
        others = sorted(set(now.adapters) - self._names)
        if form != "adapter" and others and member.facts is not None and member.facts.on_cpu:
            what = "vLLM for CPUs computes the base wrongly beside requests for adapters"
            raise PerlError(f"{member.url} serves adapters of others ({_listed(others)}); {what}", hint=_OTHER_SERVERS)

    async def ensure(self, member: Member, version: Version, again: bool = True) -> None:
        """Loads a version on a server that does not have it.

        Args:
            member: The server.
            version: That it shall have.
            again: It had it before, as far as is known.

        Raises:
            LateServerError: The main process is still giving it the version.
            PerlError: It cannot, before something is fixed.
        """
        async with member.lock:
            if not member.trusted:
                await self.meet(member)
            if member.awaited == version.name and not _arrived(member, version):
                raise LateServerError(version.name)
            if member.facts is not None and member.facts.replicas > 1 and version.form is not None:
                raise_all(PerlError, [_several(member.url, member.facts.replicas)])
            version.users += 1  # its folder stays
            try:
                await _bring(version, member)
                if version.form == "adapter" and version.name not in member.adapters:
                    await member.server.load_adapter(version.name, version.path)
                    member.adapters.add(version.name)
                elif version.form == "merged" and member.weights != version.name:
                    await self._take_over(member, version)
                else:
                    return
            finally:
                version.users -= 1
            self.reloads += again

    async def has_arrived(self, member: Member) -> bool:
        """Whether a server has by now the version that the main process is giving it.

        Raises:
            ChangedServerError: It is another one than it was.
        """
        now = await self._look(member)
        _check_same(member.standing, now, weights=False)
        member.standing = replace(now, weights=owner_of(now.weights))
        return member.awaited != self.current.name or _arrived(member, self.current)

    async def _take_over(self, member: Member, version: Version) -> None:
        """Puts merged weights on a server whose weights are the base's or ours, or which the caller knows of."""
        if member.facts is not None and not member.facts.takes_weights:
            raise PerlError(f"{member.url} cannot take weights", hint=DEV_MODE)
        held = owner_of(await member.server.weight_version())
        ours = held is None or finished(held) in self._names
        if held != version.name:
            if not ours and self._foreign.get(member.url) != held:
                if not self.main:  # they may be those that come next
                    raise ServerDownError(f"holds the weights {held}")
                raise _taken(member.url, held)
            fresh = held is None or not ours
            announced = await member.label.announce(version.name, fresh)
            if announced:
                await member.server.load_weights(version.name, version.path)
            if not announced or not await member.label.kept():
                raise _taken(member.url, owner_of(await member.server.weight_version()))
        if held != version.name or self.main:
            await member.label.keep(version.name)
        self._foreign.pop(member.url, None)
        member.weights = version.name
        if member.standing is not None:
            member.standing = replace(member.standing, weights=version.name)

    async def foreign_weights(self, member: Member) -> str | None:
        """Name of the weights that someone left on a server; the next merged ones may take their place.

        Raises:
            PerlError: Somebody else uses the server in a way that this run would disturb, or be disturbed by.
        """
        held = owner_of(await member.server.weight_version())
        now = await self._look(member)
        others = sorted(set(now.adapters) - self._names)
        if self.needed == "merged" and others:
            what = f"serves adapters of others ({_listed(others)}), under which merged weights would change the base"
            raise PerlError(f"{member.url} {what}", hint=_OTHER_SERVERS)
        self._refuse_company(member, self.needed, now)
        if member.standing is not None:
            member.standing = replace(member.standing, weights=held)
        if held is None or finished(held) in self._names:
            return None
        if await is_owned(member.server):
            raise PerlError(f"{member.url} has the merged weights of another run ({held})", hint=_OTHER_SERVERS)
        self._foreign[member.url] = held
        return held

    async def prove(self, member: Member, again: bool = True) -> None:
        """Makes a server that was lost, or was late, answer like the current version.

        Args:
            member: The server.
            again: It had updates before, as far as is known.

        Raises:
            ServerDownError: It does not answer.
            BrokenPromiseError: It answers, and not like the version.
            PerlError: It is not what it must be.
        """
        while True:
            version = self.current
            async with member.lock:
                await self.meet(member)
            standing = member.standing
            if standing is not None and member.barred == (standing.process, " ".join(standing.base)):
                raise BrokenPromiseError(f"{member.url} is still the process that failed its comparison")
            held = owner_of(await member.server.weight_version())
            # Another run's weights that were reported to the caller may wait for the base, but not serve an adapter.
            known = self._foreign.get(member.url) if version.form is None else None
            if self.main and held is not None and finished(held) not in self._names and held != known:
                raise _taken(member.url, held)
            await self.ensure(member, version, again)
            try:
                await asyncio.wait_for(self._compare(member, version), FIRST_TOKEN_SECONDS)
            except TimeoutError:
                raise ServerDownError(f"writes nothing within {FIRST_TOKEN_SECONDS:.0f} seconds") from None
            except AdapterGoneError:
                raise ServerDownError("was restarted once more") from None
            await self._same(member, version)
            if version is self.current:
                member.refuted, member.barred = False, None
                return

    async def _compare(self, member: Member, version: Version) -> None:
        """Compares a server with what is known of a version; where nothing is, it writes a token."""
        model, proof = self.model(version), version.proof
        if proof is None:
            await member.server.complete(model, Request((0,), 1), EngineSampling(1.0, 1, ()))
            return
        difference = proof.difference(await member.server.next_log_probs(model, proof.prompts, proof.temperature))
        if not difference <= proof.tolerance:
            if version.form == "adapter":
                await member.server.unload_adapter(version.name)
            what = f"log-probabilities differ by {difference:.1e} nats in the mean (at most {proof.tolerance:g})"
            hint = "was it restarted with another base, type or --logprobs-mode?"
            raise BrokenPromiseError(f"{member.url} does not answer like the policy: its {what}", hint=hint)


def _arrived(member: Member, version: Version) -> bool:
    """Notes that a server has a version which another process gave it, if it reported so when it was last looked at."""
    now = member.standing
    if now is None or (now.weights != version.name if version.form == "merged" else version.name not in now.adapters):
        return False
    member.awaited = None
    if version.form == "merged":
        member.weights = version.name
    else:
        member.adapters.add(version.name)
    return True


async def _bring(version: Version, member: Member) -> None:
    """Sees that a server finds a version's folder, where that is not shared.

    Raises:
        ServerDownError: It cannot be brought there.
    """
    if version.bring is None or version.name in (*member.adapters, member.weights):
        return
    try:
        await asyncio.to_thread(version.bring, member.position)
    except OSError as error:
        raise ServerDownError(str(error)) from None


def _check_same(before: Standing | None, now: Standing, weights: bool) -> None:
    """Refuses another server than before.

    Args:
        before: None: it is met for the first time.
        now: What it reports.
        weights: Whether its weights must be the same too.

    Raises:
        ChangedServerError: Says what is different.
    """
    if before is None:
        return
    if now.process != before.process:
        raise ChangedServerError("was restarted, or another server answers in its place")
    if now.base != before.base:
        raise ChangedServerError(f"serves {' '.join(now.base)}, not {' '.join(before.base)}")
    if weights and owner_of(now.weights) != before.weights:
        raise ChangedServerError(f"got weights from someone else ({owner_of(now.weights) or 'those of the base'})")


def _several(url: str, replicas: int) -> Mistake:
    """Of a server whose replicas cannot be compared with the policy one by one, since it chooses which one answers."""
    return Mistake(f"{url} has {replicas} data-parallel replicas, of which only one would be proven", hint=ONE_REPLICA)


def _taken(url: str, held: str | None) -> RolloutError:
    return RolloutError(f"{url} got weights from someone else ({held})", hint="restart it once they have ended")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
