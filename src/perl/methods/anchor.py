"""A LoRA that starts away from zero without touching the base: W + s (B A - B0 A0).

LoRA layer, A0, B0 -> the same layer, whose policy at the start is exactly W's

PiSSA, MiLoRA and OLoRA begin with factors B0 A0 taken out of W. Their papers, and PEFT, write W - s B0 A0 into the
base; then switching the adapter off no longer gives the base, loading the adapter decomposes again, and a server that
adds B A to the published W serves another policy. Here W stays as it is and the factors of the start, the anchor, are
subtracted beside it. It is the same function of A and B, so the training is the same; the update is a plain LoRA of
twice the rank, [B, -B0] [A; A0].
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.lora.layer import Linear, LoraLayer, LoraVariant
from torch import nn
from torch.nn import functional

_A, _B = "anchor_A", "anchor_B"


def drop_anchor(layer: Linear, adapter: str, A: torch.Tensor, B: torch.Tensor) -> None:
    """Starts an adapter of a layer at these factors without changing the layer's function.

    Args:
        layer: PEFT's LoRA layer on an untouched base.
        adapter: Name of the adapter.
        A: (rank, in) float32, copied into the adapter and into the anchor.
        B: (out, rank) float32, likewise.
    """
    for name, start, trained in ((_A, A, layer.lora_A[adapter]), (_B, B, layer.lora_B[adapter])):
        with torch.no_grad():
            trained.weight.copy_(start)
        if not hasattr(layer, name):
            # Not persistent: what PEFT saves is the adapter, and ours are saved by name (adapter.py).
            setattr(layer, name, BufferDict(persistent=False))
        getattr(layer, name)[adapter] = trained.weight.detach().clone()
    layer.lora_variant[adapter] = AnchoredLora()


def anchor_of(layer: nn.Module, adapter: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(A0, B0) of a layer, or None if the adapter has no anchor there."""
    if not hasattr(layer, _A) or adapter not in getattr(layer, _A):
        return None
    return getattr(layer, _A)[adapter], getattr(layer, _B)[adapter]


def without_anchor(config: LoraConfig) -> LoraConfig:
    """The config of the trained half of a saved adapter that holds its anchor as the other half of its rank."""
    config = copy.deepcopy(config)
    config.r, config.lora_alpha = config.r // 2, config.lora_alpha / 2
    config.rank_pattern = {name: rank // 2 for name, rank in config.rank_pattern.items()}
    config.alpha_pattern = {name: alpha / 2 for name, alpha in config.alpha_pattern.items()}
    return config


def lift_anchor(policy: PeftModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Drops the anchors that a saved adapter holds as the second half of its rank: [B, -B0] [A; A0].

    Args:
        policy: With a fresh adapter of :func:`without_anchor`'s config.
        tensors: Of the file, by PEFT's names.

    Returns:
        The tensors of the trained half, for PEFT to load.
    """
    adapter, own = policy.active_adapter, dict(tensors)
    for name, layer in policy.named_modules():
        if isinstance(layer, Linear) and adapter in layer.lora_A:
            rank, A, B = layer.r[adapter], f"{name}.lora_A.weight", f"{name}.lora_B.weight"
            drop_anchor(layer, adapter, own[A][rank:], -own[B][:, rank:])
            own[A], own[B] = own[A][:rank], own[B][:, :rank]
    return own


def anchored_layers(policy: PeftModel) -> Iterator[tuple[str, Linear]]:
    """Layers with an anchor, under the names they have in the policy."""
    adapter = policy.active_adapter
    for name, layer in policy.named_modules():
        if isinstance(layer, LoraLayer) and anchor_of(layer, adapter) is not None:
            yield name, layer


class AnchoredLora(LoraVariant):
    """PEFT's way to give a LoRA layer another forward pass, used for the anchor."""

    @staticmethod
    def init(module: Linear, adapter_name: str, **_: Any) -> None:  # noqa: ANN401 (PEFT's signature)
        """Nothing to do: :func:`drop_anchor` has set the layer up."""

    @staticmethod
    def forward(module: Linear, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_: Any) -> torch.Tensor:  # noqa: ANN401
        """W x + s (B A x - B0 A0 x); at the start both products are the same numbers, and W x is left."""
        A0, B0 = getattr(module, _A)[active_adapter], getattr(module, _B)[active_adapter]
        x = module.lora_dropout[active_adapter](x)
        trained = module.lora_B[active_adapter](module.lora_A[active_adapter](x))
        anchor = functional.linear(functional.linear(x, A0), B0)
        return result + (trained - anchor) * module.scaling[active_adapter]

    @staticmethod
    def merge_safe(module: Linear, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        """The merged weight as a new tensor."""
        return orig_weight + _delta(module, active_adapter).to(orig_weight.dtype)

    @staticmethod
    def merge_unsafe(module: Linear, active_adapter: str, orig_weight: torch.Tensor) -> None:
        """Adds the update in place."""
        orig_weight.data += _delta(module, active_adapter).to(orig_weight.dtype)

    @staticmethod
    def unmerge(module: Linear, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        """The weight without the update, as a new tensor."""
        return orig_weight - _delta(module, active_adapter).to(orig_weight.dtype)


def _delta(module: Linear, adapter: str) -> torch.Tensor:
    A0, B0 = getattr(module, _A)[adapter], getattr(module, _B)[adapter]
    delta = module.lora_B[adapter].weight @ module.lora_A[adapter].weight - B0 @ A0
    return (delta.T if module.fan_in_fan_out else delta) * module.scaling[adapter]
