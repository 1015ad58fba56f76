"""What a policy is beside its adapter's tensors: as its config and its base make it, and nothing that a script did.

policy -> facts by module and tensor, to compare later; or an error that names what whoever loads the adapter lacks
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from perl.errors import ModelError
from perl.methods.base_parameters import is_of_the_base, parts_of
from perl.policy.attach import fresh_adapter
from perl.policy.guards import checksum
from perl.policy.model import base_of, empty_of, evaluating
from perl.policy.published import check_published, is_foreign
from perl.policy.reference import random_tokens, token_log_probs
from perl.run.shards import is_sharded

_PLAIN = (bool, int, float, str, list, tuple, type(None))
_OF_A_TRAINING = ("training", "_is_accelerate_prepared")
_CALLED = "what is called"


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
    if now != before and not is_sharded(policy):  # whose proof is collective, and a process may ask alone
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
    _check_called(policy)
    for name, module in policy.named_modules():
        if name in made and (isinstance(module, BaseTunerLayer) or not is_of_the_base(policy, f"{name}.")):
            here, there = _of_module(module, adapter), _of_module(made[name], adapter)
            for fact in sorted(key for key in there if here.get(key, False) != there[key] and key != _CALLED):
                what = f"{name}: {fact} is {here.get(fact)}, and {there.get(fact)} as the config makes it"
                hint = "leave the layers as get_peft_model makes them, and say it in the config"
                raise ModelError(f"{what}, which alone is saved", "model", hint)


def _check_called(policy: PeftModel) -> None:
    """Functions that a script has put on modules may look, and change no log-prob."""
    held: list[tuple[dict[int, Any], dict[int, Any]]] = []
    if any(is_foreign(vars(module)["forward"]) for module in policy.modules() if "forward" in vars(module)):
        what = "a forward of your own is put in a module's place, and only the adapter is saved"
        raise ModelError(what, "model", "leave the layers as get_peft_model makes them")
    for hooks in (hooks for module in policy.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)):
        foreign = {key: hook for key, hook in hooks.items() if is_foreign(hook)}
        held += [(hooks, foreign)] if foreign else []
    if not held:
        return
    ids = random_tokens(policy)
    with evaluating(policy), torch.no_grad():
        found = [token_log_probs(policy, ids, torch.ones_like(ids))]
        for hooks, foreign in held:
            for key in foreign:
                del hooks[key]
        try:
            found.append(token_log_probs(policy, ids, torch.ones_like(ids)))
        finally:
            for hooks, foreign in held:
                hooks.update(foreign)
    if not torch.equal(*found):
        what = "a hook of your own changes what the policy says, and only the adapter is saved"
        raise ModelError(what, "model", "remove it; a hook that only looks may stay")


def _of_module(module: nn.Module, adapter: str) -> dict[str, object]:
    facts: dict[str, object] = {}
    for name, value in vars(module).items():
        own = value[adapter] if isinstance(value, dict) and adapter in value else value
        if name not in _OF_A_TRAINING and isinstance(own, _PLAIN) and own is not False:  # which a class may say too
            facts[name] = copy.copy(own)
    put = [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), vars(module).get("forward")]
    return facts | {_CALLED: [function for function in put if function and is_foreign(function)]}
