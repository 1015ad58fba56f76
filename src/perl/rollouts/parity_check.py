"""The log-prob parity check: the tokens that an engine writes get the log-probabilities that the policy gives them.

policy, base, what an engine wrote -> how far its log-probabilities are off, or an error with the cause

An engine that does not apply an adapter answers like the base; its rollouts look healthy and teach nothing. Before
the first step the policy is the base, and after it the two may be closer than rounding: no difference
would show. So the first comparison is made with an adapter of random numbers. Tokens are written, not read, as in
rollouts: the cache of prompts, the temperature and what the engine reports are compared too, and no engine has to
score a prompt beside other requests, which ends vLLM for CPUs.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from peft import PeftModel
from torch import nn

from perl.errors import BrokenPromiseError
from perl.policy.model import evaluating
from perl.policy.precision import compute_dtype, layers_of, tolerance_of
from perl.policy.reference import base_only, token_log_probs
from perl.rollouts.engine import EngineSampling, ExpectedLogProbs, Request, Sampled
from perl.run.shards import is_sharded

# Completions that each copy of the engine writes, and tokens of each.
COUNT, LENGTH = 4, 16
# Tokens of the text of a proof, and of those that may follow each.
_TEXT, _LIKELIEST = 32, 4
# How far from the base a policy of random numbers must be, in nats, and where the search for it starts and ends.
_FAR = 0.5
_SEED, _SMALLEST, _DOUBLINGS = 0, 1e-3, 14
# The first on-policy steps define what is usual. In float32 rounding never explains a hundred times as much; in half
# precision, where it is close to the parity check's tolerance, never several times as much.
_FIRST_STEPS, _FACTOR, _FACTOR_AT_TOLERANCE = 5, 100.0, 4.0
# Of the parity check's tolerance: what is put down to rounding however little the first steps differed.
_FLOOR = 0.1
# Rollouts that are steps behind differ by what was learned since, which grows with the learning rate.
_GROWTH = 10.0
# After a parity check was passed, how much more is a reason for another one.
_AFTER_A_CHECK = 2.0
# Engines in float32 differ by kernels, from one prompt to the next by an order of magnitude.
_LEAST_GAP = 1e-4
# Rollouts of earlier policies that are further away than this, in nats, and than ever before, are another policy's.
_FAR_BEHIND = 1.0


class ParityCheck:
    """A prompt, and what the trainer makes of what an engine writes after it.

    Attributes:
        request: What each copy of the engine completes.
        sampling: How it is to draw tokens: with the run's temperature, and nothing cut off.
        tolerance: Largest mean difference that is put down to rounding, in nats.
    """

    def __init__(
        self,
        policy: nn.Module,
        prompt_ids: Sequence[int],
        temperature: float = 1.0,
        longest: int = LENGTH,
        tolerance: float | None = None,
    ) -> None:
        """Takes a prompt of the run.

        Args:
            policy: Without the wrappers of distributed training.
            prompt_ids: The same at every check.
            temperature: Of the run's rollouts.
            longest: Tokens that a completion of the run may have.
            tolerance: None: what rounding explains in the type that the policy computes in.
        """
        self._policy = policy
        self.request = Request(tuple(prompt_ids), COUNT)
        self.sampling = EngineSampling(temperature, min(LENGTH, longest), end_token_ids=())
        self.tolerance = tolerance or tolerance_of(compute_dtype(policy), layers_of(policy))

    def check(self, answers: Mapping[str, Sequence[Sampled]]) -> float:
        """Every copy of the engine must answer like the policy as it is now.

        Args:
            answers: Name of a copy -> what it wrote.

        Returns:
            The largest mean difference from the policy, in nats.

        Raises:
            BrokenPromiseError: One answers like the base, or like neither.
        """
        differences, failures = self.compare(answers)
        if failures:
            raise next(iter(failures.values()))
        return max(differences.values())

    def compare(
        self, answers: Mapping[str, Sequence[Sampled]]
    ) -> tuple[dict[str, float], dict[str, BrokenPromiseError]]:
        """By the name of a copy: the mean difference from the policy, in nats; what is wrong where it is too large."""
        differences, failures = {}, {}
        for name, completions in answers.items():
            try:
                differences[name] = self._difference(name, completions)
            except BrokenPromiseError as error:
                failures[name] = error
        return differences, failures

    def _difference(self, name: str, completions: Sequence[Sampled]) -> float:
        found_BC = torch.tensor([[torch.nan if p is None else p for p in s.log_probs] for s in completions])
        ids_BT = torch.tensor([[*self.request.prompt_ids, *s.token_ids] for s in completions])
        from_policy, from_base = self._mean_difference(found_BC, ids_BT), math.nan
        adapted = isinstance(self._policy, PeftModel)
        if adapted and (is_sharded(self._policy) or not from_policy <= self.tolerance):  # in shards all must run both
            with base_only(self._policy):
                from_base = self._mean_difference(found_BC, ids_BT)
        if from_policy <= self.tolerance:
            return from_policy
        what = f"log-probabilities differ by {from_policy:.1e} nats in the mean (at most {self.tolerance:g})"
        # Another base is nearer to ours than to the policy too, but not ten times.
        if adapted and (from_base < from_policy / 10 or from_base <= self.tolerance):
            raise BrokenPromiseError(
                f"{name} answers like the base, not like the policy: its {what}, from the base's by "
                f"{from_base:.1e}; the adapter is not applied there",
                "rollout",
                "start it with the command of `perl rollout command RECIPE`",
            )
        raise BrokenPromiseError(
            f"{name} does not answer like the policy: its {what}",
            "rollout.tolerance",
            "it must serve the same base in the same type and report processed log-probabilities (--logprobs-mode "
            "processed_logprobs); raise the tolerance only if the difference is rounding",
        )

    def proof(self) -> ExpectedLogProbs:
        """What the policy as it is now makes of a fixed text, so that an engine can be compared with it later on."""
        # One token is written after it, within what an engine was started for.
        length = min(_TEXT, len(self.request.prompt_ids) + self.sampling.max_completion_length - 1)
        ids_T = (self.request.prompt_ids * length)[-length:]
        ids_BT = torch.tensor([ids_T], device=next(self._policy.parameters()).device)
        with evaluating(self._policy), torch.no_grad():
            found = self._policy(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), use_cache=False)
            logits_TV = found.logits[0].float()
        likeliest = torch.log_softmax(logits_TV / self.sampling.temperature, dim=-1).topk(_LIKELIEST)
        rows = [
            dict(zip(tokens, values, strict=True))
            for tokens, values in zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        ]
        return ExpectedLogProbs(ids_T, tuple(rows), self.sampling.temperature, self.tolerance)

    @contextlib.contextmanager
    def far_from_base(self) -> Iterator[None]:
        """The policy with random numbers added to all it trains; afterwards itself again, bit for bit.

        The same numbers on all processes.
        """
        trained = [p for p in self._policy.parameters() if p.requires_grad]
        kept = [p.data for p in trained]
        text = torch.tensor([(self.request.prompt_ids * LENGTH)[:LENGTH]])
        with base_only(self._policy) if isinstance(self._policy, PeftModel) else contextlib.nullcontext():
            base = self._log_probs(text)
        try:
            for doubling in range(_DOUBLINGS):
                generator = torch.Generator().manual_seed(_SEED)
                for parameter, data in zip(trained, kept, strict=True):
                    noise = torch.randn(data.shape, generator=generator) * (_SMALLEST * 2**doubling)
                    parameter.data = data + noise.to(data)
                if float((self._log_probs(text) - base).abs().mean()) >= _FAR:
                    break
            else:
                raise BrokenPromiseError("random numbers in all that is trained leave the policy where the base is")
            yield
        finally:
            for parameter, data in zip(trained, kept, strict=True):
                parameter.data = data

    def _mean_difference(self, found_BC: torch.Tensor, ids_BT: torch.Tensor) -> float:
        """Of the log-probabilities of the last C tokens of each row, in nats."""
        return float((found_BC - self._log_probs(ids_BT)[:, -found_BC.size(1) :]).abs().mean())

    def _log_probs(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """(B, T-1) float32 of the policy as it is now, at the run's temperature."""
        ids_BT = ids_BT.to(next(self._policy.parameters()).device)
        with evaluating(self._policy), torch.no_grad():
            return token_log_probs(
                self._policy, ids_BT, torch.ones_like(ids_BT), temperature=self.sampling.temperature
            ).cpu()


