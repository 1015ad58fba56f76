"""What an engine is: it samples completions of prompts from the policy it was last given.

prompts in tokens -> Sampled -> Completion; policy -> Update -> engine

An update is what the engine needs to answer like the policy: an adapter, or the weights that the adapter changes.
``sync.py`` makes it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from perl.errors import BrokenPromiseError
from perl.recipe.rollout_section import Capabilities
from perl.types import Completion

if TYPE_CHECKING:  # who speaks to servers on their nodes loads neither
    import torch
    from transformers import PreTrainedTokenizerBase

Form = Literal["adapter", "merged"]


@dataclass(frozen=True)
class Request:
    """A prompt and how many completions of it are wanted; they are sampled on one engine, which reads it once.

    Attributes:
        seed: Of the first completion, the next has seed + 1; from 0. A completion then depends on its seed and not on
            what is sampled beside it, but for the rounding of logits; each kind of engine has its own numbers for a
            seed. None: the engine's own random numbers.
        longest: Tokens of a completion, at most, where fewer are left of its length than of others'; None: as sampled.
        continues: Whether an update that is loaded before it is answered writes what is still missing of it, instead
            of the one that it began with.
    """

    prompt_ids: tuple[int, ...]
    count: int
    seed: int | None = None
    longest: int | None = None
    continues: bool = False

    def most_tokens(self, sampling: "EngineSampling") -> int:
        """Tokens that a completion may have."""
        longest = sampling.max_completion_length
        return longest if self.longest is None else min(longest, self.longest)


@dataclass(frozen=True)
class Sampled:
    """One completion as an engine gives it.

    Attributes:
        token_ids: With the end token, if there is one.
        log_probs: Of each token under the distribution it was drawn from (temperature, nucleus and the rest applied);
            None where the engine reports none.
        version: Name of the update that the engine answered with; the last one of several.
        versions: Of each token, of a request that continues; empty: all are of ``version``.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float | None, ...]
    version: str
    versions: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineSampling:
    """How an engine draws tokens; every field is passed on, so that the model's generation defaults never apply.

    Attributes:
        temperature: 0: the likeliest token (greedy). Log-probabilities are then those at temperature 1, of all tokens,
            and vLLM takes requests of one completion only.
        top_k: 0: all tokens.
        end_token_ids: Tokens that end a completion.
    """

    temperature: float
    max_completion_length: int
    end_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class ExpectedLogProbs:
    """What the policy makes of a fixed text, by which any engine can be compared with the policy at any time.

    Attributes:
        token_ids: The text.
        log_probs: For each of its beginnings, from the first token on: the likeliest next tokens with their
            log-probabilities at the temperature.
        tolerance: Largest mean difference that is put down to rounding, in nats.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[Mapping[int, float], ...]
    temperature: float
    tolerance: float

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """The beginnings of the text after which the next token is known."""
        return [self.token_ids[: end + 1] for end in range(len(self.log_probs))]

    def difference(self, found: Sequence[Mapping[int, float]]) -> float:
        """Mean difference from what an engine reports, in nats, as if tokens were drawn from the policy.

        Args:
            found: For each prompt the engine's likeliest tokens; one that is not among them is at most as likely as
                the last that is.
        """
        total = weight = 0.0
        for mine, theirs in zip(self.log_probs, found, strict=True):
            least = min(theirs.values())
            for token, log_prob in mine.items():
                total += math.exp(log_prob) * abs(log_prob - theirs.get(token, min(least, log_prob)))
                weight += math.exp(log_prob)
        return total / weight


@dataclass(frozen=True)
class Update:
    """What makes an engine answer like the policy.

    Attributes:
        name: New for each version, so that nothing the engine kept for another version is used again.
        form: ``adapter``: a LoRA that is served beside the base. ``merged``: weights that take the place of the base's.
        tensors: By PEFT's names (adapter) or by the base's (merged); empty on processes other than the main one.
        config: The adapter's config as PEFT writes it; empty for merged weights.
        proof: What an engine that has it must answer; None: nothing can be compared.
    """

    name: str
    form: Form
    tensors: "Mapping[str, torch.Tensor]" = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    proof: ExpectedLogProbs | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


OnGroup = Callable[[int, Sequence[Sampled]], None]
"""Called with the position of a request and its completions as soon as they are there, in any order and any thread."""


class Pending(Protocol):
    """Rollouts under way."""

    def result(self) -> list[list[Sampled]]:
        """The completions of each request, in the order of the requests; waits for them."""


@dataclass(frozen=True)
class FinishedRollouts:
    """Rollouts of an engine that returns when all is sampled."""

    groups: list[list[Sampled]]

    def result(self) -> list[list[Sampled]]:
        """The completions of each request, in the order of the requests."""
        return self.groups


class OneCopy:
    """What engines have in common whose only copy is in this process."""

    @property
    def counts(self) -> dict[str, int]:
        """Empty: nothing here is worth logging."""
        return {}

    def expect(self, proof: ExpectedLogProbs) -> None:
        """Does nothing: no copy starts later than this process."""

    def foreign_weights(self) -> list[str]:
        """None: nobody else uses this copy."""
        return []

    def computes_base_alone(self) -> bool:
        """False: nobody else uses this copy."""
        return False

    def drop(self, failures: Mapping[str, str]) -> None:
        """Raises: this is the only copy."""
        raise BrokenPromiseError("; ".join(failures.values()))


class Engine(Protocol):
    """Samples from the policy it was last given.

    Attributes:
        capabilities: What engines of this class can do; the other rooms ask for these, not for the class or its name.
        counts: What has happened so far that a run may want to know of, by name.
    """

    capabilities: ClassVar[Capabilities]

    @property
    def counts(self) -> Mapping[str, int]:
        """See the class."""

    def load(self, update: Update) -> None:
        """From now on requests are answered with this update; those under way keep theirs, unless they continue."""

    def start(self, requests: Sequence[Request], sampling: EngineSampling, on_group: OnGroup | None = None) -> Pending:
        """Begins to sample, with the update that was loaded last."""

    def trial(self, request: Request, sampling: EngineSampling) -> dict[str, list[Sampled]]:
        """What each copy of the engine writes, under the update loaded last, by its name; each must be the policy."""

    def expect(self, proof: ExpectedLogProbs) -> None:
        """What a copy that comes up must answer, from the update that was loaded last."""

    def foreign_weights(self) -> list[str]:
        """Copies whose weights an earlier run has left: they must be given the base before anything else."""

    def computes_base_alone(self) -> bool:
        """Whether a copy computes the base wrongly beside requests for adapters, which others may begin to serve."""

    def drop(self, failures: Mapping[str, str]) -> None:
        """Copies, by name, that failed a trial, with the reason; others answer instead of them."""

    def sleep(self) -> None:
        """Frees the memory that only sampling needs; the next request wakes the engine."""

    @property
    def asleep_bytes(self) -> int:
        """Bytes of this process's device that :meth:`sleep` has freed and the next request takes again."""

    def close(self) -> None:
        """Gives back what the engine holds."""


def completion_of(sampled: Sampled, end_token_ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> Completion:
    """What an engine gave, as text; without an end token it was cut off."""
    ids = sampled.token_ids
    truncated = not ids or ids[-1] not in end_token_ids
    return Completion(ids, tokenizer.decode(list(ids), skip_special_tokens=True), truncated)
