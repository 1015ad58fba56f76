"""Completions from ``transformers`` in this process.

Prompt -> Completion

Knows nothing of rewards or training. The same seed gives the same completions and leaves the process's own random
numbers as they were.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from perl.model import eos_token_ids, evaluating
from perl.types import Completion, Prompt

# Said even where it changes nothing: transformers fills what is left open from the model's generation_config.json, and
# a repetition penalty or a cut-off there would sample from another policy than the one that is trained or scored.
_NEUTRAL_GREEDY = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
_NEUTRAL = {**_NEUTRAL_GREEDY, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: Softmax temperature; 0: the likeliest token (greedy).
        top_p: Nucleus.
        max_completion_length: Tokens after which a completion is cut off.
        seed: Of the whole call.
        batch_size: Completions generated at a time; part of what a seed means.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_completion_length: int = 512
    seed: int = 0
    batch_size: int = 256


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    on_batch: Callable[[int], None] | None = None,
) -> list[Completion]:
    """One completion for each prompt (repeat a prompt for several).

    Args:
        model: The policy, with whatever adapter is active.
        tokenizer: The base's.
        prompts: In any order; those of like length share a batch.
        sampling: How tokens are drawn.
        on_batch: Called with the number of completions that are new.

    Returns:
        Completions in the order of the prompts.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))
    completions: dict[int, Completion] = {}
    ends = eos_token_ids(model, tokenizer)
    config = _generation_config(sampling, ends, tokenizer)
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with evaluating(model), torch.random.fork_rng(devices=cuda), torch.no_grad():
        torch.manual_seed(sampling.seed)
        for start in range(0, len(order), sampling.batch_size):
            rows = order[start : start + sampling.batch_size]
            batch = _generate_batch(model, tokenizer, [prompts[i] for i in rows], config)
            for row, ids in zip(rows, batch, strict=True):
                completions[row] = _completion(ids, ends, tokenizer)
            if on_batch:
                on_batch(len(rows))
    return [completions[i] for i in range(len(prompts))]


def fill_with_neutral(config: GenerationConfig) -> None:
    """Sets every sampling field that is left open to the value that changes nothing."""
    for name, value in _NEUTRAL.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)


def _generation_config(
    sampling: Sampling, ends: tuple[int, ...], tokenizer: PreTrainedTokenizerBase
) -> GenerationConfig:
    drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    return GenerationConfig(
        max_new_tokens=sampling.max_completion_length,
        eos_token_id=list(ends),
        pad_token_id=tokenizer.pad_token_id,
        **(_NEUTRAL | drawn if sampling.temperature > 0 else _NEUTRAL_GREEDY | {"do_sample": False}),
    )


def _generate_batch(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt], config: GenerationConfig
) -> list[list[int]]:
    """New token ids of each row, padding included."""
    batch = tokenizer.pad(
        {"input_ids": [list(p.token_ids) for p in prompts]}, padding_side="left", return_tensors="pt"
    ).to(next(model.parameters()).device)
    ids = model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], generation_config=config)
    return ids[:, batch["input_ids"].size(1) :].tolist()


def _completion(ids: list[int], ends: tuple[int, ...], tokenizer: PreTrainedTokenizerBase) -> Completion:
    """The row up to and with its first end token."""
    end = next((i for i, token in enumerate(ids) if token in ends), None)
    kept = ids if end is None else ids[: end + 1]
    return Completion(tuple(kept), tokenizer.decode(kept, skip_special_tokens=True), truncated=end is None)
