"""Which update a vLLM server answers with, how it comes to have it, and whether it is still the server that was proven.

Version, server -> an answer with that version

What identifies a server is read at the first contact, at each load and after each answer: when its process started, its
base, the label of its weights, the folder of our adapter. An answer that was written across a change is dropped, and
a server that changed is lost until it is proven again. :class:`~perl.rollouts.vllm.http.ServerDownError` goes through.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from perl.errors import BrokenPromiseError, Mistake, PerlError, RolloutError, raise_all
from perl.rollouts.engine import Form, Proof
from perl.rollouts.vllm.answers import AdapterGoneError, ServerDownError, ServerFacts, Standing
from perl.rollouts.vllm.giving import Given, Order, Question, difference, give, give_at
from perl.rollouts.vllm.http import DEV_MODE, LORA_FLAGS, ONE_REPLICA
from perl.rollouts.vllm.members import Member, Version
from perl.rollouts.vllm.weight_labels import finished, is_owned, owner_of
from perl.run.host import Fleet

_MOST_TRIES = 3
# For a server's node to load an update, with all that is asked beside; it takes further time to get it there.
_LOAD_SECONDS = {"adapter": 600.0, "merged": 2400.0}
# Answers that come meanwhile are vouched for by one question.
_GATHER_SECONDS = 0.02
_OTHER_SERVERS = "give this run servers that no other run uses, or wait until the other one has ended"

T = TypeVar("T")


class ChangedServerError(ServerDownError):
    """A server is not the one that was proven: what it wrote meanwhile is worth nothing."""


class LateServerError(Exception):
    """A server does not have a version yet that the main process is giving it."""


class Versions:
    """The base that all servers serve, and the updates to it that they must answer with.

    Attributes:
        current: What new requests are answered with.
        reloads: How often a server was given again what it had forgotten.
        main: Whether this is the main process, which loads updates.
        needed: In what form updates will come; None: it is not known yet.
        needless: The adapters of a server that go with the next order to it, since nobody needs them.
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
        self.needless: Callable[[Member], tuple[str, ...]] = lambda _: ()

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
        facts, now = await member.server.facts()
        mistakes = []
        if self._base_name is None:
            self._base_name = facts.base_name
        elif facts.base_name != self._base_name:
            hint = "all servers must serve one base, under one --served-model-name"
            mistakes.append(Mistake(f"{member.url} serves {facts.base_name}, not {self._base_name}", hint=hint))
        raise_all(PerlError, mistakes + self._unable(member.url, facts))
        member.facts = facts
        self._met(member, now)

    def _met(self, member: Member, now: Standing) -> None:
        """Takes a server for what it reports, unless it is another one than it was."""
        # The main process changes weights; the others learn of it by the name in the next answer.
        _check_same(member.standing, now, weights=self.main)
        if member.facts is not None:
            member.facts = replace(member.facts, adapters=frozenset(now.adapters))
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
        before = member.standing
        self._check_answered(member, version, before, await self._look(member))

    def _check_answered(self, member: Member, version: Version, before: Standing | None, now: Standing) -> None:
        """What :meth:`_same` refuses, of a server that was one before the answer and is one now."""
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
            await self._ensure(member, version, again, None)

    async def _ensure(self, member: Member, version: Version, again: bool, question: Question | None) -> Given:
        """The same, and asks the server a question; a server that is known well needs one order at most."""
        look = not member.trusted
        if look and (member.awaited == version.name or member.standing is None or member.standing.process is None):
            await self.meet(member)
            look = False
        if member.awaited == version.name and not _arrived(member, version):
            raise LateServerError(version.name)
        if member.facts is not None and member.facts.replicas > 1 and version.form is not None:
            raise_all(PerlError, [_several(member.url, member.facts.replicas)])
        load = version.form is not None and version.name not in (*member.adapters, member.weights)
        if load and version.form == "merged" and member.facts is not None and not member.facts.takes_weights:
            raise PerlError(f"{member.url} cannot take weights", hint=DEV_MODE)
        if not (load or look or question):
            return Given()
        version.users += load  # its folder stays
        try:
            given = await self._carried(member, version, self._order(member, version, load, look, question))
        finally:
            version.users -= load
        self.reloads += again and load
        return given

    def _order(self, member: Member, version: Version, load: bool, look: bool, question: Question | None) -> Order:
        standing = member.standing
        held = None if standing is None or standing.weights is None else finished(standing.weights)
        return Order(
            version.name,
            version.form,
            version.path,
            self.model(version),
            load=load,
            look=look,
            standing=None if standing is None else replace(standing, adapters={}),
            same_weights=self.main,
            takes_weights=member.facts is None or member.facts.takes_weights,
            ours=frozenset(self._names & {held, version.name}),
            left=self._foreign.get(member.url),
            keeps=self.main,
            unload=self.needless(member) if load else (),
            question=question,
        )

    async def _carried(self, member: Member, version: Version, order: Order) -> Given:
        """What came of an order, which goes once more where the weights that were in the way are ours after all.

        Raises:
            ChangedServerError: It is not the server that it was.
            RolloutError: It got weights from someone else.
        """
        given = await _carry(member, version.fleet, order)
        if given.held is not None and not given.taken and finished(given.held) in self._names:
            order = replace(order, ours=order.ours | {finished(given.held)})
            given = await _carry(member, version.fleet, order)
        if given.standing is not None:
            self._met(member, given.standing)
        if given.taken or given.held is not None:
            if not (given.taken or self.main):  # they may be those that come next
                raise ServerDownError(f"holds the weights {given.held}")
            raise _taken(member.url, given.held)
        member.adapters -= given.unloaded
        if given.loaded and version.form == "adapter":
            member.adapters.add(version.name)
        elif given.loaded:
            self._foreign.pop(member.url, None)
            member.weights = version.name
            if member.standing is not None:
                member.standing = replace(member.standing, weights=version.name)
        return given

    async def has_arrived(self, member: Member) -> bool:
        """Whether a server has by now the version that the main process is giving it.

        Raises:
            ChangedServerError: It is another one than it was.
        """
        now = await self._look(member)
        _check_same(member.standing, now, weights=False)
        member.standing = replace(now, weights=owner_of(now.weights))
        return member.awaited != self.current.name or _arrived(member, self.current)

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
            version, proof = self.current, self.current.proof
            question = Question() if proof is None else Question(proof.prompts, proof.temperature)
            async with member.lock:
                if member.standing is None or member.standing.process is None:
                    await self.meet(member)
                self._check_returned(member, version)
                given = await self._ensure(member, version, again, question)
            if proof is not None and given.log_probs is not None:
                await self._compare(member, version, proof, given.log_probs)
            if given.after is not None:
                self._check_answered(member, version, member.standing, given.after)
            if version is self.current:
                member.refuted, member.barred = False, None
                return

    def _check_returned(self, member: Member, version: Version) -> None:
        """Refuses a server that is known and must not be given anything."""
        standing = member.standing
        if standing is None:
            return
        if member.barred == (standing.process, " ".join(standing.base)):
            raise BrokenPromiseError(f"{member.url} is still the process that failed its comparison")
        held = standing.weights
        # Another run's weights that were reported to the caller may wait for the base, but not serve an adapter.
        known = self._foreign.get(member.url) if version.form is None else None
        if self.main and held is not None and finished(held) not in self._names and held != known:
            raise _taken(member.url, held)

    async def _compare(
        self, member: Member, version: Version, proof: Proof, log_probs: Sequence[Mapping[int, float]]
    ) -> None:
        """Compares what a server answered with what is known of a version."""
        found = proof.difference(log_probs)
        if not found <= proof.tolerance:
            if version.form == "adapter":
                await member.server.unload_adapter(version.name)
            what = f"log-probabilities differ by {found:.1e} nats in the mean (at most {proof.tolerance:g})"
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


