"""Completions straight from the model, each with its seed and alone.

prompts, seeds, model -> completions
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from perl.policy.model import eos_token_ids
from perl.rollouts.engine import Request, completion_of
from perl.rollouts.hf_engine import TransformersEngine
from perl.types import Completion
from tests.completing import Drawing, sampling_of


def complete_with_seeds(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    drawing: Drawing,
) -> list[Completion]:
    """A completion for each prompt with its seed, one at a time."""
    ends = eos_token_ids(model, tokenizer)
    engine = TransformersEngine(model, tokenizer, 1)
    found = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        [[sampled]] = engine.start([Request(tuple(prompt), 1, seed)], sampling_of(drawing, ends)).result()
        found.append(completion_of(sampled, ends, tokenizer))
    return found
