"""Rollouts by transformers in this process: those that TRL's ``generate`` would sample, in less time where that can be.

prompts -> their tokens -> tokens of the completions

A completion's length is that of the whole conversation after the prompt: what the policy wrote and what tools answered.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import torch
from peft import PeftModel, PeftModelForCausalLM
from torch import nn
from transformers import GenerationMixin
from trl import GRPOTrainer

from perl.packing.forward import drops_out
from perl.policy.model import base_of, evaluating
from perl.rollouts.branching import why_not_branching
from perl.rollouts.next_token import as_the_policy, sampling_of, write_as_generate
from perl.trainer.arguments import shown_to_trl
from perl.trainer.arguments.config import own_setting

# What decides on tokens, as the libraries had it before any script ran.
_GENERATE = {name: method for name, method in vars(GenerationMixin).items() if inspect.isfunction(method)}
_PREPARES = "prepare_inputs_for_generation"
_OF_PEFT = PeftModel.generate, PeftModelForCausalLM.generate


def generated(
    trainer: GRPOTrainer, prompt_ids: Sequence[Sequence[int]], others: Sequence[Any], by_trl: Callable[[], Any]
) -> Any:  # noqa: ANN401 (TRL's)
    """What ``_generate_single_turn`` returns: what ``generate`` would sample, drawn with the same random numbers.

    Args:
        trainer: Whose generation config says how tokens are drawn.
        prompt_ids: Of each completion.
        others: TRL's next arguments: images, and what else a multimodal model is given.
        by_trl: TRL's own generation, for what only ``generate`` can.
    """
    policy, config, batched = trainer.policy, trainer.generation_config, trainer.use_transformers_continuous_batching
    sampling = None if batched or any(others[:2]) else sampling_of(config)
    drops = policy.training and drops_out(policy)  # it would draw what it drops for each row
    longest, of_a_turn = trainer.max_completion_length, own_setting(trainer.args, "agent_max_turn_length")
    lefts = [tokens_left(ids, longest, of_a_turn) for ids in prompt_ids]
    if sampling is None or drops or generates_by_itself(policy) or why_not_branching(policy):
        with shown_to_trl.for_generation(trainer.args, base_of(policy), batched=batched), as_the_policy(policy):
            written, log_probs = by_trl()
        return [ids[:left] for ids, left in zip(written, lefts, strict=True)], log_probs
    most = max((longest if left is None else left for left in lefts), default=0)
    if not most:
        return [[] for _ in prompt_ids], None
    with evaluating(policy), torch.no_grad():
        sampling = replace(sampling, max_completion_length=most)
        written = write_as_generate(policy, prompt_ids, int(config.pad_token_id or 0), sampling)
    written = [ids[:left] for ids, left in zip(written, lefts, strict=True)]
    return written, None  # transformers' log-probs are not asked for


def generates_by_itself(policy: nn.Module) -> bool:
    """Whether a method of ``generate``, or one that it calls, is not the libraries': a script has put its own there.

    Args:
        policy: Without wrappers.
    """
    base = base_of(policy)
    put = "generate" in vars(policy.base_model)  # where PEFT itself puts another
    put |= any(name in vars(owner) for owner in (policy, base) for name in _GENERATE)
    found = {name: getattr(type(base), name, None) for name in _GENERATE}
    if getattr(found[_PREPARES], "__module__", "").startswith("transformers.models."):  # why_not_branching judges it
        del found[_PREPARES]
    changed = any(method is not _GENERATE[name] for name, method in found.items())
    return put or changed or (isinstance(policy, PeftModel) and type(policy).generate not in _OF_PEFT)


@dataclass(frozen=True)
class Prompts:
    """How prompts become tokens, and tokens text.

    Attributes:
        processing_class: The tokenizer or processor.
        tokenize: The tokens of prompts, as TRL makes them.
        longest: Tokens of the longest prompt that may come, from the longest seen and how many to look at.
    """

    processing_class: Any
    tokenize: Callable[[list[Any]], list[list[int]]]
    longest: Callable[[int, int], int]


class Opening(list[int]):
    """Token ids of a prompt, which remember how many they were when a conversation is added to them.

    Attributes:
        prompt_tokens: How many of them are the prompt.
    """

    def __init__(self, ids: Sequence[int], prompt_tokens: int | None = None) -> None:
        """Begins a conversation."""
        super().__init__(ids)
        self.prompt_tokens = len(self) if prompt_tokens is None else prompt_tokens

    def __add__(self, further: list[int]) -> "Opening":  # type: ignore[override]  # of the same kind
        """The conversation with more at its end."""
        return Opening([*self, *further], self.prompt_tokens)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type, tuple[list[int], int]]:
        """Copies remember it too."""
        return Opening, (list(self), self.prompt_tokens)


def tokens_left(ids: Sequence[int], max_completion_length: int, of_a_turn: int | None) -> int | None:
    """Tokens that may follow; None: it is a prompt alone, and a completion may have all of its length."""
    if not isinstance(ids, Opening) or len(ids) == ids.prompt_tokens:
        return of_a_turn
    left = max(0, max_completion_length - (len(ids) - ids.prompt_tokens))
    return left if of_a_turn is None else min(left, of_a_turn)
