"""Which engine samples for a trainer, and what it cannot do.

what is asked for, circumstances of the training -> a rollout section whose backend is chosen, or an error
"""

import importlib.metadata
import logging
from dataclasses import dataclass

import torch
from trl import GRPOConfig

from perl.errors import ModelError, PerlError, RecipeError
from perl.methods.on_quantised import IN_PROCESS
from perl.policy.model import base_of
from perl.policy.quantised import was_quantised
from perl.recipe.engines import TRANSFORMERS, best_backend
from perl.recipe.sections import RolloutSection
from perl.rollouts.sync import choose_form
from perl.rollouts.vllm.version import check_version
from perl.trainer.config import check_sampling

logger = logging.getLogger("perl")


@dataclass(frozen=True)
class Circumstances:
    """What a training is, as far as an engine's choice depends on it.

    Attributes:
        args: Its arguments.
        policy: What is sampled from.
        whole_tensors: Whether each process holds the whole of each tensor.
        processes: How many there are.
        rollout_function: Whether a ``rollout_func`` samples.
        images: Whether prompts may hold images.
        conversations: Whether tools answer.
    """

    args: GRPOConfig
    policy: torch.nn.Module
    whole_tensors: bool
    processes: int
    rollout_function: bool
    images: bool
    conversations: bool


def is_the_trainers(how: RolloutSection) -> bool:
    """Whether TRL's own generation samples, with transformers."""
    return not how.capabilities.takes_updates


def is_in_each_process(how: RolloutSection) -> bool:
    """Whether each process has an engine of its own."""
    return how.capabilities.in_process


def is_shared(how: RolloutSection) -> bool:
    """Whether all processes use the same engines, which the main process gives the policy."""
    return how.capabilities.needs_servers


def choose_backend(how: RolloutSection, here: Circumstances) -> RolloutSection:
    """The section with a backend instead of ``auto``: vLLM where there is a GPU and nothing stands against it.

    Raises:
        RecipeError: The engine would not sample from the policy that the loss is about.
        ModelError: It cannot be given this model.
    """
    if how.decided:
        if not is_the_trainers(how):
            check_served(how, here)
        return how
    best = how.model_copy(update={"backend": best_backend(on_gpu=torch.cuda.is_available())})
    own = how.model_copy(update={"backend": TRANSFORMERS.name})
    args = here.args
    asked = hasattr(args, "rollout_backend") and not args.use_transformers_continuous_batching
    if is_the_trainers(best) or not asked:
        return own
    try:
        check_version(importlib.metadata.version("vllm"))
        check_served(best, here)
        choose_form(here.policy, how.sync)
    except PerlError as reason:
        logger.info("rollouts from transformers: %s", reason)
        return own
    return best


def check_served(how: RolloutSection, here: Circumstances) -> None:
    """Refuses what an engine cannot do.

    Raises:
        RecipeError: The engine would not sample from the policy that the loss is about.
        ModelError: It cannot be given this model.
    """
    what, args = f"rollout.backend {how.backend}", here.args
    check_sampling(args, how)
    if args.max_completion_length is None:
        raise RecipeError("is open, and an engine must be told", "rollout.max_completion_length", "a number of tokens")
    if is_in_each_process(how) and was_quantised(base_of(here.policy)):
        raise ModelError(IN_PROCESS, what, "transformers, or vllm-server with servers of the quantised base")
    if here.rollout_function:
        raise RecipeError("a rollout_func samples by itself", what, "leave one of them out")
    if here.images:
        raise ModelError("prompts may hold images, which it is not given", what, "transformers")
    if not here.whole_tensors:
        raise ModelError("it needs each tensor of the adapter whole and runs with DDP, not in shards", what)
    if args.vllm_tensor_parallel_size > 1 and is_in_each_process(how):
        raise RecipeError("one GPU holds the engine in this process", "train.vllm_tensor_parallel_size", "vllm-server")
    if how.prefetch and here.conversations:
        raise RecipeError("conversations with tools cannot be sampled ahead", "rollout.prefetch", "0")
    if here.conversations and here.processes > 1:
        raise RecipeError("conversations with tools go on by themselves in each process", what, "transformers")
    every, steps = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps
    if how.prefetch and every > steps:
        problem = f"rollouts that last {every} micro-batches, of which a step takes {steps}, would be older than asked"
        raise RecipeError(problem, "rollout.prefetch", "0")
