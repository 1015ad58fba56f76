"""Names of modules that an adapter is to touch, compared with those the model has.

PeftConfig, model -> nothing, or an error with the names that exist
"""

import copy
from collections.abc import Sequence

from peft import PeftConfig
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba, check_target_module_exists
from torch import nn
from transformers import PreTrainedModel

from perl.errors import ModelError


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


def leave_out_refused(model: nn.Module, config: PeftConfig) -> list[str]:
    """Takes out of "all-linear" what PEFT refuses: with Mamba layers, those whose weights a kernel reads itself.

    Args:
        model: The base.
        config: Changed if there is something to leave out.

    Returns:
        The names that were left out.
    """
    if getattr(config, "target_modules", None) != "all-linear":
        return []
    names = linear_names(model)
    refused = [name for name in names if not _accepted(model, config, name)]
    if refused:
        config.target_modules = sorted(set(names) - set(refused))
    return refused


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


def _accepted(model: nn.Module, config: PeftConfig, name: str) -> bool:
    """Whether PEFT takes layers of this name, by the last part of it."""
    try:
        _check_lora_target_modules_mamba(config, model, name)
    except ValueError:
        return False
    return True


def _matches(config: PeftConfig, target: str, modules: list[str]) -> bool:
    """Whether one target, as PEFT reads it, names a module."""
    alone = copy.copy(config)
    alone.target_modules = target if isinstance(config.target_modules, str) else {target}
    return any(check_target_module_exists(alone, name) for name in modules)
