"""Optimizers that make a method: LoRA+'s two learning rates, LoRA-FA's gradient.

policy, optimizer -> optimizer
"""

from typing import Any

import torch
from peft import PeftModel
from peft.optimizers import create_loraplus_optimizer
from peft.tuners.lora.layer import LoraLayer

# Added to A A^T before it is inverted, as PEFT does.
_RIDGE = 1e-8


def lora_plus_optimizer(
    policy: PeftModel, optimizer_class: type[torch.optim.Optimizer], arguments: dict[str, Any], ratio: float
) -> torch.optim.Optimizer:
    """The optimizer with B's learning rate ``ratio`` times that of A (Hayou et al. 2024).

    Args:
        policy: The model; its trainable parameters are taken.
        optimizer_class: Any torch optimizer.
        arguments: Its arguments: ``lr`` is A's rate, ``weight_decay`` everybody's.
        ratio: lambda in the paper.
    """
    others = dict(arguments)
    decay = others.pop("weight_decay", 0.0)
    return create_loraplus_optimizer(
        policy, optimizer_class, loraplus_lr_ratio=ratio, loraplus_weight_decay=decay, **others
    )


def precondition_lora_fa(policy: PeftModel, optimizer: torch.optim.Optimizer) -> None:
    """Replaces B's gradient by the one whose B A is nearest to the full weight's, just before each step.

    g_B <- (1/s^2) g_B (A A^T)^-1 (Zhang et al. 2023, eq. 4; s is the adapter's scale). Where we differ from PEFT's
    ``LoraFAOptimizer``: any optimizer may follow, the product is taken in float32 instead of bfloat16, and only B has
    a state, so that it is saved, resumed and kept equal over processes like that of any other method.

    Args:
        policy: The model, A frozen.
        optimizer: The optimizer of B; the hook stays when its state is loaded.
    """
    adapter = policy.active_adapter
    pairs: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    for layer in policy.modules():
        if isinstance(layer, LoraLayer) and adapter in layer.lora_A:
            A = layer.lora_A[adapter].weight.detach().float()
            ridge = _RIDGE * torch.eye(A.shape[0], device=A.device)
            inverse = torch.linalg.pinv(A @ A.T + ridge) / layer.scaling[adapter] ** 2
            pairs.append((layer.lora_B[adapter].weight, inverse))

    def precondition(*_: Any) -> None:  # noqa: ANN401 (the optimizer and its arguments)
        for B, inverse in pairs:
            if B.grad is not None:
                B.grad.copy_((B.grad.float() @ inverse).to(B.grad.dtype))

    optimizer.register_step_pre_hook(precondition)
