"""A base whose layers were quantised as it was loaded: the weights it was made from, and layers that train.

base -> its quantised layers, the tensors of its checkpoint, layers that are never repacked, layers that keep codes only
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, cast

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import get_bnb_param_type
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import BitsAndBytesConfig, TorchAoConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.quantization_config import QuantizationConfigMixin, QuantizationMethod

from perl.errors import ModelError
from perl.methods.base_parameters import is_packed, numbers_of
from perl.methods.settings import method_of
from perl.recipe.quantisations import QUANTISATIONS, Quantization

_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
# Of how a base was quantised: in what it computes, where it lies and what it is called; the numbers are the same.
_NOT_OF_THE_NUMBERS = ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "llm_int8_enable_fp32_cpu_offload")
# What makes the numbers of bitsandbytes' layers, by the bits that they are loaded in.
_OF_BITS = {
    "load_in_4bit": ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
    "load_in_8bit": ("llm_int8_threshold", "llm_int8_has_fp16_weight"),
}
_SKIPPED = "llm_int8_skip_modules"
MARKS = ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized", "quantization_method", "hf_quantizer")
"""What transformers and PEFT ask a model for to know that it is quantised."""


def quantisation_config(name: Quantization, dtype: torch.dtype) -> QuantizationConfigMixin:
    """How transformers loads a base that is quantised.

    Embeddings, norms and the head stay as they are; what is quantised is computed in the type of all else.

    Args:
        name: As in ``model.quantization``.
        dtype: Of the model.
    """
    kind = QUANTISATIONS[name].weight_only
    if not kind:  # as QLoRA has it, with the scales quantised too: 0.13 instead of 0.5 bits a number
        return BitsAndBytesConfig(**_NF4, bnb_4bit_compute_dtype=dtype)
    configs: Any = importlib.import_module("torchao.quantization")
    # Torchao would set up the compiler, and with it how exact float32 is, for the whole process.
    return TorchAoConfig(getattr(configs, kind)(set_inductor_config=False))


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16; GPUs before NVIDIA's Ampere (T4, V100) only emulate it."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def half_precision(published: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The type of all that is not quantised on an accelerator: bfloat16, or float16 where that is all there is.

    Args:
        published: The checkpoint's, kept if it is float16; None: it does not say.
        device: The accelerator.
    """
    return torch.float16 if published == torch.float16 or not has_bfloat16(device) else torch.bfloat16


def quantisation_of(base: nn.Module) -> str | None:
    """What a model was quantised to as it was loaded.

    Returns:
        A name of ``model.quantization`` if it is as :func:`quantisation_config` has it, else a word of its own; None:
        it was not quantised.
    """
    if not was_quantised(base):
        return None
    facts = _facts(base)
    if facts.get("quant_method") == QuantizationMethod.TORCHAO:
        return _of_torchao(facts)
    if facts.items() >= _NF4.items() and not facts[_SKIPPED]:
        return "nf4"
    if facts.get("load_in_8bit"):
        return "llm-int8"  # whose activations are rounded too
    if facts.get("load_in_4bit"):
        return f"{facts['bnb_4bit_quant_type']}-{'double' if facts['bnb_4bit_use_double_quant'] else 'single'}"
    return str(facts.get("quant_method", "quantised"))


def _of_torchao(facts: Mapping[str, Any]) -> str:
    """The name of a way of torchao's, or its config's own with all that is set of it."""
    kind, settings = facts["quant_type"]["default"]["_type"], _settings_of_torchao(facts)
    for row in (row for row in QUANTISATIONS.values() if row.weight_only == kind):
        own = quantisation_config(row.name, torch.float32)  # which names no type
        if settings == _settings_of_torchao(_named(own)):
            return row.name
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
    return f"{kind.removesuffix('Config')[:24]}-{digest[:8]}"


