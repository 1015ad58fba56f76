"""Whether the base in memory is the one that is published under its name: what else it is would be lost with it.

model -> nothing, why nobody can know, or an error that names what a script has changed

An adapter is saved alone, and whoever loads it loads the published base. Tensors are compared with their files one
layer at a time, so that no second base is in memory.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils.integrations import get_bnb_param_type
from safetensors import safe_open
from torch import nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from perl.errors import ModelError
from perl.methods.base_parameters import base_weight, is_of_the_base, is_packed, name_in_base
from perl.policy.fingerprint import base_dtype
from perl.policy.model import base_of, base_parameters, clean_base, empty_of, evaluating, kind_of, public_identity
from perl.policy.name import NOT_OF_THE_MODEL
from perl.policy.quantised import checkpoint_files, was_quantised
from perl.policy.reference import base_only, random_tokens
from perl.policy.save_adapter import largest_difference, log_probs_in_float32
from perl.run.shards import is_sharded, whole

# Of a config: what changes only a training or the form of an answer, and no policy.
_NO_OTHER_POLICY = re.compile(
    r"_.*|.*(dropout|pdrop|_token_id|dtype)|output_.*|(router_aux_loss|initializer)\w*|architectures|id2label|label2id|"
    r"problem_type|quantization_config|gradient_checkpointing|max_position_embeddings|attn_implementation"
)
# Nats: the same numbers in float32, whose additions may have another order.
_TOLERANCE = 1e-4
# Share of codes that another device may have rounded otherwise; of its length, how far 8-bit weights are from theirs.
_OTHER_CODES, _EIGHT_BITS = 1e-3, 0.05
_SHOWN = 3
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "trl", "perl", "bitsandbytes", "torchao")
# By what a config calls them, where transformers looks for functions that anyone may register.
_FUNCTIONS = {"attn": (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS), "experts": (ALL_EXPERTS_FUNCTIONS,)}
_logger = logging.getLogger("perl")


def check_published(model: nn.Module, *, loaded_here: bool) -> str:
    """Refuses a base that is not as it is published.

    Args:
        model: The base, with or without an adapter.
        loaded_here: Whether no script had it: then its config and the shapes of its tensors are looked at, no numbers.

    Returns:
        Why there is nothing to compare it with; empty: it was compared.

    Raises:
        ModelError: Names what was changed.
    """
    base = base_of(model)
    name, revision = str(base.config.name_or_path), getattr(base.config, "_commit_hash", None)
    files, shown = checkpoint_files(name, revision) if name else {}, public_identity(model)[0]
    if not files:
        said = f"the weights of {shown} are in no safetensors here" if name else "it has no name"
        return f"nobody knows whether the base is a published one, {said}: only the adapter is saved"
    published = type(base.config).from_pretrained(name, revision=revision, local_files_only=True)
    there, here = _settings(published.to_dict()), _settings(base.config.to_dict())
    others = sorted(key for key in there | here if there.get(key) != here.get(key))
    changes = [f"{key} is {there.get(key)} there, {here.get(key)} here" for key in others]
    changes += _foreign_functions(base)
    changes += other_tensors(model, files, shapes_only=loaded_here)
    if not (changes or loaded_here):
        changes = [*(_of_codes(model, files) if was_quantised(base) else ()), *_of_passes(model)]
    if changes:
        more = f" (and {len(changes) - _SHOWN} more)" if len(changes) > _SHOWN else ""
        what = f"not {shown} as that is published, and only an adapter is saved: {'; '.join(changes[:_SHOWN])}{more}"
        hint = "leave it as from_pretrained(dtype=...) gives it; or save it with its tokenizer, and load that folder"
        raise ModelError(what, "model", hint)
    return ""


def is_foreign(function: Any) -> bool:  # noqa: ANN401 (whatever a script has put somewhere)
    """Whether it is no library's, so that whoever loads the base does not have it."""
    return str(getattr(getattr(function, "func", function), "__module__", "")).partition(".")[0] not in _LIBRARIES


def _foreign_functions(base: nn.Module) -> Iterator[str]:
    """Attention and experts that are computed by a function of a script's, which a clean base of this process has too.

    Kernels of the Hub have a slash in their names.
    """
    configs = [module.config for module in base.modules() if hasattr(module, "config")]
    for kind, tables in _FUNCTIONS.items():
        names = {str(getattr(config, f"_{kind}_implementation", None)) for config in configs}
        for name in sorted(name.removeprefix("perl_packed_") for name in names if "/" not in name):
            if any(is_foreign(table[name]) for table in tables if name in table):
                yield f"{kind}_implementation {name} is a function of your own, which is in no file"


def _settings(facts: Mapping[str, Any], prefix: str = "config") -> dict[str, Any]:
    """A config's settings that a policy depends on, by their paths."""
    found: dict[str, Any] = {}
    for key, value in facts.items():
        if key in NOT_OF_THE_MODEL or _NO_OTHER_POLICY.fullmatch(str(key)):
            continue
        if isinstance(value, dict):
            found |= _settings(value, f"{prefix}.{key}")
        else:
            found[f"{prefix}.{key}"] = value
    return found