async def _carry(member: Member, fleet: Fleet | None, order: Order) -> Given:
    """Has an order told to a server: by its fleet in one call, else from here.

    Raises:
        ServerDownError: It, or what is on its node, does not answer.
        PerlError: It cannot do so before something is fixed.
    """
    if fleet is None:
        return await give(member.server, member.label, order)
    seconds = _LOAD_SECONDS[order.form or "adapter"]
    try:
        given = await fleet.give(member.position, order.name if order.load else None, partial(give_at, order), seconds)
    except OSError as error:
        raise ServerDownError(str(error)) from None
    if isinstance(given, Exception):
        raise given
    return given


def _check_same(before: Standing | None, now: Standing, weights: bool) -> None:
    """Refuses another server than before.

    Args:
        before: None: it is met for the first time.
        now: What it reports.
        weights: Whether its weights must be the same too.

    Raises:
        ChangedServerError: Says what is different.
    """
    found = None if before is None else difference(before, now, weights)
    if found is not None:
        raise ChangedServerError(found)


def _several(url: str, replicas: int) -> Mistake:
    """Of a server whose replicas cannot be compared with the policy one by one, since it chooses which one answers."""
    return Mistake(f"{url} has {replicas} data-parallel replicas, of which only one would be proven", hint=ONE_REPLICA)


def _taken(url: str, held: str | None) -> RolloutError:
    return RolloutError(f"{url} got weights from someone else ({held})", hint="restart it once they have ended")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
