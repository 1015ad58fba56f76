"""The base and what was trained on it, one after the other, in an engine that is proven to have it.

Subject -> Policies in memory -> (who, engine), each valid until the next is asked for
"""

import contextlib
import logging
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from perl.errors import BrokenPromiseError
from perl.evaluation.results import Who as Who
from perl.evaluation.subject import Subject
from perl.policy.attach import base_only, continue_adapter
from perl.policy.model import answering_fingerprint, load_base, load_tokenizer
from perl.recipe.sections import RolloutSection
from perl.rollouts.engine import Engine, Form
from perl.rollouts.hf_engine import TransformersEngine
from perl.rollouts.open_engine import EngineSettings, open_engine
from perl.rollouts.parity_check import LENGTH, ParityCheck
from perl.rollouts.sync import SyncPlan, base_update, choose_form, make_update

logger = logging.getLogger("perl")

_ORDER: tuple[Who, ...] = ("base", "adapter")
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


def load_policies(subject: Subject, device: torch.device) -> Policies:
    """Loads the base once, and on it what was trained.

    Raises:
        PerlError: One cannot be loaded, or the two do not belong together.
    """
    base = load_base(subject.base, device)
    digest = answering_fingerprint(base)
    tokenizer = load_tokenizer(subject.base)
    if subject.adapter is not None:
        return Policies(base, continue_adapter(base, subject.adapter).eval(), tokenizer, digest)
    trained = load_base(subject.model, device) if subject.model is not None else None
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
    wanted: Collection[Who],
    how: RolloutSection,
    settings: EngineSettings,
    probe_ids: Sequence[int],
    batch_size: int,
    temperature: float = 1.0,
) -> Generator[ReadyPolicy]:
    """Each policy in turn, the base first; an engine outside of this model is proven to answer like it.

    Servers prove that they bind an adapter before the base is asked, which may take hours. After merged weights they
    are given the base's again, if nothing fails before; where it does, whoever opens them next does so.

    Args:
        policies: In memory.
        wanted: Of ``base`` and ``adapter``.
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
        for who in _ORDER:
            if who in wanted:
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
    proof = _Proof(tuple(probe_ids), temperature, room, how.tolerance)
    proven = served and "base" in wanted and plan is not None and plan.form == "adapter"
    if proven and trained is not None:
        with _opened(how, plan, on_base, settings) as engine:
            with policies.active("base") as policy:
                proof.compare(engine, policy)
            proof.bind(engine, trained, "adapter", f"{settings.name}-probe")
    with _opened(how, plan, on_base, settings) as engine:
        if "base" in wanted:
            with policies.active("base") as policy:
                difference = proof.compare(engine, policy)
            yield ReadyPolicy("base", engine, difference)
        if plan is not None and trained is not None:
            if not proven:
                proof.bind(engine, trained, plan.form, f"{settings.name}-probe")
            engine.load(make_update(trained, plan.form, f"{settings.name}-adapter"))
            yield ReadyPolicy("adapter", engine, proof.compare(engine, trained))
            if served and plan.form == "merged":
                engine.load(base_update(on_base, f"{settings.name}-restored"))


@contextlib.contextmanager
def _opened(
    how: RolloutSection, plan: SyncPlan | None, on_base: nn.Module, settings: EngineSettings
) -> Iterator[Engine]:
    """The engine; afterwards nothing is left of it on the disk."""
    engine = open_engine(how, plan, on_base, settings)
    try:
        yield engine
    finally:
        engine.close()
        with contextlib.suppress(OSError):  # not there, or somebody else's files are in it
            settings.folder.rmdir()


@dataclass(frozen=True)
class _Proof:
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

    def bind(self, engine: Engine, policy: nn.Module, form: Form, name: str) -> None:
        """Gives the engine the policy with random numbers, which must show."""
        parity = self._parity(policy)
        with parity.far_from_base():
            engine.load(make_update(policy, form, name))
            self._check(parity, engine)

    def _parity(self, policy: nn.Module) -> ParityCheck:
        longest = LENGTH if self.longest is None else self.longest
        return ParityCheck(policy, self.prompt_ids, self.temperature, longest, self.tolerance)

    def _check(self, parity: ParityCheck, engine: Engine) -> float:
        try:
            return parity.check(engine.trial(parity.request, parity.sampling))
        except BrokenPromiseError as error:
            raise BrokenPromiseError(error.mistakes[0].message, hint=_AS_SERVED) from None