def other_tensors(model: nn.Module, files: Mapping[str, Path], *, shapes_only: bool) -> Iterator[str]:
    """Tensors that are others than those in the files, or absent here or there.

    Args:
        model: As in :func:`check_published`; of layers that hold codes no tensor is compared.
        files: Where each tensor is.
        shapes_only: Numbers are not compared.
    """
    base: Any = base_of(model)
    held = {name_in_base(name): t for name, t in model.state_dict().items() if is_of_the_base(model, name)}
    tied, usual, own = base.all_tied_weights_keys, getattr(torch, base_dtype(base)), dict(base_parameters(model))
    yield from (f"{name} is absent" for name, _ in empty_of(base).named_parameters() if name not in held)
    for name, source in {} if is_sharded(base) else tied.items():
        if name not in files and held[name].data_ptr() != held[source].data_ptr():
            yield f"{name} is not tied to {source}"
    unsaved = {*tied, *(n for n in own if any(re.search(p, n) for p in base._keys_to_ignore_on_load_missing or ()))}
    for key, tensor in _as_in_files(base, held):
        if key not in files:
            if key in own.keys() - unsaved:
                yield f"{key} is in none of its files"
            continue
        with safe_open(files[key], framework="pt") as file:
            shape = list(file.get_slice(key).get_shape())
            if shape != list(tensor.shape):
                yield f"{key} is {shape} there, {list(tensor.shape)} here"
            elif not (shapes_only or hasattr(base, "hf_quantizer")) and tensor.element_size() < usual.itemsize:
                yield f"{key} is in {tensor.dtype}, most of the base in {usual}"
            elif not shapes_only and not _equal(file.get_tensor(key), tensor, usual):
                yield f"{key} has other numbers"


def _as_in_files(base: Any, held: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: ANN401
    """Tensors as transformers would save them, one layer after another; it joins some as it loads them."""
    # What a quantiser joins or splits as it loads is no part of the file: the architecture's own conversions are.
    written = empty_of(base) if getattr(base, "hf_quantizer", None) else base
    layers = defaultdict[str, dict[str, torch.Tensor]](dict)
    codes = tuple(name for name, p in held.items() if was_quantised(base) and is_packed(p))
    for name, tensor in held.items():
        if not name.startswith(codes):
            layers[re.sub(r"(\.\d+)\..*", r"\1", name)][name] = tensor
    for parts in layers.values():
        tensors = {name: whole(part) for name, part in parts.items()}
        yield from revert_weight_conversion(written, tensors).items()


def _equal(there: torch.Tensor, here: torch.Tensor, usual: torch.dtype) -> bool:
    """Whether numbers are those of a file, loaded in the type they have or, before that, in the usual one of others."""
    found = (there.to(here.device).to(dtype).to(here.dtype) for dtype in {here.dtype, usual})
    return any(torch.equal(_bits(numbers), _bits(here)) for numbers in found)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _of_codes(model: nn.Module, files: Mapping[str, Path]) -> Iterator[str]:
    """Layers that hold codes of other numbers than a file has; a base that was quantised as it was loaded."""
    for name, layer in model.named_modules():
        weight, key = layer._parameters.get("weight"), f"{name_in_base(name)}.weight"
        if weight is None or not is_packed(weight) or key not in files:
            continue
        with safe_open(files[key], framework="pt") as file:
            source = file.get_tensor(key).to(weight.device, getattr(torch, base_dtype(model)))
        if get_bnb_param_type(weight) == "4bit":
            how = {name: getattr(weight, name) for name in ("blocksize", "compress_statistics", "quant_type")}
            again = type(weight)(source, requires_grad=False, **how).to(weight.device)
            changed = (again.data.flatten() != weight.data.flatten()).float().mean() > _OTHER_CODES
        else:
            changed = (base_weight(layer).float() - source).norm() > _EIGHT_BITS * source.float().norm()
        if changed:
            yield f"{key} has other numbers"


def _of_passes(model: nn.Module) -> Iterator[str]:
    """Buffers that no file has, and layers, that compute otherwise than the architecture's own."""
    base = base_of(model)
    in_files, held = base.state_dict(), {name_in_base(name): buffer for name, buffer in base.named_buffers()}
    for name, own in empty_of(base).named_buffers():
        here = None if name in in_files else held.get(name)
        if here is None or torch.equal(own.to(here.device), here.to(own.dtype)):
            continue
        if not torch.equal(own.to(here), here):
            yield f"{name} has other numbers"
            continue
        # model.to(dtype) rounds them, and whoever loads the base has them exact.
        module, _, last = name.rpartition(".")
        base.get_submodule(module)._buffers[last] = own.to(here.device)
        _logger.info("%s is exact again, as whoever loads the base has it: the model was moved to %s", name, here.dtype)
    if is_sharded(base) or len({str(place) for place in getattr(base, "hf_device_map", {}).values()}) > 1:
        return  # whose passes need the hooks that they have
    ids = random_tokens(model)
    with evaluating(model), base_only(model) if isinstance(model, PeftModel) else nullcontext():
        clean = clean_base(model, own_layers=False)
        differs = largest_difference(*(log_probs_in_float32(one, ids) for one in (model, clean))) > _TOLERANCE
    layers, fresh = ({name_in_base(name): module for name, module in one.named_modules()} for one in (base, clean))
    for name, layer in fresh.items():
        for key, rate in vars(layer).items():
            drops = isinstance(rate, float) and (key == "p" or "dropout" in key)  # which no pass of these shows
            if drops and getattr(layers.get(name), key, rate) > rate:
                yield f"{name}.{key} is {rate} in the config, {getattr(layers[name], key)} here"
    if differs:
        own = [name for name, layer in layers.items() if kind_of(layer) is not kind_of(fresh.get(name, layer))]
        yield f"its passes give other log-probabilities{f' ({own[0]} is replaced)' if own else ''}"
