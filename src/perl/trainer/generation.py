"""Rollouts by transformers in this process: those that TRL's ``generate`` would sample, in less time where that can be.

prompts -> tokens of the completions
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from trl import GRPOTrainer

from perl.packing.forward import drops_out
from perl.policy.model import base_of, evaluating
from perl.rollouts.branching import why_not_branching
from perl.rollouts.next_token import more_than_sampling, sampling_of, write_as_generate
from perl.trainer import shown_to_trl


def generated(
    trainer: GRPOTrainer,
    policy: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    others: Sequence[Any],
    by_trl: Callable[[], Any],
) -> Any:  # noqa: ANN401 (TRL's)
    """What ``_generate_single_turn`` returns.

    Args:
        trainer: Whose generation config says how tokens are drawn.
        policy: Without wrappers.
        prompt_ids: Of each completion.
        others: TRL's next arguments: images, and what else a multimodal model is given.
        by_trl: TRL's own generation, for what is none of ours.
    """
    batched = trainer.use_transformers_continuous_batching
    written = None if batched or any(others[:2]) else as_generate(policy, prompt_ids, trainer.generation_config)
    if written is not None:
        return written, None  # transformers' log-probs are not asked for
    with shown_to_trl.for_generation(trainer.args, base_of(policy), batched=batched):
        return by_trl()


def as_generate(
    policy: nn.Module, prompt_ids: Sequence[Sequence[int]], config: GenerationConfig
) -> list[list[int]] | None:
    """What ``generate`` would sample, drawn with the same random numbers; None: only ``generate`` can.

    Args:
        policy: Without wrappers.
        prompt_ids: Of each completion.
        config: The trainer's, complete.
    """
    sampling = sampling_of(config)
    if sampling is None or (policy.training and drops_out(policy)):  # it would draw what it drops for each row
        return None
    if why_not_branching(policy) or more_than_sampling(base_of(policy).generation_config):
        return None
    with evaluating(policy), torch.no_grad():
        return write_as_generate(policy, prompt_ids, int(config.pad_token_id or 0), sampling)
