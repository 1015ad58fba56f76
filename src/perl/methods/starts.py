"""How adapters begin: on parts of the base's weights.

policy with a fresh LoRA -> the same policy, its factors set; the base and its function are untouched

Each function is named in a row of ``methods/registry.py``.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear

from perl.errors import ModelError
from perl.methods.anchor import drop_anchor
from perl.methods.base_parameters import base_weight, is_packed, name_in_base
from perl.methods.decompositions import Decomposition, Factors, decompose, first_columns, first_triples, last_triples
from perl.run.shards import is_sharded

_Options = Mapping[str, Any]


def pissa(policy: PeftModel, _: _Options) -> None:
    """B0 = U sqrt(S/s), A0 = sqrt(S/s) V from the first singular triples (Meng et al. 2024, eq. 2 and 3)."""
    _anchor_all(policy, first_triples, _split_evenly)


def milora(policy: PeftModel, _: _Options) -> None:
    """As :func:`pissa`, from the last singular triples (Wang et al. 2024, section 3.1)."""
    _anchor_all(policy, last_triples, _split_evenly)


def olora(policy: PeftModel, _: _Options) -> None:
    """B0 = Q, A0 = R from the QR decomposition, the scale s outside, as PEFT has it (Buyukakyuz 2024)."""
    _anchor_all(policy, first_columns, lambda factors, _: (factors["R"], factors["Q"]))


def rlpo(policy: PeftModel, _: _Options) -> None:
    """A0 = first right singular vectors, B0 = 0."""
    _set_A(policy, first_triples)


def milora_plus(policy: PeftModel, _: _Options) -> None:
    """A0 = last right singular vectors, B0 = 0."""
    _set_A(policy, last_triples)


def slicefine(policy: PeftModel, options: _Options) -> None:
    """A picks neighbouring inputs and stays, so that B is added to those columns of W (Kowsher et al. 2025)."""
    position = options["slice_position"]
    for name, layer in _layers(policy).items():
        A = layer.lora_A[policy.active_adapter]
        rank, inputs = A.weight.shape
        if not (isinstance(position, int) and 0 <= position <= inputs - rank):
            raise ModelError(
                f"{name} has {inputs} inputs, so a slice of {rank} cannot start at {position}",
                "peft.kwargs.slice_position",
                f"between 0 and {inputs - rank}",
            )
        with torch.no_grad():
            A.weight.copy_(torch.eye(inputs, dtype=A.weight.dtype)[position : position + rank])


def _split_evenly(factors: Factors, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(A0, B0) with s B0 A0 = U S V."""
    root = (factors["S"] / scale).sqrt()
    return root[:, None] * factors["V"], factors["U"] * root


def _anchor_all(
    policy: PeftModel,
    decomposition: Decomposition,
    factors_to_AB: Callable[[Factors, float], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    adapter, layers = policy.active_adapter, _layers(policy)
    for name, factors in _decomposed(layers, adapter, decomposition).items():
        drop_anchor(layers[name], adapter, *factors_to_AB(factors, layers[name].scaling[adapter]))


def _set_A(policy: PeftModel, decomposition: Decomposition) -> None:
    adapter, layers = policy.active_adapter, _layers(policy)
    for name, factors in _decomposed(layers, adapter, decomposition).items():
        with torch.no_grad():
            layers[name].lora_A[adapter].weight.copy_(factors["V"])


def _decomposed(layers: Mapping[str, Linear], adapter: str, decomposition: Decomposition) -> dict[str, Factors]:
    """The factors of every layer's weight; where the base is in shards one layer at a time is whole."""
    weights, found = {}, dict[str, Factors]()
    for name, layer in layers.items():
        weight_OI, rank = base_weight(layer.get_base_layer()), layer.r[adapter]
        weight_OI = weight_OI.T if layer.fan_in_fan_out else weight_OI
        if rank > min(weight_OI.shape):
            shape = " x ".join(str(size) for size in weight_OI.shape)
            raise ModelError(f"{name} is {shape} and has no {rank} singular triples", "peft.rank", "take a lower rank")
        weights[name] = (weight_OI, rank)
        if is_sharded(layer):
            found |= decompose(weights, decomposition)
            weights.clear()
    return found | decompose(weights, decomposition)


def _layers(policy: PeftModel) -> dict[str, Linear]:
    """The linear layers with the active adapter, under the base's names.

    Raises:
        ModelError: The adapter touches a layer that is not linear; such a start is not defined there.
    """
    layers = {}
    for name, module in policy.named_modules():
        parts = (getattr(module, part, {}) for part in ("lora_A", "lora_embedding_A"))
        if any(policy.active_adapter in part for part in parts):
            here = name_in_base(name)
            if not isinstance(module, Linear):
                raise ModelError(f"{here} is no linear layer", "peft.target_modules", "leave it out")
            layers[here] = module
    return layers


@torch.no_grad()
def unrounded_magnitudes(policy: PeftModel) -> None:
    """Gives DoRA the lengths of W's rows in float32, in which its passes divide by them.

    PEFT rounds them to the type of W, or of the numbers that its codes stand for, so that on a half-precision base the
    policy would start up to 1/256 of every output away from it.

    Args:
        policy: With a new adapter; one that does not start at the base is left as it is.
    """
    adapter = policy.active_adapter
    for layer in policy.modules():
        magnitude = getattr(layer, "lora_magnitude_vector", {})
        if adapter not in magnitude:
            continue
        base = layer.get_base_layer()
        rounds = base.weight.dtype in (torch.bfloat16, torch.float16) or is_packed(base.weight)
        if not rounds or layer.get_delta_weight(adapter).any():
            continue
        weight = base_weight(base, torch.float32)
        dora, nothing = magnitude[adapter], torch.zeros((), device=weight.device)
        lengths = dora.get_weight_norm(weight.float(), nothing, layer.scaling[adapter])
        dora.weight.data = lengths.to(dora.weight.dtype)
