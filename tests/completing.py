"""Completions of prompts by the model in memory, as tests want them.

model, prompts -> Completion
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from perl.policy.model import eos_token_ids
from perl.rollouts.engine import EngineSampling, OnGroup, Request, completion_of
from perl.rollouts.hf_engine import TransformersEngine
from perl.types import Completion, Prompt


@dataclass(frozen=True)
class Drawing:
    """How completions are drawn; that of prompt i with ``seed + i``, until one of the model's own end tokens."""

    longest: int = 24
    temperature: float = 1.0
    seed: int = 0
    batch_size: int = 256
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def but(self, **changes: float) -> "Drawing":
        """The same with changes."""
        return replace(self, **changes)


def sampling_of(drawing: Drawing, ends: tuple[int, ...]) -> EngineSampling:
    """As engines take it."""
    return EngineSampling(
        drawing.temperature,
        drawing.longest,
        ends,
        drawing.top_p,
        drawing.top_k,
        drawing.min_p,
        drawing.repetition_penalty,
    )


def complete(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    drawing: Drawing,
    on_group: OnGroup | None = None,
) -> list[Completion]:
    """One completion for each prompt, in their order."""
    ends = eos_token_ids(model, tokenizer)
    requests = [Request(prompt.token_ids, 1, drawing.seed + i) for i, prompt in enumerate(prompts)]
    engine = TransformersEngine(model, tokenizer, drawing.batch_size)
    groups = engine.start(requests, sampling_of(drawing, ends), on_group).result()
    return [completion_of(sampled, ends, tokenizer) for (sampled,) in groups]
