"""A score without the package: seeds by hand, completions straight from the model, answers by a regular expression.

questions, model -> which completions are right
"""

import hashlib
import re
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from perl.policy.model import eos_token_ids
from perl.rollouts.engine import Request, completion_of
from perl.rollouts.hf_engine import TransformersEngine
from perl.types import Completion
from tests.completing import Drawing, sampling_of


def seed_by_hand(task: str, problem: str, index: int, seed: int = 0) -> int:
    """Half of the first 32 bits of a hash."""
    return int(hashlib.sha256(f"{seed}\n{task}\n{problem}\n{index}".encode()).hexdigest()[:8], 16) // 2


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


def is_right(text: str, gold: str) -> bool:
    """Whether the last box holds the gold answer, a whole number, literally."""
    answers = re.findall(r"\\boxed\{(.*?)\}", text)
    return bool(answers) and answers[-1] == gold