def _settings_of_torchao(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What makes the numbers: all but how they are compiled."""
    settings = {name: value for name, value in facts.items() if name != "quant_type"}
    inside = facts["quant_type"]["default"]["_data"]
    return settings | {"of torchao": {name: value for name, value in inside.items() if name != "set_inductor_config"}}


def quantised_fingerprint(base: nn.Module, source: str) -> str:
    """SHA-256 of a quantised base as it answers: of what it was made from, and of how.

    The codes themselves do not count: two devices may round a few of them otherwise.

    Args:
        base: The base.
        source: Fingerprint of what it was made from.
    """
    facts = {"source": source, "quantisation": _how(_facts(base))}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _how(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What makes the numbers of a quantised base.

    Of bitsandbytes a fixed list, so that a setting that another version of transformers adds gives no base another name
    unless someone sets it.
    """
    if facts.get("quant_method") == QuantizationMethod.TORCHAO:
        name = _of_torchao(facts)  # not torchao's settings, to which another version may add some
        return {"weights": name} if name in QUANTISATIONS else _settings_of_torchao(facts)
    if facts.get("quant_method") != QuantizationMethod.BITS_AND_BYTES:
        return {name: value for name, value in facts.items() if name not in _NOT_OF_THE_NUMBERS}
    bits = "load_in_4bit" if facts["load_in_4bit"] else "load_in_8bit"
    how = {bits: True} | {name: facts[name] for name in _OF_BITS[bits]} | {_SKIPPED: sorted(facts[_SKIPPED] or ())}
    usual, listed = _named(BitsAndBytesConfig()), {*_OF_BITS, *sum(_OF_BITS.values(), ()), _SKIPPED, "quant_method"}
    further = facts.keys() - listed - {*_NOT_OF_THE_NUMBERS}
    return how | {name: facts[name] for name in further if facts[name] != usual.get(name)}


def _facts(base: nn.Module) -> dict[str, Any]:
    """How a base was quantised, by the names of transformers' config."""
    return _named(base.hf_quantizer.quantization_config)  # type: ignore[union-attr]


def _named(config: QuantizationConfigMixin) -> dict[str, Any]:
    return {name.removeprefix("_"): value for name, value in config.to_dict().items()}


def was_quantised(base: nn.Module) -> bool:
    """Whether a model was quantised while it was loaded, so that its checkpoint holds other numbers than it."""
    quantiser = getattr(base, "hf_quantizer", None)
    return quantiser is not None and not quantiser.pre_quantized


def prepare_layers(model: nn.Module) -> None:
    """Makes a quantised base's layers such as can be trained through, and hold no more than their codes.

    Raises:
        ModelError: bitsandbytes has repacked one for inference.
    """
    keep_codes_only(model)
    for name, layer in model.named_modules():
        state = getattr(getattr(layer, "weight", None), "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            what = f"bitsandbytes has repacked {name} for inference in an earlier pass in evaluation mode"
            hint = "load the base again and make no pass with it before the trainer has it"
            raise ModelError(f"{what}: no gradient would flow through it", "model", hint)
        if getattr(layer, "support_avx512bf16_for_cpu", False):
            layer.support_avx512bf16_for_cpu = False
    keep_type(model)


def keep_type(policy: nn.Module) -> None:
    """Has adapters that answer in float32 on bitsandbytes' layers answer in the type that they are given.

    What they answer (``Method.widens_nf4``), the next layer of a half-precision base would refuse.

    Args:
        policy: With its adapter; another one, or one that does so already, stays as it is.
    """
    if not isinstance(policy, PeftModel) or not method_of(policy.active_peft_config).widens_nf4:
        return
    for layer in policy.modules():
        if not isinstance(layer, BaseTunerLayer) or _in_type_of_input in layer._forward_hooks.values():
            continue
        if get_bnb_param_type(getattr(layer.get_base_layer(), "weight", None)):
            layer.register_forward_hook(_in_type_of_input)


def _in_type_of_input(_: nn.Module, inputs: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor:
    """Under autocast the next layer casts by itself."""
    if not inputs:  # named, as no model of transformers does
        return result
    given = inputs[0]
    return result if torch.is_autocast_enabled(given.device.type) else result.to(given.dtype)


def source_tensors(
    name: str, revision: str | None, shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]] | None:
    """Tensors of a checkpoint on this machine, read one after the other in the order of their names.

    Args:
        name: Folder, or the Hub id of a model in the cache.
        revision: Its commit.
        shapes: Name of each tensor that is wanted -> its shape.

    Returns:
        Names and tensors; None where there are no safetensors that hold all of them in these shapes, as where
        transformers names or joins them differently when it loads.
    """
    try:
        files = checkpoint_files(name, revision)
        for key, shape in shapes.items():
            with safe_open(files[key], framework="pt") as file:
                if tuple(file.get_slice(key).get_shape()) != shape:
                    return None
    except (OSError, ValueError, KeyError, SafetensorError, HFValidationError):
        return None
    return _tensors(files, sorted(shapes))


def _tensors(files: dict[str, Path], names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        with safe_open(files[name], framework="pt") as file:
            yield name, file.get_tensor(name)


def checkpoint_files(name: str, revision: str | None) -> dict[str, Path]:
    """The file of each tensor of a checkpoint on this machine; empty where it has no safetensors, or not all of them.

    Args:
        name: As in :func:`source_tensors`.
        revision: Likewise.
    """
    if whole := _file(name, revision, SAFE_WEIGHTS_NAME):
        with safe_open(whole, framework="pt") as file:
            return dict.fromkeys(file.keys(), whole)
    index = _file(name, revision, SAFE_WEIGHTS_INDEX_NAME)
    places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index else {}
    files = {place: _file(name, revision, place) for place in set(places.values())}
    return {key: file for key, place in places.items() if (file := files[place])} if all(files.values()) else {}


def _file(name: str, revision: str | None, file: str) -> Path | None:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    cached = try_to_load_from_cache(name, file, revision=revision)
    return Path(cached) if isinstance(cached, str) else None


class WeightOnlyLinear(nn.Linear):
    """``nn.Linear`` over codes: the same numbers as torchao's own, without a copy of the weight for the gradient.

    torchao multiplies with the weight as numbers, and autograd keeps these for the gradient of the input: after a
    forward pass every layer's weight would be there in full, and quantising it would have saved nothing.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As ``nn.Linear``: under autocast input, bias and result have its type, whatever the base was loaded in."""
        device, bias = input.device.type, cast("torch.Tensor | None", self.bias)
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            # torchao adds a bias to fp8's product itself, and the wider of the two types would be the result's.
            input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
        if is_packed(self.weight) and torch.is_grad_enabled():
            return _Product.apply(input, self.weight, bias)  # type: ignore[no-untyped-call]
        return functional.linear(input, self.weight, bias)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """As ``nn.Module``, which cannot exchange a parameter of torchao's; codes move, and have no other type."""
        weight = self._parameters["weight"]
        if weight is None or not is_packed(weight):
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = fn(weight.detach())
        kept = weight if moved.device == weight.device else nn.Parameter(moved, requires_grad=False)
        self._parameters["weight"] = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._parameters["weight"] = kept
        return self


class _Product(torch.autograd.Function):
    """x W^T + b, W frozen and in codes."""

    @staticmethod
    def forward(ctx: Any, input_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:  # noqa: ANN401
        ctx.weight_OI = weight_OI  # it belongs to the base, and is never written
        result_NO = functional.linear(input_NI, weight_OI, bias_O)
        # A view, which torchao's int8 gives, could not be added to in place, as some adapters do.
        return result_NO.clone() if result_NO._is_view() else result_NO

    @staticmethod
    def backward(ctx: Any, slope_NO: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:  # noqa: ANN401
        of_input = slope_NO @ numbers_of(ctx.weight_OI, slope_NO.dtype) if ctx.needs_input_grad[0] else None
        of_bias = slope_NO.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return of_input, None, of_bias


def leave_in_processes(model: nn.Module) -> None:
    """Keeps DDP, where TRL's own step needs it, from sending a base's codes to processes that have loaded the same.

    It sends every parameter when it begins, trained or not, by operations that torchao's tensors do not have.

    Args:
        model: As it will be wrapped.
    """
    packed = {name: p for name, p in model.named_parameters() if p.is_floating_point() and is_packed(p)}
    if packed:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(packed))


def keep_codes_only(model: nn.Module) -> None:
    """Makes a base's layers over weights of torchao's :class:`WeightOnlyLinear`; others stay as they are."""
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.weight.is_floating_point() and is_packed(layer.weight):
            layer.__class__ = WeightOnlyLinear
