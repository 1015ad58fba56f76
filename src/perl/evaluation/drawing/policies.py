"""The base and what was trained on it, one after the other, in an engine that is proven to have it.

Subject -> Policies in memory -> (who, engine), each valid until the next is asked for
"""

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from perl.errors import BrokenPromiseError
from perl.evaluation.drawing.subject import Subject
from perl.evaluation.scoring.results import Who as Who
from perl.policy.attach import continue_adapter
from perl.policy.fingerprint import answering_fingerprint
from perl.policy.model import DeviceMap, clean_base, load_base, load_tokenizer
from perl.policy.reference import base_only
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.sections import ModelSection
from perl.rollouts.engine import Engine, Form, Update
from perl.rollouts.hf_engine import TransformersEngine
from perl.rollouts.open_engine import EngineSettings, open_engine
from perl.rollouts.parity_check import LENGTH, ParityCheck
from perl.rollouts.sync import SyncPlan, base_update, choose_form, make_update, without_effect
from perl.run.shards import is_sharded

logger = logging.getLogger("perl")

_AS_SERVED = (
    "it must serve the same base in the same type, with --logprobs-mode processed_logprobs; `perl eval "
    "--server-command` and `perl rollout command RECIPE` print how to start one"
)


@dataclass(frozen=True)
class Policies:
    """Base and trained policy in memory, on one copy of the base's weights where there is an adapter.

    Attributes:
        base: The base; with an adapter its layers are the adapter's, and it answers as the base only without it.
        trained: The base with its adapter, or a model that was trained itself; None: there is none.
        tokenizer: The base's.
        base_sha256: Of the base's weights, and of how they were quantised.
    """

    base: PreTrainedModel
    trained: nn.Module | None
    tokenizer: PreTrainedTokenizerBase
    base_sha256: str

    @contextlib.contextmanager
    def active(self, who: Who) -> Iterator[nn.Module]:
        """The policy; a base that carries an adapter is without it meanwhile."""
        if who == "adapter":
            if self.trained is None:
                raise ValueError("nothing was trained on this base")
            yield self.trained
        elif isinstance(self.trained, PeftModel):
            with base_only(self.trained):
                yield self.trained
        else:
            yield self.base


class BaseInMemory:
    """Loads bases with their adapters, and may keep the last one: the next adapter on it is put on the same weights."""

    def __init__(self, *, kept: bool = False) -> None:
        """Loads nothing yet.

        Args:
            kept: Whether a base stays in memory for the next adapter.
        """
        self._kept = kept
        self._last: tuple[ModelSection, PreTrainedModel, str] | None = None

    def policies(self, subject: Subject, device: torch.device, spread: DeviceMap | None = None) -> Policies:
        """The base, and on it what was trained.

        Args:
            subject: What is evaluated.
            device: Where the base lies.
            spread: How it is spread over several GPUs instead; None: it is not.

        Raises:
            PerlError: One cannot be loaded, or the two do not belong together.
        """
        last = self._last if self._last is not None and self._last[0] == subject.base else None
        if last is None:
            self._last = None  # gives the memory of the one before back first
            loaded = load_base(subject.base, device, spread=spread)
            last = (subject.base, loaded, answering_fingerprint(loaded))
            self._last = last if self._kept and spread is None else None
        _, base, digest = last
        tokenizer = load_tokenizer(subject.base)
        if subject.adapter is not None:
            # Over the base's own weights. What spreads a base hooks its layers, so that they cannot be shared.
            own = clean_base(base) if self._last is not None else base
            return Policies(own, continue_adapter(own, subject.adapter).eval(), tokenizer, digest)
        trained = load_base(subject.model, device, spread=spread) if subject.model is not None else None
        return Policies(base, trained, tokenizer, digest)


@dataclass(frozen=True)
class ReadyPolicy:
    """A policy that can be asked.

    Attributes:
        logp_diff: Mean difference of the engine's log-probabilities from the policy's in memory, in nats; None where
            the engine is the policy in memory.
    """

    who: Who
    engine: Engine
    logp_diff: float | None = None


