"""Which engine samples for a trainer, and what it cannot do.

requested section, trainer -> a rollout section whose backend is chosen, or an error
"""

import importlib.metadata
import logging

import torch
from trl import GRPOTrainer

from perl.errors import MissingExtraError, ModelError, PerlError, RecipeError, raise_all
from perl.methods.base_checks import IN_PROCESS
from perl.policy.model import base_of
from perl.policy.quantised import was_quantised
from perl.recipe.rollout_section import TRANSFORMERS, RolloutSection, best_backend
from perl.rollouts.sync import choose_form
from perl.rollouts.vllm.release import check_version, missing_vllm
from perl.trainer.arguments.argument_checks import check_sampling
from perl.trainer.overrides import may_hold_images

logger = logging.getLogger("perl")


def choose_backend(how: RolloutSection, trainer: GRPOTrainer) -> RolloutSection:
    """The section with a backend instead of ``auto``: vLLM where there is a GPU and nothing stands against it.

    Raises:
        RecipeError: The engine would not sample from the policy that the loss is about.
        ModelError: It cannot be given this model.
        MissingExtraError: It needs a package that is not installed.
    """
    if how.decided:
        if not how.capabilities.installed:
            raise_all(MissingExtraError, [missing_vllm("rollout.backend")])
        if how.capabilities.takes_updates:  # else TRL's own generation samples, with transformers
            check_served(how, trainer)
        return how
    args = trainer.args
    on_gpu = torch.cuda.is_available() and not args.use_cpu
    best = how.model_copy(update={"backend": best_backend(on_gpu=on_gpu)})
    own = how.model_copy(update={"backend": TRANSFORMERS.name})
    asked = hasattr(args, "rollout_backend") and not args.use_transformers_continuous_batching
    if not best.capabilities.takes_updates or not asked:
        return own
    try:
        check_version(importlib.metadata.version("vllm"))
        check_served(best, trainer)
        choose_form(trainer.policy, how.sync)
    except PerlError as reason:
        logger.info("rollouts from transformers: %s", reason)
        return own
    return best


def holds_conversations(trainer: GRPOTrainer) -> bool:
    """Whether completions go on after a tool or an environment has answered."""
    return bool(trainer.tools) or trainer.environment_factories is not None


def check_served(how: RolloutSection, trainer: GRPOTrainer) -> None:
    """Refuses what an engine cannot do.

    Raises:
        RecipeError: The engine would not sample from the policy that the loss is about.
        ModelError: It cannot be given this model.
    """
    what, args = f"rollout.backend {how.backend}", trainer.args
    check_sampling(args, how)
    if args.max_completion_length is None:
        raise RecipeError("is open, and an engine must be told", "rollout.max_completion_length", "a number of tokens")
    if how.capabilities.in_process and was_quantised(base_of(trainer.policy)):
        raise ModelError(IN_PROCESS, what, "transformers, or vllm-server with servers of the quantised base")
    if trainer.rollout_func is not None:
        raise RecipeError("a rollout_func samples by itself", what, "leave one of them out")
    if may_hold_images(trainer):
        raise ModelError("prompts may hold images, which it is not given", what, "transformers")
    if args.vllm_tensor_parallel_size > 1 and how.capabilities.in_process:
        raise RecipeError("one GPU holds the engine in this process", "train.vllm_tensor_parallel_size", "vllm-server")
    data = getattr(trainer.train_dataset, "column_names", None) or ["prompt"]
    if how.prefetch and (trainer._multi_environment or "prompt" not in data):
        why = "prompts that environments make are not known ahead"
        raise RecipeError(why, "rollout.prefetch", "0, or one environment and a column prompt")