@dataclass
class GapJudge:
    """What is usual in this run.

    Attributes:
        tolerance: Of the parity check, in nats.
    """

    tolerance: float
    _first: list[float] = field(default_factory=list)
    _behind: dict[int, float] = field(default_factory=dict)
    _checked: float = 0.0

    def limit(self, steps_behind: int = 0) -> float:
        """Largest mean difference, in nats, that is usual."""
        limit = self.tolerance
        if self._first:
            usual = sum(self._first) / len(self._first)
            most = max(self.tolerance, _FACTOR_AT_TOLERANCE * usual)
            floor = max(_FLOOR * self.tolerance, min(self.tolerance, _LEAST_GAP))
            limit = max(floor, min(_FACTOR * usual, most), _AFTER_A_CHECK * self._checked)
        if steps_behind == 0:
            return limit
        return max(limit, _GROWTH * self._behind.get(steps_behind, 0.0))

    def is_usual(self, gap: float, steps_behind: int = 0) -> bool:
        """Whether a step differs by no more than that; False for a non-finite number."""
        return math.isfinite(gap) and gap <= self.limit(steps_behind)

    def is_no_rounding(self, gap: float, steps_behind: int = 0) -> bool:
        """Whether rollouts differ by so much that they are another policy's, whoever passes a check later."""
        if steps_behind:  # a policy moves on by itself, but not by a nat and far beyond what it did so far
            return not gap <= max(_FAR_BEHIND, _GROWTH * self.limit(steps_behind))
        return not (self.is_usual(gap) or gap <= self.tolerance)

    def accept(self, gap: float, steps_behind: int = 0) -> None:
        """Takes a step for right: it was usual, or a parity check was passed."""
        if steps_behind:  # one unusual step does not make the next one usual
            known = self._behind.get(steps_behind, 0.0)
            self._behind[steps_behind] = max(known, min(gap, self.limit(steps_behind)))
        elif not self.is_usual(gap):
            self._checked = gap
        elif len(self._first) < _FIRST_STEPS:
            self._first.append(gap)
