"""The places where TRL or transformers must see other values than the user's for a while, each with its reason.

trainer or arguments -> the same, with other values as long as TRL's own code runs

TRL has no hook or argument at these places. Everything else is set by an override or a constructor's argument.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from perl.errors import RecipeError
from perl.packing.attention import without_packed_attention
from perl.run.shards import is_sharded


@contextlib.contextmanager
def _shown(owner: object, **values: Any) -> Iterator[None]:  # noqa: ANN401 (of any attribute)
    kept = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


def for_construction(
    args: GRPOConfig,
    weights: list[float] | None,
    model: Any,  # noqa: ANN401 (TRL's signature)
    *,
    loaded: bool,
) -> contextlib.AbstractContextManager[None]:
    """The arguments that TRL's constructor may act upon; see docs/stack.md.

    Args:
        args: Of the trainer.
        weights: Of the rewards, the process reward's among them.
        model: What is passed on.
        loaded: Whether the model that is passed on was loaded here, as the arguments ask.
    """
    shown: dict[str, Any] = {
        "beta": 0.0,  # TRL would add an adapter or load a model for the reference
        "use_vllm": False,  # TRL's engine receives the whole model, merged in place
        "reward_weights": weights,
    }
    if loaded:
        shown["model_init_kwargs"] = None  # they were used, and TRL would warn that they are not
    if isinstance(model, torch.nn.Module) and is_sharded(model):
        shown["save_only_model"] = True  # transformers cannot save an optimizer of shards; ours is of the whole adapter
    return _shown(args, **shown)


def for_arguments(args: GRPOConfig, rows: int) -> contextlib.AbstractContextManager[None]:
    """Arguments whose single completion of each prompt TRL's check of them takes for one group: GRPO needs two.

    Args:
        args: Before TRL completes them.
        rows: Completions of a generation batch, over all processes.

    Raises:
        RecipeError: There is only one of them.
    """
    if args.num_generations != 1:
        return contextlib.nullcontext()
    if rows < 2:
        what = "a batch of a single completion has nothing to be compared with"
        raise RecipeError(what, "num_generations", "2 or more completions a step: prompts_per_step")
    return _shown(args, num_generations=rows, num_generations_eval=args.num_generations_eval or 1)


def for_rollouts(trainer: GRPOTrainer, rewards: list[Any], *, ours: bool) -> contextlib.AbstractContextManager[None]:
    """A trainer that makes rollouts without log-probabilities, which are added once their advantages are known.

    Args:
        trainer: Makes rollouts.
        rewards: Its reward functions, whose results are checked.
        ours: Whether the optimizer step is ours; where it is TRL's, so are the old policy's log-probabilities.
    """
    shown: dict[str, Any] = {"reward_funcs": rewards, "beta": 0.0}  # TRL would run its own reference over every row
    if ours:
        shown |= {"scores_rollouts": False, "vllm_importance_sampling_correction": False}  # the step corrects
    return _shown(trainer, **shown)


def for_checkpoint(args: GRPOConfig) -> contextlib.AbstractContextManager[None]:
    """Arguments with which transformers deletes no older checkpoint before the new one is complete."""
    return _shown(args, save_total_limit=None)


@contextlib.contextmanager
def for_generation(args: GRPOConfig, model: torch.nn.Module, *, batched: bool) -> Iterator[None]:
    """A base for transformers' generation: continuous batching knows attention by name, and TRL casts for good for it.

    Args:
        args: Of the trainer; TRL casts the whole model to their half precision.
        model: The base.
        batched: Whether batching is continuous.
    """
    if not batched:
        yield
        return
    with _shown(args, bf16=False, fp16=False), without_packed_attention(model):
        yield
