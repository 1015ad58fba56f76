"""Loads the base once, says what it is, counts what trains.

ModelSection -> tokenizer, base

The base's weights are never written after this.
"""

import contextlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from huggingface_hub import constants
from peft import PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from perl.errors import MissingExtraError, Mistake, ModelError, PerlError, first_line, missing_extra
from perl.methods.base_parameters import is_of_the_base, is_packed, name_in_base
from perl.policy.bases import BASES
from perl.policy.hub_files import look_up
from perl.policy.multimodal import auto_class, drop_towers, dropped_towers
from perl.policy.quantised import (
    MARKS,
    half_precision,
    prepare_layers,
    quantisation_config,
)
from perl.policy.sharding import loaded_in_shards, settle, shard_like
from perl.recipe.quantisations import EXTRA, QUANTISATIONS
from perl.recipe.sections import ModelSection
from perl.run.shards import is_sharded
from perl.sandbox import BASE_NAME, is_sandbox, model_folder, model_name, smollm2

_META = torch.device("meta")
DeviceMap = Literal["auto", "balanced", "balanced_low_0", "sequential"]
"""How accelerate spreads a model's layers over the GPUs of a machine."""
HALF = (torch.bfloat16, torch.float16)


def resolve_model(name: str) -> str:
    """What transformers should load for a model's name: a folder for the sandbox's, else the name itself.

    Raises:
        ModelError: The sandbox has no such model.
    """
    if is_sandbox(name):
        return str(model_folder(name))
    folder = Path(name).expanduser()
    return str(folder) if folder.is_dir() else name


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """The base's tokenizer, padding on the left as generation needs it.

    Raises:
        ModelError: There is no such model, or the Hub cannot be reached.
    """
    with _explained(section):
        tokenizer = AutoTokenizer.from_pretrained(
            resolve_model(section.name), revision=section.revision, padding_side="left", trust_remote_code=False
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_base(
    section: ModelSection,
    device: torch.device,
    strategy: str = "ddp",
    shards: str | int = "node",
    spread: DeviceMap | None = None,
    *,
    with_towers: bool = False,
) -> PreTrainedModel:
    """The base on its device, in evaluation mode.

    Args:
        section: Which model.
        device: Where to.
        strategy: Of the run. With ``fsdp2`` every process must call this at once, and holds its part of the base.
        shards: ``engine.shards``: which processes share a copy.
        spread: How its layers are spread over the GPUs of this machine; None: all lie on the device.
        with_towers: Whether a base that also sees or hears is to be held whole, to be written again.

    Raises:
        ModelError: There is no such model, the Hub cannot be reached, or it does not fit on the GPUs.
        MissingExtraError: It is to be quantised, and the package that does it is not installed.
    """
    check_quantisation(section, device)
    dtype = "auto" if device.type != "cpu" else torch.float32
    if section.dtype != "auto":
        dtype = getattr(torch, section.dtype)
    with _explained(section):
        model: PreTrainedModel = auto_class(_config(section)).from_pretrained(
            resolve_model(section.name),
            revision=section.revision,
            attn_implementation=section.attn_implementation,
            use_safetensors=True,
            trust_remote_code=False,
            **{"dtype": dtype, **quantising(section, device, section.dtype)},
            **loaded_in_shards(strategy, shards),
            **({} if spread is None else {"device_map": spread}),
        )
    if not with_towers:
        drop_towers(model)
    prepare_layers(model)
    settle(model)
    if spread is not None:
        _check_spread(model)
        return model.eval()
    return (model if section.quantization or is_sharded(model) else model.to(device)).eval()


def _check_spread(model: PreTrainedModel) -> None:
    """Refuses a base some of whose layers have no place on a GPU: there they would be loaded anew for every token."""
    placed = dict(getattr(model, "hf_device_map", {}))
    elsewhere = [name for name, place in placed.items() if str(place) in ("cpu", "disk")]
    if elsewhere and (torch.cuda.is_available() or "disk" in placed.values()):
        what = f"{len(elsewhere)} of {len(placed)} parts of the base do not fit on the GPUs"
        raise ModelError(
            f"{what}, the first is {elsewhere[0]}", "--device-map", "more or larger GPUs, or --quantization nf4"
        )


def load_empty_base(section: ModelSection, device: torch.device = _META) -> PreTrainedModel:
    """The base's architecture without its weights: enough to count and to name modules.

    Args:
        section: Which model.
        device: The meta device holds no weights at all; any other holds random ones.

    Raises:
        ModelError: There is no such model, the Hub cannot be reached, or an attention package is missing.
    """
    if not is_sandbox(section.name) and not Path(section.name).expanduser().is_dir():
        if section.name.startswith((".", "/", "~")):
            raise ModelError(f"{section.name}: no such folder", "model.name", _offline(section.name))
        answer = look_up("model", section.name, section.revision)
        if isinstance(answer, Mistake):
            hints = [answer.hint, _offline(section.name)]
            raise ModelError(answer.message, "model.name", "; ".join(filter(None, hints)))
    if "flash_attention" in (section.attn_implementation or "") and not importlib.util.find_spec("flash_attn"):
        problem = missing_extra("flash-attn", "flash", f"attn_implementation {section.attn_implementation}")
        raise ModelError(problem.message, "model.attn_implementation", problem.hint)
    check_quantisation(section)
    config = _config(section)
    with _explained(section), device:
        model: PreTrainedModel = auto_class(config).from_config(config, trust_remote_code=False)
    drop_towers(model)
    return model


def trainable_parameters(model: nn.Module) -> int:
    """Number of parameters that require a gradient."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def total_parameters(model: nn.Module) -> int:
    """Number of parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def layer_of(name: str) -> str:
    """The module that a parameter is in."""
    return name.rpartition(".")[0]


def eos_token_ids(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's and those the model declares (end of turn)."""
    return end_tokens(tokenizer, {"eos_token_id": model.generation_config.eos_token_id})


def end_tokens(tokenizer: PreTrainedTokenizerBase, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's, and those the base's generation settings declare."""
    declared = generation.get("eos_token_id")
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tuple(dict.fromkeys([*own, *declared]))


def base_of(model: nn.Module) -> PreTrainedModel:
    """The model inside a PeftModel, its layers as the adapter has them; a model without an adapter is its own."""
    base: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model
    return base


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, for a while; afterwards every module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes.items():
            module.training = was_training


def base_identity(model: nn.Module) -> tuple[str, str | None]:
    """The base's public name (Hub id, sandbox name, or the path the user gave) and the commit that was loaded."""
    base: Any = base_of(model)
    commit = getattr(base.config, "_commit_hash", None)
    return model_name(str(base.config.name_or_path)), commit


def public_name(name: str, revision: str | None) -> tuple[str, str | None]:
    """A base's name and commit without anything of this machine: of a folder its last part, or what it is a copy of.

    Args:
        name: As :func:`base_identity` gives it.
        revision: The commit, if it is known.
    """
    path = Path(name).expanduser()
    if is_sandbox(name) or not path.is_dir():
        return name, revision
    path = path.resolve()
    cached = next((part for part in path.parts if part.startswith("models--")), None)
    if cached is not None and path.parent.name == "snapshots":  # the Hub's cache
        return cached.removeprefix("models--").replace("--", "/"), path.name
    return path.name, revision


def public_identity(model: nn.Module) -> tuple[str, str | None]:
    """The base's name and commit as :func:`public_name` gives them."""
    return public_name(*base_identity(model))


def clean_base(model: PreTrainedModel | PeftModel, *, own_layers: bool = True) -> PreTrainedModel:
    """Another model over the base's own weights, without the adapter: what others load, for no further memory.

    Layers that are quantised, or whose forward pass was replaced or hooked (an output head in float32), are the base's
    own modules; of the others it has the weights. Nothing may write to its parameters.

    Args:
        model: The base, with or without an adapter.
        own_layers: Whether layers that compute otherwise than the architecture's are the base's own, or only quantised
            ones.
    """
    base = base_of(model)
    clean = empty_of(base)
    shard_like(clean, base)
    # a wrapper comes before what it wraps
    held = {name_in_base(name): module for name, module in model.named_modules()}
    pairs = [(name, held[name], fresh) for name, fresh in clean.named_modules() if name in held]
    shared = {name: own for name, own, fresh in pairs if _differs(own, fresh, only_codes=not own_layers)}
    fresh = dict(clean.named_parameters())
    # Those of the shared layers too, but for packed ones: others may be tied to them.
    parameters = {
        name: p
        for name, p in base_parameters(model)
        if name in fresh and not is_packed(p) and p.shape == fresh[name].shape
    }
    for name, p in parameters.items():
        fresh[name].requires_grad_(p.requires_grad)  # which assigning hands on to the base's own parameter
    clean.load_state_dict(parameters, strict=False, assign=True)
    clean.tie_weights()
    own = {name_in_base(name): buffer for name, buffer in model.named_buffers()}
    for name, buffer in list(clean.named_buffers()):
        clean.get_submodule(layer_of(name))._buffers[name.rpartition(".")[2]] = own.get(name, buffer)
    clean.generation_config = base.generation_config
    clean.eval()
    for name, module in shared.items():
        clean.set_submodule(name, module)
    for mark in MARKS:
        if mark in vars(base):
            setattr(clean, mark, vars(base)[mark])
    return clean


def empty_of(base: nn.Module) -> Any:  # noqa: ANN401 (a model of transformers)
    """A model of the base's kind without weights, its buffers as at the start."""
    with init_empty_weights(include_buffers=False), warnings.catch_warnings():
        fresh = type(base)(base.config)
    if dropped_towers(base):
        drop_towers(fresh)
    return fresh


def _differs(module: nn.Module, fresh: nn.Module, *, only_codes: bool) -> bool:
    """Whether a layer computes otherwise than the architecture's own."""
    if next(fresh.children(), None) is not None:
        return False
    if is_packed(getattr(module, "weight", None)) or only_codes:
        return is_packed(getattr(module, "weight", None))
    hooks = [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in (module, fresh)]  # FSDP2's are on both
    return kind_of(module) is not kind_of(fresh) or hooks[0] != hooks[1] or "forward" in vars(module)


def beside(module: nn.Module, name: str) -> Any:  # noqa: ANN401 (a function of transformers)
    """What stands under this name in the file of a module's class, whatever class a script or FSDP2 has made of it."""
    files = [sys.modules[kind.__module__] for kind in type(module).__mro__]
    return next((getattr(file, name) for file in files if hasattr(file, name)), None)


def kind_of(module: nn.Module) -> Any:  # noqa: ANN401 (a class)
    """Its class, or the one that it stands for: another that computes the same."""
    return getattr(type(module), "stands_for", type(module))


def base_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The base's parameters under the names they have without an adapter."""
    wrapped = isinstance(model, PeftModel)
    # Of tied parameters in shards one may be whole while the other is not, so that they are two.
    tied = getattr(base_of(model), "all_tied_weights_keys", {}) if is_sharded(model) else {}
    for name, parameter in model.named_parameters():
        if is_of_the_base(model, name):
            own = name_in_base(name) if wrapped else name
            if own not in tied:
                yield own, parameter


def quantising(section: ModelSection, device: torch.device, dtype: torch.dtype | str = "auto") -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that quantise a base as it is loaded, on its device; none for an ordinary one.

    Args:
        section: Which base, and to what.
        device: Where it will lie.
        dtype: Of all that is not quantised, and in which the rest is computed; ``auto``: float32 on a CPU, elsewhere
            bfloat16, or float16 where there is no bfloat16 or the checkpoint is in it.
    """
    if section.quantization is None:
        return {}
    if dtype == "auto":
        dtype = torch.float32 if device.type == "cpu" else half_precision(_config(section).dtype, device)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    config = quantisation_config(section.quantization, dtype)
    return {"quantization_config": config, "device_map": {"": device}, "dtype": dtype}


def check_quantisation(section: ModelSection, device: torch.device = _META) -> None:
    """Refuses to quantise what cannot be, before weights are loaded.

    Args:
        section: Which base, and to what.
        device: Where it will lie; the meta device: it is not known yet.

    Raises:
        MissingExtraError: The package that quantises is not installed.
        ModelError: The checkpoint is quantised already, or the device does not compute with such weights.
    """
    if section.quantization is None:
        return
    how = QUANTISATIONS[section.quantization]
    if not how.package.installed:
        problem = missing_extra(how.package.pip, EXTRA, how.name)
        raise MissingExtraError(problem.message, "model.quantization", problem.hint)
    if device != _META and not how.runs_on(device.type):
        others = [row.name for row in QUANTISATIONS.values() if row.runs_on(device.type)]
        instead = f"{' or '.join(others)}, " if others else ""
        what = f"{how.name} runs on {', '.join(how.devices)}, and this is {device.type}"
        raise ModelError(what, "model.quantization", f"{instead}another engine.device, or leave it out")
    published = getattr(_config(section), "quantization_config", None)
    if published is not None:
        kind = published.get("quant_method") if isinstance(published, dict) else published.quant_method
        what = f"{section.name} is published in quantised form already ({getattr(kind, 'value', kind)})"
        raise ModelError(what, "model.quantization", "leave it out, or name the ordinary base")


def _config(section: ModelSection) -> Any:  # noqa: ANN401 (a config of transformers)
    with _explained(section):
        return AutoConfig.from_pretrained(
            resolve_model(section.name), revision=section.revision, trust_remote_code=False
        )


def _offline(name: str) -> str:
    """What can be had without a network in place of a model."""
    if Path(name).name == smollm2.MODEL:
        return f"`{smollm2.COMMAND}` makes the folder without a Hub; then set model.name={smollm2.MODEL}"
    return f"{BASE_NAME} needs no network; `perl plan` and `perl new` know the sizes of {len(BASES)} bases without it"


@contextlib.contextmanager
def _explained(section: ModelSection) -> Iterator[None]:
    """Turns what transformers raises for a model that cannot be loaded into one line."""
    try:
        yield
    except PerlError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        local = Path(section.name).expanduser().is_dir()
        what = "holds no model that can be loaded" if local else "cannot be loaded"
        hint = _offline(section.name)
        if constants.HF_HUB_OFFLINE and not local:
            hint = f"HF_HUB_OFFLINE is set, so only what is cached can be loaded; {hint}"
        raise ModelError(f"{section.name} {what}: {first_line(error)}", "model.name", hint) from error
