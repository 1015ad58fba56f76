"""The update of each module of a trained adapter or model, from its files and the base's, one module at a time.

adapter, base -> Updates -> weight and update of one module

PEFT builds a module's layer on the module's own weights, as it does in a whole model, so that an update is the one that
serving, exporting and merging have (``methods/delta.py``), for every method.
"""

import copy
import gc
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft.tuners.lora.layer import Embedding as LoraEmbedding
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from perl.errors import ModelError
from perl.methods.delta import LowRank, adapted_layers, closed_form, update_of
from perl.methods.names import name_in_base
from perl.methods.packed import base_weight
from perl.methods.registry import REFUSED_TYPES
from perl.policy.attach import check_start_is_known, continue_on_part
from perl.policy.saved.adapter import SavedAdapter
from perl.policy.saved.patterns import check_patterns
from perl.policy.spectra.checkpoint import Checkpoint
from perl.policy.spectra.measures import Update

_PREFIX = "base_model.model."
# Where PEFT keeps trained rows of embeddings.
_ROWS = "trainable_tokens"
# A vector for each group of modules, which is numbered.
_NUMBERED = re.compile(r"(base_model\.\w+)\.(\d+)")
# What a part has no use for: which modules are meant is known by name.
_CHOICES = (
    *("exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "trainable_token_indices"),
    *("target_parameters", "task_type"),
)
_LARGEST = "largest"  # a name that stands in no model
_WORTH_COLLECTING = 1 << 20


@dataclass(frozen=True)
class ModuleUpdate:
    """One module's weight before training, and what training added to it.

    Attributes:
        name: In the base.
        weight: W0, (out, in) or (n,), of the checkpoint's type or float32.
        update: Delta W.
    """

    name: str
    weight: torch.Tensor
    update: Update


@dataclass(frozen=True)
class Updates:
    """All that was changed, to be read one after the other.

    Attributes:
        modules: Names in the order of the model.
        left_out: What was trained and is no matrix of a module, in words.
        read: Name -> its update; nothing of it is kept.
    """

    modules: tuple[str, ...]
    left_out: tuple[str, ...]
    read: Callable[[str], ModuleUpdate]


def updates_of_adapter(saved: SavedAdapter, model: PreTrainedModel, checkpoint: Checkpoint) -> Updates:
    """The updates of a saved adapter.

    Args:
        saved: The adapter.
        model: The base's architecture, without weights.
        checkpoint: The base's weights.

    Raises:
        ModelError: It changes no weights, or was made for another base.
    """
    kind = saved.config.peft_type.value
    if kind in REFUSED_TYPES or saved.config.is_prompt_learning:
        why = REFUSED_TYPES.get(kind, "it adds tokens")
        raise ModelError(f"{saved.name} is a {kind}, which has no update of a weight matrix: {why}")
    check_start_is_known(saved)
    if getattr(saved.config, "projection_seed", None) is not None and not getattr(saved.config, "save_projection", 1):
        raise ModelError(
            f"{saved.name} holds no projections, which depend on their order in the whole model",
            hint="save it with save_projection=True",
        )
    modules = dict(model.named_modules())
    check_patterns(saved.config, list(modules), "spectrum")
    parts, shared, left_out = _by_module(saved, modules)
    names = tuple(name for name in modules if name in parts)
    if not names:
        raise ModelError(
            f"{saved.name} changes no weight of a module of its base", hint="another base? name it: --base"
        )
    tuned = [name for name in names if not _is_whole(parts[name])]
    largest = _largest(modules[name] for name in tuned)
    files = _Adapter(saved, checkpoint, modules, parts, shared, tuned, largest)
    return Updates(names, tuple(left_out), files.read)


def updates_of_model(trained: Checkpoint, base: Checkpoint, model: PreTrainedModel) -> Updates:
    """The updates of a model that was itself trained: its weights minus the base's. Biases are left out.

    Args:
        trained: The trained model's weights.
        base: The base's.
        model: The architecture, without weights.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names = [
        name.removesuffix(".weight") for name, shape in shapes.items() if name.endswith(".weight") and len(shape) < 3
    ]
    whole = {f"{name}.weight" for name in names}
    left_out = tuple(f"{name} (no matrix)" for name in shapes if name not in whole and not name.endswith(".bias"))

    def read(name: str) -> ModuleUpdate:
        before, after = (_upright(model.get_submodule(name), one.tensor(f"{name}.weight")) for one in (base, trained))
        return _difference(name, before, after, trained.name)

    return Updates(tuple(names), left_out, read)


def update_of_layer(layer: BaseTunerLayer, adapter: str) -> Update:
    """A layer's update as factors where the method keeps some, else as a matrix (out, in) float64."""
    if isinstance(layer, LoraEmbedding) and adapter not in layer.lora_variant:
        A_RV, B_HR = (part[adapter].detach().float() for part in (layer.lora_embedding_A, layer.lora_embedding_B))
        return LowRank(B_HR.T * layer.scaling[adapter], A_RV.T)
    return closed_form(layer, adapter) or update_of(layer, adapter)


def weight_of_layer(layer: BaseTunerLayer) -> torch.Tensor:
    """W0 of a layer, (out, in) or (n,), whichever way its module keeps it."""
    weight = base_weight(layer.get_base_layer())
    return weight.T if getattr(layer, "fan_in_fan_out", False) else weight


@dataclass(frozen=True)
class _Adapter:
    """An adapter's file by module.

    Attributes:
        parts: Module -> names of its tensors in the file, each with what it is called in the module.
        shared: Names of the tensors that modules share.
        tuned: Modules that have a layer of PEFT's, in the model's order.
        largest: (out, in) of a matrix that is as large as any of theirs, on both sides.
    """

    saved: SavedAdapter
    checkpoint: Checkpoint
    modules: Mapping[str, nn.Module]
    parts: Mapping[str, Mapping[str, str]]
    shared: tuple[str, ...]
    tuned: list[str]
    largest: tuple[int, int]

    def read(self, name: str) -> ModuleUpdate:
        """One module's update."""
        part = self.parts[name]
        if _is_whole(part):
            (key,) = (key for key, rest in part.items() if rest == "weight")
            return _difference(
                name, self.checkpoint.tensor(f"{name}.weight"), self._tensors([key])[key], self.saved.name
            )
        tensors = {key: t for key, t in self._tensors([*part, *self.shared]).items() if part.get(key) != "weight"}
        tensors = self._for_one(name, tensors)
        config = self._config_for(name)
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        saved = replace(self.saved, config=config, shapes=shapes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's, of a model of one module
            policy = continue_on_part(self._part(name, config), saved, tensors, unsaved=_LARGEST)
        layer = dict(adapted_layers(policy))[name]
        found = ModuleUpdate(name, weight_of_layer(layer), update_of_layer(layer, policy.active_adapter))
        if found.weight.numel() >= _WORTH_COLLECTING:
            del policy, layer
            gc.collect()  # its modules hold each other
        return found

    def _tensors(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        with safe_open(self.saved.weights, framework="pt") as file:
            return {key: file.get_tensor(key) for key in keys}

    def _for_one(self, name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors as they are called where this module is the only one."""
        numbered = {key for key in tensors if _NUMBERED.fullmatch(key)}
        if not numbered:
            return dict(tensors)
        tying, count = getattr(self.saved.config, "weight_tying", 0.0), len(self.tuned)
        groups = max(1, round(count * (1.0 - tying)))  # as PEFT's TinyLoraModel numbers them
        own = min(self.tuned.index(name) // max(1, count // groups), groups - 1)
        kept = {key: tensor for key, tensor in tensors.items() if key not in numbered}
        for key in numbered:
            stem, _, number = key.rpartition(".")
            if int(number) == own:
                kept[f"{stem}.0"] = tensors[key]
        return kept

    def _config_for(self, name: str) -> Any:  # noqa: ANN401 (a config of PEFT's)
        config = copy.deepcopy(self.saved.config)
        config.target_modules = [name, _LARGEST] if _is_sized_by_all(config) else [name]
        for choice in _CHOICES:
            if getattr(config, choice, None) is not None:
                setattr(config, choice, None)
        pattern = getattr(config, "rank_pattern", None)
        if pattern:  # one that ended with fewer ranks has a list of what is left for each module
            config.rank_pattern = {
                key: value for key, value in pattern.items() if not isinstance(value, list) or f".{name}." in f".{key}"
            }
        return config

    def _part(self, name: str, config: Any) -> nn.Module:  # noqa: ANN401
        """The module with its weights under its name in the base, alone."""
        module = copy.deepcopy(self.modules[name])
        for own, parameter in list(module.named_parameters(recurse=False)):
            tensor = self.checkpoint.tensor(f"{name}.{own}")
            if tensor.shape != parameter.shape:
                _refuse_shape(self.checkpoint.name, f"{name}.{own}", tensor, parameter)
            tensor = tensor if tensor.dtype == torch.float64 else tensor.float()
            setattr(module, own, nn.Parameter(tensor, requires_grad=False))
        part = nn.Module()
        *above, last = name.split(".")
        place = part
        for one in above:
            place.add_module(one, nn.Module())
            place = place.get_submodule(one)
        place.add_module(last, module)
        if _is_sized_by_all(config):
            outputs, inputs = self.largest
            sized = nn.Linear(inputs, outputs, bias=False, device="meta")
            # A matrix of one number.
            sized.weight = nn.Parameter(torch.zeros(()).expand(outputs, inputs), requires_grad=False)
            part.add_module(_LARGEST, sized)
        return part


def _is_sized_by_all(config: Any) -> bool:  # noqa: ANN401
    """Whether modules share matrices that are as large as the largest of them (VeRA, RandLoRA)."""
    return getattr(config, "projection_prng_key", None) is not None


def _by_module(
    saved: SavedAdapter, modules: Mapping[str, nn.Module]
) -> tuple[dict[str, dict[str, str]], tuple[str, ...], list[str]]:
    """Tensors of each module, those that modules share, and what belongs to no matrix."""
    parts: dict[str, dict[str, str]] = {}
    shared, left_out, foreign = list[str](), list[str](), list[str]()
    for key in saved.shapes:
        if not key.startswith(_PREFIX):
            shared.append(key)
            continue
        path = name_in_base(key).split(".")
        name = next((".".join(path[:i]) for i in range(len(path), 0, -1) if ".".join(path[:i]) in modules), "")
        rest = ".".join(path[len(name.split(".")) :]) if name else key
        weight = getattr(modules[name], "weight", None) if name else None
        if rest.startswith(_ROWS):
            left_out.append(f"trained rows of {name}")
        elif not isinstance(weight, torch.Tensor) or weight.dim() > 2:
            (left_out if name and list(modules[name].parameters()) else foreign).append(name or key)
        else:
            parts.setdefault(name, {})[key] = rest
    if foreign:
        base = saved.config.base_model_name_or_path or "another one"
        raise ModelError(f"{saved.name} does not fit this base, it was made for {base}: {foreign[0]} is only there")
    biases = [name for name, part in parts.items() if set(part.values()) == {"bias"}]
    return (
        {name: p for name, p in parts.items() if name not in biases},
        tuple(shared),
        sorted(set(left_out) | set(biases)),
    )


def _is_whole(part: Mapping[str, str]) -> bool:
    """Whether a module was trained itself, beside an adapter on others."""
    return set(part.values()) <= {"weight", "bias"}


def _upright(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """A weight as (out, in), whichever way its module keeps it."""
    return weight.T if isinstance(module, Conv1D) else weight


def _largest(modules: Iterable[nn.Module]) -> tuple[int, int]:
    shapes = [m.weight.shape for m in modules if isinstance(m, nn.Linear)]
    return max((s[0] for s in shapes), default=1), max((s[1] for s in shapes), default=1)


def _difference(name: str, before: torch.Tensor, after: torch.Tensor, trained: str) -> ModuleUpdate:
    if before.shape != after.shape:
        _refuse_shape(trained, name, after, before)
    return ModuleUpdate(name, before, after.float() - before.float())


def _refuse_shape(where: str, name: str, there: torch.Tensor, here: torch.Tensor) -> None:
    shapes = [" x ".join(map(str, tensor.shape)) for tensor in (there, here)]
    raise ModelError(f"{where} does not fit this base: {name} is {shapes[0]} there, {shapes[1]} here")
