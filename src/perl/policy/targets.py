"""Names of modules that an adapter is to touch, compared with those the model has.

PeftConfig, model -> nothing, or an error with the names that exist
"""

import contextlib
import copy
import inspect
import re
from collections.abc import Sequence, Set

from peft import PeftConfig
from peft.tuners.tuners_utils import (
    _check_lora_target_modules_mamba,
    _maybe_include_all_linear_layers,
    check_target_module_exists,
)
from torch import nn
from transformers import PreTrainedModel

from perl.errors import ModelError

# A layer's weight in a module's source, but where only its type or shape is asked for, and where BLOOM takes slices of
# it for a mode that is off.
_WEIGHT = re.compile(r"\bself\.(\w+)\.weight\b(?!\[|\.(?:dtype|device|shape|ndim|size)\b)")


def check_targets(model: nn.Module, config: PeftConfig) -> None:
    """Refuses names of modules that the model does not have; PEFT ignores a name as long as another one matches.

    Raises:
        ModelError: With the names that exist.
    """
    modules = [name for name, _ in model.named_modules() if name]
    targets = getattr(config, "target_modules", None)
    if targets is not None and targets != "all-linear":
        wanted = [targets] if isinstance(targets, str) else sorted(targets)
        missing = [name for name in wanted if not _matches(config, name, modules)]
        if missing:
            raise ModelError(
                f"{', '.join(missing)} match no module of {type(model).__name__}",
                "peft.target_modules",
                f"the linear layers are {', '.join(linear_names(model))}; or all-linear",
            )
    whole = getattr(config, "modules_to_save", None) or ()
    absent = [name for name in whole if not any(m == name or m.endswith(f".{name}") for m in modules)]
    if absent:
        raise ModelError(
            f"{', '.join(absent)} match no module of {type(model).__name__}",
            "peft.kwargs.modules_to_save",
            f"its parts are {', '.join(sorted({m.rpartition('.')[2] for m in modules if not m[-1].isdigit()}))}",
        )


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
    names = _maybe_include_all_linear_layers(copy.copy(config), model).target_modules
    parents = {name: type(model.get_submodule(name.rpartition(".")[0])) for name in names}
    read = {kind: _weights_read_by(kind) for kind in set(parents.values())}
    left_out = {name for name, kind in parents.items() if not _is_reached(model, config, name, read[kind])}
    if left_out:
        config.target_modules = sorted(set(names) - left_out)
    return sorted({name.rpartition(".")[2] for name in left_out})


def full_names(model: nn.Module, names: Sequence[str]) -> list[str]:
    """The modules that are meant; PEFT takes ``norm`` for the ending of any name, so for ``q_norm`` too."""
    modules = [module for module, _ in model.named_modules()]
    return sorted(m for m in modules if any(m == name or m.endswith(f".{name}") for name in names))


def linear_names(model: nn.Module) -> list[str]:
    """Last parts of the names of linear layers, without the output head."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return sorted(
        {name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    )


def _is_reached(model: nn.Module, config: PeftConfig, name: str, read: Set[str]) -> bool:
    """Whether an adapter on a layer takes effect, and PEFT allows it."""
    last = name.rpartition(".")[2]
    if last in read:
        return False
    try:
        _check_lora_target_modules_mamba(config, model, last)
    except ValueError:
        return False
    return True


def _weights_read_by(kind: type[nn.Module]) -> set[str]:
    """Names of layers whose weights a module reads in its forward pass, as its source says."""
    passes = [getattr(kind, name) for name in dir(kind) if "forward" in name and not name.startswith("register")]
    found: set[str] = set()
    for function in passes:
        with contextlib.suppress(OSError, TypeError):  # made without a file
            found.update(re.findall(_WEIGHT, inspect.getsource(inspect.unwrap(function))))
    return found


def _matches(config: PeftConfig, target: str, modules: list[str]) -> bool:
    """Whether one target, as PEFT reads it, names a module."""
    alone = copy.copy(config)
    alone.target_modules = target if isinstance(config.target_modules, str) else {target}
    return any(check_target_module_exists(alone, name) for name in modules)