def in_turn(
    policies: Policies,
    wanted: Sequence[Who],
    how: RolloutSection,
    settings: EngineSettings,
    probe_ids: Sequence[int],
    batch_size: int,
    temperature: float = 1.0,
) -> Generator[ReadyPolicy]:
    """Each policy in turn, the base first; an engine outside of this model is proven to answer like it.

    Servers prove that they bind an adapter before the base is asked, which may take hours. Those that would compute the
    base wrongly beside adapters of others are given it as an adapter that changes nothing. After merged weights they
    are given the base's again, if nothing fails before; where it does, whoever opens them next does so.

    Args:
        policies: In memory.
        wanted: Of ``base`` and ``adapter``, in this order.
        how: The engine; not ``auto``.
        settings: For opening it.
        probe_ids: A prompt on which engine and policy are compared.
        batch_size: Completions that transformers write at a time.
        temperature: At which they are compared, above 0: that of the samples, so that it is proven to be applied.

    Raises:
        RolloutError: No server answers.
        BrokenPromiseError: The engine does not answer like the policy.
        PerlError: It cannot be given this policy.
    """
    if not how.capabilities.takes_updates:
        for who in wanted:
            with policies.active(who) as policy:
                yield ReadyPolicy(who, TransformersEngine(policy, policies.tokenizer, batch_size))
        return
    trained = policies.trained if "adapter" in wanted else None
    plan = choose_form(trained, how.sync) if trained is not None else None
    if plan is not None:
        logger.info("%s: %s", how.backend, plan)
    on_base = policies.trained if isinstance(policies.trained, PeftModel) else policies.base
    served = how.capabilities.needs_servers
    room = None if settings.longest is None else settings.longest - len(probe_ids)
    proof = _EngineCheck(tuple(probe_ids), temperature, room, how.tolerance)
    opener = _EngineOpener(how, plan, on_base, settings)
    proven = served and "base" in wanted and plan is not None and plan.form == "adapter"
    if proven and trained is not None:
        with opener.opened() as engine:
            if engine.computes_base_alone():
                yield from _as_adapters(policies, trained, engine, proof, opener)
                return
            with policies.active("base") as policy:
                proof.compare(engine, policy)
            proof.bind(engine, trained, lambda: opener.update(trained, "adapter", "probe"))
    with opener.opened() as engine:
        if "base" in wanted:
            with policies.active("base") as policy:
                difference = proof.compare(engine, policy)
            yield ReadyPolicy("base", engine, difference)
        if plan is not None and trained is not None:
            if not proven:
                proof.bind(engine, trained, lambda: opener.update(trained, plan.form, "probe"))
            engine.load(opener.update(trained, plan.form, "adapter"))
            yield ReadyPolicy("adapter", engine, proof.compare(engine, trained))
            if served and plan.form == "merged":
                engine.load(opener.update(on_base, None, "restored"))


def _as_adapters(
    policies: Policies, trained: nn.Module, engine: Engine, proof: "_EngineCheck", opener: "_EngineOpener"
) -> Iterator[ReadyPolicy]:
    """Base and adapter, the base as an adapter that changes nothing."""
    proof.bind(engine, trained, lambda: opener.update(trained, "adapter", "probe"))
    engine.load(without_effect(opener.update(trained, "adapter", "base")))
    with policies.active("base") as policy:
        difference = proof.compare(engine, policy)
    yield ReadyPolicy("base", engine, difference)
    engine.load(opener.update(trained, "adapter", "adapter"))
    yield ReadyPolicy("adapter", engine, proof.compare(engine, trained))


@dataclass(frozen=True)
class _EngineOpener:
    """How the engine is opened, each time."""

    how: RolloutSection
    plan: SyncPlan | None
    on_base: nn.Module
    settings: EngineSettings

    @contextlib.contextmanager
    def opened(self) -> Iterator[Engine]:
        """The engine; afterwards nothing is left of it on the disk."""
        engine = open_engine(self.how, self.plan, self.on_base, self.settings)
        try:
            if engine.foreign_weights():
                engine.load(self.update(self.on_base, None, "before"))
            yield engine
        finally:
            engine.close()
            with contextlib.suppress(OSError):  # not there, or somebody else's files are in it
                if self.settings.processes.main:
                    self.settings.folder.rmdir()

    def update(self, policy: nn.Module, form: Form | None, kind: str) -> Update:
        """A policy for the engine; of no form: the base. Without tensors where nobody reads them."""
        name, served = f"{self.settings.name}-{kind}", self.how.capabilities.needs_servers
        if served and not self.settings.processes.main and not is_sharded(policy):
            return Update(name, form or "merged")
        return base_update(policy, name) if form is None else make_update(policy, form, name)


@dataclass(frozen=True)
class _EngineCheck:
    """How an engine is compared with a policy in memory.

    Attributes:
        longest: Tokens that a completion of the prompt may have; None: any number.
        tolerance: Largest mean difference in nats; None: the usual one.
    """

    prompt_ids: tuple[int, ...]
    temperature: float
    longest: int | None
    tolerance: float | None

    def compare(self, engine: Engine, policy: nn.Module) -> float:
        """Mean difference of the engine's log-probabilities from the policy's, in nats."""
        parity = self._parity(policy)
        engine.expect(parity.proof())  # of servers that are restarted while they are asked
        return self._check(parity, engine)

    def bind(self, engine: Engine, policy: nn.Module, update: Callable[[], Update]) -> None:
        """Gives the engine the policy with random numbers, as an update, which must show."""
        parity = self._parity(policy)
        with parity.far_from_base():
            engine.load(update())
            self._check(parity, engine)

    def _parity(self, policy: nn.Module) -> ParityCheck:
        longest = LENGTH if self.longest is None else self.longest
        return ParityCheck(policy, self.prompt_ids, self.temperature, longest, self.tolerance)

    def _check(self, parity: ParityCheck, engine: Engine) -> float:
        try:
            return parity.check(engine.trial(parity.request, parity.sampling))
        except BrokenPromiseError as error:
            raise BrokenPromiseError(error.mistakes[0].message, hint=_AS_SERVED) from None
