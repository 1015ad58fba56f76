"""What a method does beside its layers: functions for a policy, called while it trains, is saved and is loaded.

policy -> Hooks

The row of a method names the module that has them. Callers call every hook of every policy but a regulariser, which
most lack; what a method does not need does nothing.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from perl.methods.registry import METHODS

Tensors = dict[str, torch.Tensor]
Factors = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _nothing(*_: object) -> None:
    """Does nothing."""


@dataclass(frozen=True)
class Hooks:
    """The functions of a method; each takes the policy first.

    Attributes:
        method: Name of the method, under which a checkpoint keeps ``state``; empty: there is no hook.
        before_training: (policy, steps): fits a schedule to the number of optimizer steps of the whole training.
        after_step: (policy, step): after an optimizer step, from 1, while its gradients are still there.
        after_training: (policy): makes the trained policy the one that others load.
        regulariser: (policy) -> term of the loss, once for each optimizer step; None: there is none.
        log: (policy) -> metrics by name, once for each optimizer step.
        state: (policy) -> tensors that a checkpoint needs beside the adapter's.
        load_state: (policy, tensors): puts back what ``state`` returned.
        as_loaded: (policy, tensors by their names in the adapter's file) -> the numbers that plain PEFT loads.
    """

    method: str = ""
    before_training: Callable[[PeftModel, int], None] = _nothing
    after_step: Callable[[PeftModel, int], None] = _nothing
    after_training: Callable[[PeftModel], None] = _nothing
    regulariser: Callable[[PeftModel], torch.Tensor] | None = None
    log: Callable[[PeftModel], dict[str, float]] = lambda _: {}
    state: Callable[[PeftModel], Tensors] = lambda _: {}
    load_state: Callable[[PeftModel, Mapping[str, torch.Tensor]], None] = _nothing
    as_loaded: Callable[[PeftModel, Mapping[str, torch.Tensor]], Tensors] = lambda _, tensors: dict(tensors)


def hooks_of(policy: nn.Module) -> Hooks:
    """The hooks of the method that a policy is trained by, found by the type of its adapter's config."""
    if not isinstance(policy, PeftModel):
        return Hooks()
    kinds = {kind.__name__ for config in policy.peft_config.values() for kind in type(config).__mro__}
    for config_class, module in _modules():
        if config_class in kinds:
            found: Hooks = module.hooks(policy)
            return found
    return Hooks()


def factors_of(layer: BaseTunerLayer) -> Factors | None:
    """How the update of a layer is read as factors, where its method says so.

    Returns:
        (layer, adapter, masked) -> (rank, in) and (out, rank) float32; masked: with masked parts, as zeros.
    """
    for _, module in _modules():
        if isinstance(layer, module.LAYER):
            found: Factors = module.factors
            return found
    return None


def _modules() -> Iterator[tuple[str, ModuleType]]:
    """Name of PEFT's config class, and the module with the hooks."""
    return ((row.config, importlib.import_module(row.hooks)) for row in METHODS.values() if row.hooks)
