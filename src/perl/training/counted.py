"""The sizes of decoders with other layers than Llama's: experts, states, windows; counted on the model without weights.

config of a model -> CountedDecoder

What a token is multiplied with, and what linear layers are given and make of it, is counted module by module. What it
keeps for the backward pass is taken from that, with kernels for scans as GPUs have them: an estimate, where that of
Llama's layers is exact.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from perl.policy.multimodal import auto_class, drop_towers
from perl.training.decoder import Decoder

# Makers of keys, in attention with heads and in latent attention.
_MAKE_KEYS = ("k_proj", "kv_a_proj_with_mqa", "qkv_proj")
_CONVOLUTIONS = ("conv1d", "conv")
# What a layer that carries a state keeps of each number that its projections make: convolution, activation, parts.
_KEPT_OF_STATES = 3


@dataclass(frozen=True)
class CountedDecoder(Decoder):
    """As counted on the model.

    Attributes:
        linear: Numbers in the matrices of linear layers, which quantising changes; bare parameters of experts stay.
        total: All numbers, a tied head once.
        active: Numbers that a token is multiplied with in the layers: of experts those that it is sent to.
        sums: Inputs and outputs of the linear layers together, so the numbers of a LoRA of rank 1.
        makes: Outputs of the linear layers.
        squares: Of each linear layer inputs x (inputs + outputs): the products of a DoRA of rank 1.
        attending: Layers with attention.
        states: Numbers of the states that a row carries in all layers.
        given: Numbers of a token that the linear layers keep as their inputs, one for those that share it.
        kept: Numbers of a token that stay besides: activations of the MLPs, parts of states.
    """

    linear: int
    total: int
    active: int
    sums: int
    makes: int
    squares: int
    attending: int
    states: int
    given: int
    kept: int

    linear_parameters = property(lambda self: self.linear)
    parameters = property(lambda self: self.total)
    outputs = property(lambda self: self.makes)
    active_parameters = property(lambda self: self.active)
    attention_layers = property(lambda self: self.attending)
    state_numbers = property(lambda self: self.states)

    def factor_products(self, rank: int) -> int:
        """As of :class:`perl.training.decoder.Decoder`."""
        return rank * self.squares

    def lora_parameters(self, rank: int) -> int:
        """As of :class:`perl.training.decoder.Decoder`."""
        return rank * self.sums


def counted_decoder(whole: Any) -> CountedDecoder | None:  # noqa: ANN401 (a config of transformers)
    """The sizes of a model of this config; None: it has no decoder layers that transformers knows as such."""
    config = whole.get_text_config()
    try:
        with torch.device("meta"):
            model = auto_class(whole).from_config(whole, trust_remote_code=False)
    except (ValueError, TypeError, AttributeError):  # of a kind that is no language model, or of sizes that do not fit
        return None
    drop_towers(model)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inner_ones = {id(one) for layer in layers for one in layer.modules() if one is not layer}
    layers = [layer for layer in layers if id(layer) not in inner_ones]
    heads = getattr(config, "num_attention_heads", None)
    if not layers or not heads:
        return None
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    counts = _counted(layers, config)
    total = sum(parameter.numel() for parameter in model.parameters())
    if not (counts["attending"] or counts["states"]) or not 0 < counts["linear"] <= total:
        return None  # its layers are written in another way
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head_size
    if latent := getattr(config, "kv_lora_rank", None):  # which is cached in the place of keys and values
        keys = (latent + config.qk_rope_head_dim) // 2
    inner: int = getattr(config, "intermediate_size", None) or getattr(config, "moe_intermediate_size", None) or 0
    return CountedDecoder(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        inner=inner,
        queries=heads * head_size,
        keys=keys,
        heads=heads,
        head_size=head_size,
        vocabulary=config.vocab_size,
        tied=bool(getattr(whole, "tie_word_embeddings", False)),
        normed_heads=any(hasattr(module, "q_norm") for module in model.modules()),
        biases=0,
        total=total,
        **counts,
    )


def _counted(layers: list[Any], config: Any) -> dict[str, int]:  # noqa: ANN401 (of transformers)
    """What the layers have together."""
    names = ("linear", "active", "sums", "makes", "squares", "attending", "states", "given", "kept")
    counts = dict.fromkeys(names, 0)
    for layer in layers:
        counts["attending"] += any(_attends(module) for module in layer.modules())
        for module in layer.modules():
            counts["states"] += _state_numbers(module)
            children = [child for child in module.children() if isinstance(child, nn.Linear)]
            counts["given"] += sum({child.in_features for child in children})
            makes = sum(child.out_features for child in children)
            if _carries(module):
                counts["kept"] += _KEPT_OF_STATES * makes
            elif not _attends(module):  # gate and up, its activation, their product
                wide = [child.out_features for child in children if child.out_features > child.in_features // 2]
                counts["kept"] += 2 * sum(size for size in wide if size != config.hidden_size)
            for child in children:
                inputs, outputs = child.in_features, child.out_features
                counts["linear"] += inputs * outputs
                counts["active"] += inputs * outputs
                counts["sums"] += inputs + outputs
                counts["makes"] += outputs
                counts["squares"] += inputs * (inputs + outputs)
            _count_experts(module, config, counts)
    return counts


def _count_experts(module: nn.Module, config: Any, counts: dict[str, int]) -> None:  # noqa: ANN401 (of transformers)
    """Experts are bare parameters of three dimensions; a token is sent to a few of them."""
    experts = [p for p in module.parameters(recurse=False) if p.dim() == 3 and p.size(0) > 1]
    if not experts or _carries(module) or isinstance(module, nn.Conv1d):
        return
    sent = int(getattr(config, "num_experts_per_tok", None) or 1)
    for parameter in experts:
        counts["active"] += sent * parameter.numel() // parameter.size(0)
    inner = max(size for parameter in experts for size in parameter.shape[1:]) // 2  # gate and up are one
    counts["given"] += sent * config.hidden_size
    counts["kept"] += sent * (4 * inner + 2 * config.hidden_size)


def _attends(module: nn.Module) -> bool:
    return any(hasattr(module, name) for name in _MAKE_KEYS) and not _carries(module)


def _carries(module: nn.Module) -> bool:
    return any(isinstance(getattr(module, name, None), nn.Conv1d) for name in _CONVOLUTIONS)


def _state_numbers(module: nn.Module) -> int:
    """Of the state that a layer carries: heads x keys x values, or heads x channels x states."""
    if not _carries(module):
        return 0
    heads = getattr(module, "num_v_heads", None) or getattr(module, "num_heads", None)
    if heads is None:  # a short convolution's last tokens
        return 0
    size = getattr(module, "head_k_dim", None) or getattr(module, "head_dim", 0)
    other = getattr(module, "head_v_dim", None) or getattr(module, "ssm_state_size", None) or size
    return int(heads * size * other)
