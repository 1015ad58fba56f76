"""Proofs at run time that the run is what it says.

model, optimizer, files -> nothing, or an error that says what broke

Knows nothing of recipes, folders or progress.
"""

from pathlib import Path

import torch
from peft import PeftModel

from perl.checkpoint import reload_difference
from perl.errors import BrokenPromiseError
from perl.model import base_fingerprint

# Largest difference of a token's log-probability, in nats, between the trained adapter and the saved one. Adapters
# are saved in the type they are trained in, so the two differ by the order of additions at most.
RELOAD_TOLERANCE = 1e-4


def check_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every trainable parameter must be in the optimizer.

    Raises:
        BrokenPromiseError: With the names of those that would never move.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise BrokenPromiseError(
            f"{len(missing)} trainable parameters are not in the optimizer and would not move: {', '.join(missing[:3])}"
        )


def check_base_unchanged(model: torch.nn.Module, fingerprint: str) -> None:
    """The base's weights must be, bit for bit, those that were loaded.

    Raises:
        BrokenPromiseError: They are not.
    """
    now = base_fingerprint(model)
    if now != fingerprint:
        raise BrokenPromiseError(
            f"the base's weights changed while the adapter was trained ({fingerprint[:12]} before, {now[:12]} now): "
            "the adapter does not belong to the published base"
        )


def check_saved_adapter(policy: PeftModel, adapter: Path, input_ids_BT: torch.Tensor) -> float:
    """The saved adapter must give the trained policy's log-probabilities.

    Returns:
        The largest difference, in nats.

    Raises:
        BrokenPromiseError: It is above the tolerance.
    """
    difference = reload_difference(policy, adapter, input_ids_BT)
    if not difference <= RELOAD_TOLERANCE:
        raise BrokenPromiseError(
            f"the adapter in {adapter} is not the one that was trained: log-probabilities differ by {difference:.2e} "
            f"(at most {RELOAD_TOLERANCE:.0e})"
        )
    return difference
