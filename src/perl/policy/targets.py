"""Names of modules that an adapter is to touch, compared with those the model has.

PeftConfig, model -> nothing, or an error with the names that exist
"""

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from peft import PeftConfig
from peft.tuners.tuners_utils import (
    _check_lora_target_modules_mamba,
    _maybe_include_all_linear_layers,
    check_target_module_exists,
)
from peft.utils.other import get_pattern_key
from torch import nn
from transformers import PreTrainedModel

from perl.errors import ModelError, did_you_mean

# A layer's weight in a module's source, but where only its type or shape is asked for, and where BLOOM takes slices of
# it for a mode that is off.
_WEIGHT = re.compile(r"\bself\.(\w+)\.weight\b(?!\[|\.(?:dtype|device|shape|ndim|size)\b)")

# A module in a numbered layer, as PEFT finds the number.
_NUMBERED = r"(?:^|.*?\.){}\.(\d+)\."
# What a selection matches that is no module.
_MATCHED = {
    "target_parameters": "parameter",
    "modules_to_save": "module",
    "layers_to_transform": "layer",
    "layers_pattern": "numbered layers",
    "trainable_token_indices": "module or token",
}
# A key of a config, its entries, what they may match, and the pattern that PEFT makes of one.
_Selection = tuple[str, Sequence[Any], Sequence[str], Callable[[str], str]]


def check_targets(model: nn.Module, config: PeftConfig) -> None:
    """Refuses names, patterns, layers and tokens that the model does not have; PEFT ignores one beside another.

    Raises:
        ModelError: With the names that exist.
    """
    modules = [name for name, _ in model.named_modules() if name]
    targets = getattr(config, "target_modules", None)
    if targets is not None and targets != "all-linear":
        wanted = [targets] if isinstance(targets, str) else sorted(targets)
        missing = [name for name in wanted if not any(_is_target(config, name, m) for m in modules)]
        if missing:
            hint = f"the linear layers are {', '.join(linear_names(model))}; or all-linear"
            what = f"{', '.join(missing)} match no module of {type(model).__name__}"
            raise ModelError(what, "peft.target_modules", hint)
    targeted, adapted = _targeted(model, config, modules)
    for key, entries, names, form in _selections(model, config, targeted, adapted):
        missing = [str(one) for one in entries if not any(re.fullmatch(form(str(one)), name) for name in names)]
        if missing:
            last = {name.rpartition(".")[2] for name in names if not name[-1].isdigit()} or set(names)
            near = did_you_mean(missing[0], last)
            hint = near if near.startswith("did") else f"there are {', '.join(sorted(last))}"
            what = f"{', '.join(missing)} match no {_MATCHED.get(key, 'adapted module')} of {type(model).__name__}"
            raise ModelError(what, f"peft.kwargs.{key}", hint)
        if isinstance(values := getattr(config, key, None), dict) and key.endswith("_pattern"):
            _check_order(key, {one: values[one] for one in entries}, names)
    if isinstance(targets, Set | list | tuple):
        cancelled = [name for name in sorted(targets) if not any(_is_target(config, name, m) for m in adapted)]
        if cancelled:
            what = f"nothing is left of {', '.join(cancelled)}, which other keys take out again"
            raise ModelError(what, "peft.target_modules", "see exclude_modules, layers_to_transform, modules_to_save")
    _check_effect(model, config)


def _check_order(key: str, values: Mapping[str, Any], names: Sequence[str]) -> None:
    """Of a pattern's keys PEFT takes the first that matches, and a saved config has them in another order."""
    for name in names:
        first, later = (get_pattern_key(keys, name) for keys in (list(values), sorted(values)))
        if values.get(first) != values.get(later):
            what = f"{name} has the value of {first!r}, and of {later!r} once they are saved, in the alphabet's order"
            raise ModelError(what, f"peft.kwargs.{key}", "write keys of which one alone matches a module")
    hidden = sorted(values.keys() - {get_pattern_key(list(values), name) for name in names})
    if hidden:
        raise ModelError(f"keys before {hidden[0]!r} match all that it does", f"peft.kwargs.{key}", "leave it out")


def _check_effect(model: nn.Module, config: PeftConfig) -> None:
    """Refuses keys that have no effect beside others, or on this base."""
    parameters: list[str] = getattr(config, "target_parameters", None) or []
    for key in ("exclude_modules", "layers_to_transform") if parameters else ():
        if getattr(config, key, None):
            what = f"does not choose among target_parameters ({', '.join(parameters)}), which PEFT adapts in all layers"
            raise ModelError(what, f"peft.kwargs.{key}", "leave one of the two out; list the parameters by full name")
    if getattr(config, "use_qalora", False) and "gptq" not in str(getattr(model, "quantization_method", "")).lower():
        raise ModelError("acts on a base of GPTQ's codes, and does nothing on this one", "peft.kwargs.use_qalora")


