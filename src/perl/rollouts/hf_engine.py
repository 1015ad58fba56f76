"""Completions from ``transformers`` in this process, of the policy that is in memory.

prompts in tokens -> Sampled

Of a model in shards all processes sample at once, batch by batch; transformers then goes on until the last one is done.

Each completion is drawn with its own seed: which others share its batch, or how many, changes nothing but the rounding
of logits. The process's random state stays as it was.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from peft import PeftModel
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from perl.errors import ModelError
from perl.policy.model import evaluating
from perl.recipe.rollout_section import TRANSFORMERS, Capabilities
from perl.rollouts.branching import why_not_branching, write
from perl.rollouts.engine import EngineSampling, FinishedRollouts, OneCopy, OnGroup, Request, Sampled, Update
from perl.rollouts.next_token import LastDraw, Seeded, as_the_policy, uniforms_of, warp_of, warpers
from perl.run.devices import threads_for
from perl.run.shards import is_sharded

POLICY = "policy"
"""Version name of every completion: there is one copy, the policy itself."""


@dataclass(frozen=True)
class _Wanted:
    """One completion that is wanted: the request's position, and which of its completions."""

    position: int
    index: int
    prompt_ids: tuple[int, ...]
    seed: int


class TransformersEngine(OneCopy):
    """Samples from the model in memory, which is the policy itself, with whatever adapter is active."""

    capabilities: ClassVar[Capabilities] = TRANSFORMERS

    def __init__(
        self, model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, batch_size: int = 256
    ) -> None:
        """Takes the model, and samples from it as it is at each request.

        Args:
            model: The policy.
            tokenizer: The base's; only its padding token is used.
            batch_size: Completions written at a time; fewer, from then on, where the memory does not suffice.
        """
        self._model, self._tokenizer, self._batch_size = model, tokenizer, batch_size
        self.token = 0
        """Which token of the completions that are written together is being drawn; 0: none is, or nobody counts."""

    def load(self, update: Update) -> None:
        """Refuses: it needs no update.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"no update {update.name}: samples come from the model in memory, which is the policy itself")

    def start(
        self, requests: Sequence[Request], sampling: EngineSampling, on_group: OnGroup | None = None
    ) -> FinishedRollouts:
        """Samples, and returns when all is done; the model is in evaluation mode meanwhile.

        Args:
            requests: Prompts and how many completions of each; those of like length share a batch.
            sampling: How tokens are drawn. Top-k, nucleus and min-p apply in this order, as in transformers; vLLM has
                min-p first, which is the same unless a nucleus is set too.
            on_group: Called between two batches as soon as a request's completions are there. If it raises, the others
                are given up.

        Raises:
            ModelError: The memory does not suffice for one completion, or for a batch of a model in shards.
        """
        longest = max((request.most_tokens(sampling) for request in requests), default=0)
        sampling = replace(sampling, max_completion_length=max(1, longest))
        left: list[_Wanted] = []
        alike: dict[tuple[int, ...], int] = {}
        for position, request in enumerate(requests):
            first = secrets.randbits(63) if request.seed is None else request.seed
            left += [_Wanted(position, i, request.prompt_ids, first + i) for i in range(request.count)]
            alike.setdefault(request.prompt_ids, position)
        left.sort(key=lambda row: (len(row.prompt_ids), alike[row.prompt_ids]))  # all of one prompt together
        found: list[dict[int, Sampled]] = [{} for _ in requests]
        with evaluating(self._model), torch.no_grad(), threads_for(self._model):
            while left:
                batch = left[: self._batch_size]
                drawn = self._try(batch, sampling)
                if drawn is None:
                    self._batch_size = len(batch) // 2
                    torch.cuda.empty_cache()
                    continue
                left = left[len(batch) :]
                for row, sampled in zip(batch, drawn, strict=True):
                    group = found[row.position]
                    group[row.index] = _cut(sampled, requests[row.position].most_tokens(sampling))
                    if on_group is not None and len(group) == requests[row.position].count:
                        on_group(row.position, _in_order(group))
        self.token = 0
        return FinishedRollouts([_in_order(group) for group in found])

    def trial(self, request: Request, sampling: EngineSampling) -> dict[str, list[Sampled]]:
        """What the policy writes, as ``transformers``."""
        return {"transformers": self.start([request], sampling).result()[0]}

    @cached_property
    def why_by_generate(self) -> str | None:
        """Why transformers' own loop writes, which runs a group's prompt and what has ended row by row; None: ours."""
        return why_not_branching(self._model)

    @property
    def asleep_bytes(self) -> int:
        """0: no device memory is kept for it."""
        return 0

    def sleep(self) -> None:
        """Does nothing: no memory is held between two calls."""

    def close(self) -> None:
        """Nothing is held; the model stays its owner's."""

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _try(self, rows: Sequence[_Wanted], sampling: EngineSampling) -> list[Sampled] | None:
        """A completion for each row; None: the memory does not suffice for so many."""
        try:
            return self._draw(rows, sampling)
        except torch.OutOfMemoryError as error:
            if is_sharded(self._model):
                what = f"not enough memory for a batch of {len(rows)}, and other processes wait for this one's tensors"
                raise ModelError(what, hint="a smaller eval.batch_size, or fewer tokens a completion") from error
            if len(rows) > 1:
                return None  # what the batch held is given back with this frame
            longest = len(rows[0].prompt_ids) + sampling.max_completion_length
            message = f"not enough memory for one completion: {longest} tokens with its prompt"
            raise ModelError(message, hint="allow fewer tokens a completion, or a smaller model") from error

    def _draw(self, rows: Sequence[_Wanted], sampling: EngineSampling) -> list[Sampled]:
        uniforms = None
        if sampling.temperature:
            uniforms = uniforms_of([row.seed for row in rows], sampling.max_completion_length, self._device)
        if self.why_by_generate is not None:
            return self._generate(rows, sampling, uniforms)
        seeded = Seeded(uniforms)

        def draw(step: int, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401 (of Seeded)
            self.token = step + 1
            return seeded(step, *given)

        written = write(
            self._model,
            [row.prompt_ids for row in rows],
            padding=int(self._tokenizer.pad_token_id or 0),
            ends=sampling.end_token_ids,
            longest=sampling.max_completion_length,
            draw=draw,
            warp=warp_of(sampling),
            needs_tokens=sampling.repetition_penalty != 1.0,
        )
        pairs = zip(written.token_ids, written.log_probs or (), strict=True)
        return [Sampled(tuple(ids), tuple(log_probs), POLICY) for ids, log_probs in pairs]

    def _generate(
        self, rows: Sequence[_Wanted], sampling: EngineSampling, uniforms: torch.Tensor | None
    ) -> list[Sampled]:
        """By transformers' own loop, for models whose cache cannot be selected by rows."""
        prompts = {"input_ids": [list(row.prompt_ids) for row in rows]}
        batch = self._tokenizer.pad(prompts, padding_side="left", return_tensors="pt").to(self._device)
        mask, width = batch["attention_mask"], batch["input_ids"].size(1)
        last = LastDraw(width, uniforms)
        with as_the_policy(self._model):
            ids: torch.Tensor = self._model.generate(
                input_ids=batch["input_ids"],
                attention_mask=mask,
                generation_config=GenerationConfig(
                    max_new_tokens=sampling.max_completion_length,
                    eos_token_id=list(sampling.end_token_ids),
                    pad_token_id=self._tokenizer.pad_token_id,
                    do_sample=False,  # the last processor leaves one token
                ),
                logits_processor=LogitsProcessorList([*warpers(sampling, width - mask.sum(dim=1)), last]),
            )
        log_probs = torch.stack(last.log_probs, dim=1).tolist()
        found = []
        for tokens, scores in zip(ids[:, width:].tolist(), log_probs, strict=True):
            ends = (i + 1 for i, token in enumerate(tokens) if token in sampling.end_token_ids)
            length = next(ends, len(tokens))  # up to and with the first end token
            found.append(Sampled(tuple(tokens[:length]), tuple(scores[:length]), POLICY))
        return found


def _cut(sampled: Sampled, longest: int) -> Sampled:
    """Its first tokens; drawn by numbers of their own, they do not depend on how many follow."""
    return replace(sampled, token_ids=sampled.token_ids[:longest], log_probs=sampled.log_probs[:longest])


def _in_order(group: dict[int, Sampled]) -> list[Sampled]:
    return [group[i] for i in range(len(group))]
