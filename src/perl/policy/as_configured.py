"""What a policy is beside its adapter's tensors: as its config and its base make it, and nothing that a script did.

policy -> facts by module and tensor, to compare later; or an error that names what whoever loads the adapter lacks
"""

import copy
from collections.abc import Mapping

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from perl.errors import ModelError
from perl.methods.base_parameters import is_of_the_base, parts_of
from perl.policy.attach import fresh_adapter
from perl.policy.guards import checksum
from perl.policy.model import base_of, empty_of
from perl.policy.published import check_published, is_foreign

_PLAIN = (bool, int, float, str, list, tuple, type(None))
_OF_A_TRAINING = ("training", "_is_accelerate_prepared")


def facts_of(policy: PeftModel) -> dict[str, object]:
    """What no training changes: of each module its plain settings and foreign functions, of the base its numbers."""
    adapter = policy.active_adapter
    facts: dict[str, object] = {name: _of_module(module, adapter) for name, module in policy.named_modules()}
    for held in (policy.named_parameters(), policy.named_buffers()):
        for name, tensor in held:
            if is_of_the_base(policy, name) and not tensor.is_meta:
                here = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                facts |= {part: int(checksum(plain)) for part, plain in parts_of(name, here.detach())}
    return facts


def check_unchanged(policy: PeftModel, before: Mapping[str, object]) -> dict[str, object]:
    """What was found of a policy must be so still; where something is not, all that is saved is proven again.

    Args:
        policy: As it is now.
        before: :func:`facts_of` it, once it was proven.

    Returns:
        The facts, as they are now.

    Raises:
        ModelError: Names what was changed.
    """
    now = facts_of(policy)
    if now != before:
        with torch.random.fork_rng(devices=[]):  # a training draws the same whether or not it was looked at
            check_published(policy, loaded_here=False)
            check_as_configured(policy)
    return now


def check_as_configured(policy: PeftModel) -> None:
    """An adapter's modules must be as its config makes them once it is saved, with its patterns in order.

    Raises:
        ModelError: Names the first that is not, as with a scaling that was changed.
    """
    adapter = policy.active_adapter
    config = copy.deepcopy(policy.peft_config[adapter])
    for name, value in vars(config).items():
        if isinstance(value, dict) and name.endswith("_pattern"):
            setattr(config, name, dict(sorted(value.items())))
    try:
        made = dict(fresh_adapter(empty_of(base_of(policy)), config, adapter).named_modules())
    except NotImplementedError:  # SHiRA looks for places in weights, which there are none of
        return
    for name, module in policy.named_modules():
        if name in made and (isinstance(module, BaseTunerLayer) or not is_of_the_base(policy, f"{name}.")):
            here, there = _of_module(module, adapter), _of_module(made[name], adapter)
            for fact in sorted(key for key in here | there if here.get(key, False) != there.get(key, False)):
                raise ModelError(
                    f"{name}: {fact} is {here.get(fact)}, and {there.get(fact)} as the config makes it, which "
                    "alone is saved",
                    "model",
                    "leave the layers as get_peft_model makes them, and say it in the config",
                )


def _of_module(module: nn.Module, adapter: str) -> dict[str, object]:
    facts: dict[str, object] = {}
    for name, value in vars(module).items():
        own = value[adapter] if isinstance(value, dict) and adapter in value else value
        if name not in _OF_A_TRAINING and isinstance(own, _PLAIN) and own is not False:  # which a class may say too
            facts[name] = copy.copy(own)
    put = [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), vars(module).get("forward")]
    return facts | {"what is called": [function for function in put if function and is_foreign(function)]}