def _selections(model: nn.Module, config: PeftConfig, targeted: list[str], adapted: list[str]) -> Iterator[_Selection]:
    """What a config selects beside its targets."""
    modules, parameters = [name for name, _ in model.named_modules() if name], [n for n, _ in model.named_parameters()]
    listed = getattr(config, "target_parameters", None)
    for key, value in vars(config).items():
        if key.endswith("_pattern") and isinstance(value, dict):  # a finished AdaLoRA's has lists
            names = [name for name, number in value.items() if not isinstance(number, list)]
            yield key, names, [*adapted, *(parameters if listed else ())], r"(?:.*\.)?(?:{})".format
    tokens = getattr(config, "trainable_token_indices", None)
    of_keys = {"modules_to_save": modules, "exclude_modules": targeted, "feedforward_modules": targeted}
    for key, names in (of_keys | {"target_parameters": parameters}).items():
        value = getattr(config, key, None) or ()
        yield (key, [value], names, str) if isinstance(value, str) else (key, sorted(value), names, _ending)
    by_module = tokens if isinstance(tokens, dict) else {"": tokens or getattr(config, "token_indices", None) or ()}
    embeddings: Any = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    rows = 0 if embeddings is None else embeddings.weight.shape[0]
    beyond = [token for ids in by_module.values() for token in ids if not 0 <= token < rows]
    yield "trainable_token_indices", [name for name in by_module if name], modules, _ending
    yield "trainable_token_indices", beyond, [f"0 to {rows - 1}"], str
    layers = getattr(config, "layers_pattern", None) or ()
    layers = [layers] if isinstance(layers, str) else layers
    numbers = [
        (form, match[1])
        for form in layers or [r"[^.]*"]
        for name in targeted
        if (match := re.match(_NUMBERED.format(form), name))
    ]
    stacks = sorted({name.split(".")[-2] for name in modules if re.search(r"\.\d+$", name)})
    yield "layers_pattern", [form for form in layers if form not in dict(numbers)], stacks, str
    wanted = getattr(config, "layers_to_transform", None)
    wanted = [wanted] if isinstance(wanted, int) else wanted or ()
    present = sorted(int(number) for _, number in numbers) or [0]
    absent = [layer for layer in wanted if layer not in present]
    yield "layers_to_transform", absent, [f"{present[0]} to {present[-1]}"], str


def _ending(name: str) -> str:
    return rf"(?:.*\.)?{re.escape(name)}"


def _targeted(model: nn.Module, config: PeftConfig, modules: list[str]) -> tuple[list[str], list[str]]:
    """The modules that the targets name, and those of them that are neither left out nor in another layer.

    All, where PEFT chooses.
    """
    chosen = copy.copy(config)
    if getattr(config, "target_modules", None) == "all-linear":
        chosen = _maybe_include_all_linear_layers(chosen, model)
    targets = getattr(chosen, "target_modules", None)
    if targets is None:
        return modules, modules
    targeted = [name for name in modules if _is_target(config, targets, name)]
    if targets is not config.target_modules:  # by names that do not depend on the layer, as they are chosen next
        chosen.target_modules = {name.rpartition(".")[2] for name in targeted}
    return targeted, [name for name in targeted if check_target_module_exists(chosen, name)]


def leave_out_unreached(model: nn.Module, config: PeftConfig) -> list[str]:
    """Takes out of "all-linear" the layers that an adapter would not reach.

    Those are layers whose weights the module around them reads by itself, as Mamba's kernels do: what an adapter adds
    to the layer's output is then never computed. PEFT refuses some of them, and puts an adapter that cannot
    train on the others.

    Args:
        model: The base.
        config: Changed if there is something to leave out.

    Returns:
        Last parts of the names that were left out.
    """
    if getattr(config, "target_modules", None) != "all-linear":
        return []
    chosen = _maybe_include_all_linear_layers(copy.copy(config), model)
    names = [name for name in chosen.target_modules if check_target_module_exists(chosen, name)]
    parents = {name: type(model.get_submodule(name.rpartition(".")[0])) for name in names}
    read = {kind: _weights_read_by(kind) for kind in set(parents.values())}
    left_out = set[str]()
    for name, kind in parents.items():
        last = name.rpartition(".")[2]
        try:
            _check_lora_target_modules_mamba(config, model, last)
        except ValueError:  # PEFT does not allow it
            left_out.add(name)
        own = type(model.get_submodule(name))  # a router of Llama 4 is a linear layer that returns a pair
        routes = own.__module__.startswith("transformers.models.") and own.forward is not nn.Linear.forward
        if last in read[kind] or routes:
            left_out.add(name)
    if left_out:
        config.target_modules = sorted(set(names) - left_out)
    return sorted({name.rpartition(".")[2] for name in left_out})


def linear_names(model: nn.Module) -> list[str]:
    """Last parts of the names of linear layers, without the output head."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    return sorted({name.rsplit(".", 1)[-1] for name in linear})


def _weights_read_by(kind: type[nn.Module]) -> set[str]:
    """Names of layers whose weights a module reads in its forward pass, as its source says."""
    passes = [getattr(kind, name) for name in dir(kind) if "forward" in name and not name.startswith("register")]
    # Gemma 3n's parts of a pass have names of their own.
    passes += [function for name, function in vars(kind).items() if inspect.isfunction(function) and name[0] != "_"]
    found: set[str] = set()
    for function in passes:
        with contextlib.suppress(OSError, TypeError):  # made without a file
            found.update(re.findall(_WEIGHT, inspect.getsource(inspect.unwrap(function))))
    return found


def _is_target(config: PeftConfig, targets: str | Set[str], module: str) -> bool:
    """Whether targets, as PEFT reads them, name a module, whatever its layer and whatever is left out."""
    alone = copy.copy(config)
    of_a_list = isinstance(targets, str) and not isinstance(config.target_modules, str)
    alone.target_modules = {targets} if of_a_list else targets
    for name in ("layers_to_transform", "exclude_modules", "modules_to_save"):
        setattr(alone, name, None)
    return bool(check_target_module_exists(alone, module))
