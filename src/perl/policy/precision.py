"""In which type a policy computes, how far two right computations may then differ, and how to compare without rounding.

model -> its compute type -> tolerance in nats; model -> the model in float32, for a while

A policy computes in autocast's type where there is autocast, else in that of its weights. An engine computes in the
same type with other kernels, so the two differ by rounding, which grows with the type's spacing and the number of
layers. What this process computes twice need not be rounded at all: :func:`in_float32`.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.state import AcceleratorState
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationMethod

from perl.methods.base_parameters import base_weight, is_packed
from perl.policy.fingerprint import base_dtype
from perl.policy.model import HALF, base_of
from perl.policy.quantised import quantisation_of, was_quantised
from perl.recipe.quantisations import QUANTISATIONS

# Mean difference of a token's log-probability between two right computations, in spacings of the type (its ``eps``) and
# square roots of the number of layers, whose roundings add up like a random walk. Measured: `benchmarks/tolerances.py`.
_STEPS = 2.5
# Engines in float32 differ by 1e-7 to 1e-5, by kernels and not by layers.
_SMALLEST = 1e-4
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The type in which a pass of this model multiplies: autocast's, else its weights'.

    Args:
        model: Without the wrappers of distributed training; accelerate may have put autocast into its forward.
    """
    device = next(model.parameters()).device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    if "_original_forward" in vars(model):
        found = _AUTOCAST.get(AcceleratorState().mixed_precision)
        if found is not None:
            return found
    weights: torch.dtype = getattr(torch, base_dtype(model))
    return weights


def tolerance_of(dtype: torch.dtype, layers: int) -> float:
    """Largest mean difference of a token's log-probability that rounding explains, in nats.

    Args:
        dtype: In which both sides compute.
        layers: Of the model.
    """
    return max(_SMALLEST, _STEPS * torch.finfo(dtype).eps * math.sqrt(layers))


def layers_of(model: nn.Module) -> int:
    """Number of layers that follow one another."""
    config: Any = base_of(model).config.get_text_config()
    return int(getattr(config, "num_hidden_layers", 1))


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """The model computes in float32, whatever its weights are and autocast says; without gradient.

    Half-precision weights are the same numbers in float32. Each layer's are converted as it begins and given back as it
    ends, so this costs one layer's memory. Two policies over one base, or a policy and what was saved of it, then agree
    to about 1e-6 nats if they are the same, where in bfloat16 they would differ by as much as some wrong ones do.
    Numbers of a quantised base stay what they are, and are unpacked for as long; where its layers compute in a type of
    their own, so does all else.

    Args:
        model: Without the wrappers of distributed training.
    """
    matmul = torch.get_float32_matmul_precision()
    base = base_of(model)
    # Other layers than bitsandbytes' and those of model.quantization compute in half precision whatever they are given.
    any_type = getattr(base, "quantization_method", None) == QuantizationMethod.BITS_AND_BYTES
    if was_quantised(base) and not any_type and quantisation_of(base) not in QUANTISATIONS:
        with torch.no_grad():
            yield
        return
    units = [unit for unit in (_Unit(module, inside) for module, inside in _units(model)) if unit.is_half]
    try:
        torch.set_float32_matmul_precision("highest")
        attention = base.config._attn_implementation
        if attention is not None and "flash" in attention:  # whose kernels take no float32
            attention = "sdpa"
        with torch.no_grad(), without_autocast(model), with_attention(base, attention):
            for unit in units:
                unit.attach()
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        for unit in units:
            unit.detach()


def _units(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Modules that are converted one at a time; whether with all that is inside.

    Layers of a list, and layers of an adapter, which read the weights of what they wrap.
    """
    for child in model.children():
        if isinstance(child, BaseTunerLayer | AuxiliaryTrainingWrapper):
            yield child, True
        elif isinstance(child, nn.ModuleList):
            yield from ((layer, True) for layer in child)
        else:
            yield child, False
            yield from _units(child)


class _Unit:
    """A module whose half-precision numbers are float32 while it computes.

    It gives back what it took and nothing else: in between, others may put other tensors into the same parameters.
    """

    def __init__(self, module: nn.Module, inside: bool) -> None:
        self._module, self._inside = module, inside
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._packed: list[tuple[nn.Module, nn.Parameter]] = []
        self._hooks: list[Any] = []

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self._module.parameters(self._inside)
        yield from self._module.buffers(self._inside)

    @property
    def is_half(self) -> bool:
        return any(tensor.dtype in HALF for tensor in self._tensors())

    def attach(self) -> None:
        self._hooks = [
            self._module.register_forward_pre_hook(self._before),
            self._module.register_forward_hook(self._after, always_call=True),
        ]

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._after()

    def _before(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        for layer in self._module.modules() if self._inside else [self._module]:
            weight = layer._parameters.get("weight")
            if weight is not None and weight.dtype in HALF and is_packed(weight):
                self._packed.append((layer, weight))
                layer._parameters["weight"] = nn.Parameter(base_weight(layer, torch.float32), requires_grad=False)
        for tensor in self._tensors():
            if tensor.dtype in HALF:
                self._taken.append((tensor, tensor.data))
                tensor.data = tensor.data.float()
        # Mamba rounds to the type that it finds its head in.
        return tuple(x.float() if isinstance(x, torch.Tensor) and x.dtype in HALF else x for x in inputs)

    def _after(self, *_: object) -> None:
        for tensor, data in self._taken:
            tensor.data = data
        self._taken.clear()
        for layer, weight in self._packed:
            layer._parameters["weight"] = weight
        self._packed.clear()


@contextlib.contextmanager
def without_autocast(model: nn.Module) -> Iterator[None]:
    """The model computes in the type of its weights, without what accelerate has put around its forward.

    Args:
        model: Without the wrappers of distributed training.
    """
    own = vars(model)
    put = {name: own[name] for name in ("forward", "_original_forward") if "_original_forward" in own}
    try:
        if put:
            own["forward"] = own.pop("_original_forward")
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            yield
    finally:
        own.update(put)


@contextlib.contextmanager
def with_attention(model: PreTrainedModel, name: str | None) -> Iterator[None]:
    """The model with an attention of this name, for a while."""
    own = model.config._attn_implementation
    if name is None or name == own:
        yield
        return
    set_attention(model, name)
    try:
        yield
    finally:
        set_attention(model, own)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Gives a model an attention; of a multimodal one its language model, and its towers keep theirs."""
    config, text = model.config, model.config.get_text_config()
    parts = {key: name for key in config.sub_configs if getattr(config, key, None) is text}
    model.set_attn_implementation({"": name, **parts})
