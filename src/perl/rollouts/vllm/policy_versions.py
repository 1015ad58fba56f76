"""Which update a vLLM server answers with, how it comes to have it, and whether it is still the server that was proven.

Version, server -> an answer with that version

What identifies a server is read when it is met, before each load and after each answer: when its process started, its
base, the label of its weights, the folder of our adapter. An answer that was written across a change is dropped, and so
is the server. :class:`~perl.rollouts.vllm.answers.ServerDownError` goes through.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TypeVar

from perl.errors import BrokenPromiseError, Mistake, PerlError, RolloutError, raise_all
from perl.rollouts.engine import EngineSampling, Form, Request
from perl.rollouts.vllm.answers import ChangedServerError, ServerDownError, ServerFacts, ServerIdentity
from perl.rollouts.vllm.http import DEV_MODE, FIRST_TOKEN_SECONDS, LORA_FLAGS, ONE_REPLICA
from perl.rollouts.vllm.members import Member, Version
from perl.run.host import Fleet

LEFT = "-left"
"""Ends the label of merged weights whose run has ended."""

_LOADING = "-loading"
# Two runs that claim a server's weights at once both see who was the later one.
_SETTLE_SECONDS = 0.3
# Answers that come meanwhile are vouched for by one look.
_GATHER_SECONDS = 0.02
_OTHER_SERVERS = "give this run servers that no other run uses, or wait until the other one has ended"

T = TypeVar("T")


class Versions:
    """The base that all servers serve, and the updates to it that they must answer with.

    Attributes:
        current: What new requests are answered with.
        needed: In what form updates will come; None: it is not known yet.
        is_left: Whether the run has ended that has put merged weights on a server, by their label.
    """

    def __init__(self, fleet: Fleet | None) -> None:
        """Begins with the base.

        Args:
            fleet: Brings updates to the servers; None: they read them where they were written.
        """
        self.current = Version("", None)
        self.needed: Form | None = None
        self.is_left: Callable[[str], bool] = lambda _: False
        self._base_name, self._fleet = "", fleet  # the name under which the first server that answers serves it
        self._names: set[str] = set()
        self._left: dict[str, str] = {}  # labels of weights that others have left, by the address of the server
        self._longest_tokens = 0

    def take(self, version: Version) -> None:
        """Makes a version the current one."""
        self.current = version
        self._names.add(version.name)

    def model(self, version: Version) -> str:
        """The name to ask a server for."""
        return version.name if version.form == "adapter" else self._base_name

    def named(self, version: Version) -> str:
        """What a completion says that it is of."""
        return version.name or self.model(version)

    async def meet(self, member: Member) -> None:
        """Reads what a server is.

        Raises:
            PerlError: It serves another base than the others, or cannot do what is needed.
        """
        member.forget()
        facts, identity = await member.server.facts()
        self._base_name = self._base_name or facts.base_name
        mistakes = self._unable(member.url, facts)
        if facts.base_name != self._base_name:
            hint = "all servers must serve one base, under one --served-model-name"
            mistakes.append(Mistake(f"{member.url} serves {facts.base_name}, not {self._base_name}", hint=hint))
        raise_all(PerlError, mistakes)
        member.facts, member.identity = facts, identity

    def check(self, longest_tokens: int, form: Form | None, members: Sequence[Member]) -> None:
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
        if self.needed == "merged" and not facts.takes_weights:
            found.append(Mistake(f"{url} cannot take weights", hint=DEV_MODE))
        if self.needed is not None and facts.replicas > 1:
            what = f"{url} has {facts.replicas} data-parallel replicas, of which only one would be proven"
            found.append(Mistake(what, hint=ONE_REPLICA))
        return found

    async def answer(self, member: Member, version: Version, ask: Callable[[str], Awaitable[T]]) -> T:
        """What a server answers with a version, which it is given first if it does not have it.

        Args:
            member: The server.
            version: That must answer.
            ask: The request, given the name to ask for.

        Raises:
            ChangedServerError: It is not the server that was proven, or not any more.
        """
        await self.load(member, version)
        answer = await ask(self.model(version))
        self._check_same(member, version, await self._look(member))
        return answer

    async def load(self, member: Member, version: Version) -> None:
        """Gives a version to a server that does not have it.

        Raises:
            PerlError: It cannot take it before something is fixed.
        """
        async with member.loading:
            if version.form is None or version.name in member.versions:
                return
            now = await self._look(member)
            _check_unchanged(member, now)
            version.users += 1  # its folder stays
            try:
                if self._fleet is not None:
                    try:
                        await self._fleet.bring(member.position, version.name)
                    except OSError as error:  # nobody answers on its node
                        raise ServerDownError(str(error)) from None
                if version.form == "adapter":
                    await member.server.load_adapter(version.name, version.path)
                    member.versions.add(version.name)
                else:
                    await self._replace_weights(member, version, now.weights)
            finally:
                version.users -= 1

    async def _replace_weights(self, member: Member, version: Version, label: str | None) -> None:
        """Puts merged weights on a server whose weights are the base's or ours, or were left by a run that has ended.

        The server's label of its weights is the lock: the only thing that two runs on different machines both see.
        """
        server, claim = member.server, version.path + _LOADING
        ours = self._is_ours(label)
        if not (label is None or ours or label == self._left.get(member.url)):
            raise _taken(member.url, label)
        if label != version.path:
            # First, so that no answer of meanwhile is taken for one of the weights before.
            await server.label_weights(claim)
            if not ours:
                await asyncio.sleep(_SETTLE_SECONDS)
            if await server.weight_label() == claim:
                await server.load_weights(version.name, version.path)
            label = await server.weight_label()
            if label != claim:
                raise _taken(member.url, label)
            await server.label_weights(version.path)
        self._left.pop(member.url, None)
        member.versions = {version.name}
        if member.identity is not None:
            member.identity = replace(member.identity, weights=version.path)

    async def release(self, member: Member, seconds: float) -> None:
        """Says on a server that nobody owns its merged weights any more, if they are ours."""
        label = None if member.identity is None else member.identity.weights
        if label is not None and self._is_ours(label) and await member.server.weight_label(seconds) == label:
            await member.server.label_weights(label + LEFT, seconds)

    async def readmit(self, member: Member) -> Version:
        """Meets a server that comes up, gives it the current version, and makes it prove that it applies that.

        Returns:
            The version, which may not be the current one any more.

        Raises:
            ServerDownError: It does not answer.
            BrokenPromiseError: It answers, and not like the version.
            PerlError: It is not what it must be.
        """
        await self.meet(member)
        if member.identity is None:
            raise ServerDownError("was not met yet")
        if member.failed is not None and member.failed[0] == (member.identity.process, member.identity.base):
            raise member.failed[1]
        version = self.current
        label, left = member.identity.weights, self._left.get(member.url)
        if not (label is None or self._is_ours(label) or (label == left and version.form != "adapter")):
            raise _taken(member.url, label)
        await self.load(member, version)
        proof, model = version.proof, self.model(version)
        if proof is None:  # nothing is known to compare it with: it has to write a token
            one_token = Request((0,), 1), EngineSampling(1.0, 1, ())
            await member.server.complete(model, *one_token, seconds=FIRST_TOKEN_SECONDS)
        else:
            found = proof.difference(await member.server.next_log_probs(model, proof.prompts, proof.temperature))
            if not found <= proof.tolerance:
                what = f"log-probabilities differ by {found:.1e} nats in the mean (at most {proof.tolerance:g})"
                hint = "was it restarted with another base, type or --logprobs-mode?"
                raise BrokenPromiseError(f"{member.url} does not answer like the policy: its {what}", hint=hint)
        self._check_same(member, version, await self._look(member))
        for name in set(member.identity.adapters) & self._names - {version.name}:  # of before it was dropped
            await member.server.unload_adapter(name)
        return version

    def _check_same(self, member: Member, version: Version, now: ServerIdentity) -> None:
        """Refuses an answer of a server that is not the one that was proven, or had not the version all the while.

        Raises:
            ChangedServerError: It is not.
            PerlError: It serves adapters of others, beside which it computes this version wrongly.
        """
        _check_unchanged(member, now)
        if version.form == "adapter" and now.adapters.get(version.name, version.path) != version.path:
            raise ChangedServerError(f"has another adapter under the name {version.name}")
        self._refuse_another_form(member, version.form, now)

    async def _look(self, member: Member) -> ServerIdentity:
        """What a server is, by a question that was begun after this call; those that call meanwhile share it."""
        mine = member.looks
        async with member.looking:
            if member.looks > mine and member.seen is not None:
                return member.seen
            await asyncio.sleep(_GATHER_SECONDS)
            member.looks += 1
            member.seen = None
            member.seen = await member.server.identity(member.takes_weights)
            return member.seen

    def _refuse_another_form(self, member: Member, form: Form | None, now: ServerIdentity) -> None:
        """Refuses a server whose other users would make it compute a version wrongly."""
        others = self._of_others(now)
        if form != "adapter" and others and member.facts is not None and member.facts.on_cpu:
            what = "vLLM for CPUs computes the base wrongly beside requests for adapters"
            raise PerlError(f"{member.url} serves adapters of others ({others}); {what}", hint=_OTHER_SERVERS)

    async def foreign_weights(self, member: Member) -> str | None:
        """Label of weights that a run has left on a server that has ended; the next merged ones may take their place.

        Raises:
            PerlError: Somebody else uses the server in a way that this run would disturb, or be disturbed by.
        """
        now = await self._look(member)
        others, label = self._of_others(now), now.weights
        if self.needed == "merged" and others:
            what = f"serves adapters of others ({others}), under which merged weights would change the base"
            raise PerlError(f"{member.url} {what}", hint=_OTHER_SERVERS)
        self._refuse_another_form(member, self.needed, now)
        if member.identity is not None:
            member.identity = replace(member.identity, weights=label)
        if label is None or self._is_ours(label):
            return None
        if self._fleet is None and not label.endswith(LEFT) and not self.is_left(label.removesuffix(_LOADING)):
            hint = f"{_OTHER_SERVERS}; if that was killed, restart the server"
            raise PerlError(f"{member.url} has the merged weights of another run ({label})", hint=hint)
        self._left[member.url] = label
        return label

    def _is_ours(self, label: str | None) -> bool:
        return label is not None and PurePosixPath(label.removesuffix(_LOADING)).name in self._names

    def _of_others(self, now: ServerIdentity) -> str:
        """Adapters that are not of this run, as a message lists them."""
        names = sorted(set(now.adapters) - self._names)
        return ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")


def _check_unchanged(member: Member, now: ServerIdentity) -> None:
    """Refuses another server than the one that was met."""
    before = member.identity
    if before is None:
        raise ChangedServerError("was not met yet")
    if now.process != before.process:
        raise ChangedServerError("was restarted, or another server answers in its place")
    if now.base != before.base:
        raise ChangedServerError(f"serves {' '.join(now.base)}, not {' '.join(before.base)}")
    if now.weights != before.weights:
        raise ChangedServerError(f"got weights from someone else ({now.weights or 'those of the base'})")


def _taken(url: str, label: str | None) -> RolloutError:
    return RolloutError(f"{url} got weights from someone else ({label})", hint="restart it once they have ended")
