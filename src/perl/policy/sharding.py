"""Models in shards over several processes (FSDP, DeepSpeed ZeRO-3): which they are, what cannot be done with them yet.

arguments, model -> the strategy's name, or an error that names it; sharded adapter -> whole tensors

What cannot be done is refused before anything is trained, by name.
"""

import os
from typing import Any

import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from perl.errors import ModelError, RecipeError

_WHOLE = "run with DDP (accelerate launch without FSDP), or with DeepSpeed ZeRO 1 or 2"


def strategy_of(accelerator: Accelerator, model: nn.Module) -> str | None:
    """What shards the parameters; None: every process holds the whole of each.

    Args:
        accelerator: The trainer's.
        model: Without wrappers.
    """
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        return "FSDP2" if accelerator.is_fsdp2 else "FSDP1"
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        return "DeepSpeed ZeRO-3"
    return "FSDP2" if any(isinstance(p, DTensor) for p in model.parameters()) else None


def check_reference(strategy: str | None, *, snapshot: bool, beta: float) -> None:
    """Refuses a reference that would be the policy itself.

    Args:
        strategy: From :func:`strategy_of`.
        snapshot: Whether the reference is a copy of trained tensors, not the base with the adapter switched off.
        beta: Coefficient of the KL divergence.

    Raises:
        RecipeError: Names the strategy.
    """
    if strategy is not None and snapshot and beta != 0.0:
        raise RecipeError(
            f"a copy of the policy cannot take its place under {strategy}: the KL divergence would be 0 in every step",
            "reference",
            f"reference: base with an adapter, beta: 0, or {_WHOLE}",
        )


def check_push(args: TrainingArguments, *, asked: bool, strategy: str | None = None) -> None:
    """Refuses to push from shards: one process, which holds only a part, compares what was saved with the policy.

    Args:
        args: Of the trainer.
        asked: Whether it is to be pushed.
        strategy: From :func:`strategy_of`, once there is a model.

    Raises:
        RecipeError: Names the strategy.
    """
    strategy = strategy or strategy_asked_for(args)
    if strategy is not None and asked:
        raise RecipeError(
            f"under {strategy} the adapter cannot be proven before it is pushed",
            "push_to_hub",
            "save_adapter, then push from a single process",
        )


def check_unsharded_run(args: TrainingArguments) -> None:
    """Refuses a recipe in shards: its adapter is proven and scored by one process, which holds only a part of it.

    Raises:
        RecipeError: Names the strategy.
    """
    strategy = strategy_asked_for(args)
    if strategy is not None:
        raise RecipeError(
            f"a recipe's adapter is proven and scored by one process, which under {strategy} holds only a part of it",
            "train.fsdp" if strategy == "FSDP" else "train.deepspeed",
            f"{_WHOLE}; or train by a script with PeftGRPOTrainer",
        )


def strategy_asked_for(args: TrainingArguments) -> str | None:
    """What arguments or the launcher ask for, before there is an accelerator."""
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true":
        return "FSDP"
    plugin = getattr(args, "deepspeed_plugin", None)
    return "DeepSpeed ZeRO-3" if plugin is not None and plugin.zero_stage == 3 else None


def whole_adapter(policy: PeftModel, strategy: str) -> dict[str, torch.Tensor]:
    """Name -> tensor of the adapter, gathered; every process must ask at once.

    Raises:
        ModelError: Nothing is known to gather under this strategy.
    """
    if strategy != "FSDP2":
        raise ModelError(
            f"the adapter by itself cannot be gathered under {strategy}",
            "save_adapter",
            "trainer.save_model(folder), which transformers gathers; or FSDP2 (fsdp_version: 2), or DDP",
        )
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}  # biases of the base may be among them
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in policy.state_dict().items()
        if policy.active_adapter in name.split(".") or name in trained
    }


def adapter_type_options(model: Any) -> dict[str, bool]:  # noqa: ANN401 (any model)
    """What PEFT must be told of an adapter's type on this base: under ZeRO-3 it must be the base's.

    DeepSpeed gathers parameters in the type of the first of them; a float32 adapter on a half-precision base ends in a
    TypeError at the first optimizer step. Its optimizer keeps float32 copies of them all, so no small step is lost.

    Source: TRL 1.16's ``GRPOTrainer``, which does the same.
    """
    quantized = getattr(model, "hf_quantizer", None) is not None
    return {"autocast_adapter_dtype": False} if is_deepspeed_zero3_enabled() and not quantized else {}
