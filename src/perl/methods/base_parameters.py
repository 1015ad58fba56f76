"""The base's parameters inside a policy: their names without PEFT, and the numbers of weights that are held as codes.

name in a policy -> name in the base; parameter of a quantised layer -> its numbers

bitsandbytes' parameters hold integers; torchao's say that they are floating, and hold codes and scales inside.
"""

import re
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from peft import PeftModel
from peft.utils.integrations import dequantize_bnb_weight, get_bnb_param_type
from torch import nn

from perl.run.shards import whole

# What PEFT puts into the names of the base's parameters; an expert's wrappers stand one in another.
_WRAPPERS = re.compile(r"\.(base_layer|original_module|token_adapter)(?=\.|$)")
# Parts of names that are the adapter's and do not carry its prefix.
_ADDED_PARTS = ("modules_to_save", "trainable_tokens_", ".ranknum.")


def is_packed(parameter: torch.Tensor | None) -> bool:
    """Whether a parameter holds codes, which a package computes with, and no numbers."""
    return parameter is not None and (not parameter.is_floating_point() or _is_of_torchao(parameter))


def _is_of_torchao(parameter: torch.Tensor) -> bool:
    """Said without importing torchao, as PEFT does."""
    return type(parameter).__module__.startswith("torchao.")


def number_count(parameter: torch.Tensor) -> int:
    """How many numbers a parameter stands for: NF4 packs two into a byte."""
    packed = get_bnb_param_type(parameter) == "4bit"
    return 2 * parameter.numel() * parameter.element_size() if packed else parameter.numel()


def base_weight(base: nn.Module, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The weight of a layer of the base; of a quantised one the numbers that its codes stand for.

    Args:
        base: A layer with a weight.
        dtype: In which codes become numbers; None: as their package has it.
    """
    weight = whole(dict(base.named_parameters())["weight"])
    if _is_of_torchao(weight):
        return numbers_of(weight, dtype)
    if not get_bnb_param_type(weight):
        return weight.detach()
    # PEFT's function for modules would put the parameter back as a new one, and the scale elsewhere.
    scale = getattr(getattr(base, "state", None), "SCB", None)
    state = SimpleNamespace(SCB=getattr(weight, "SCB", None) if scale is None else scale)
    found: torch.Tensor = dequantize_bnb_weight(weight, state)
    return found


def numbers_of(weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What a weight of torchao's stands for, code times scale, rounded once.

    Args:
        weight: Of a layer, (out, in).
        dtype: Of the result; None: float32, of which all smaller types are roundings.
    """
    found: torch.Tensor = weight.detach().dequantize(dtype or torch.float32)  # type: ignore[call-arg]
    return found


def parts_of(name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A parameter by its name, or the plain tensors inside one of torchao's: codes and scales."""
    if not _is_of_torchao(parameter):
        yield name, parameter
        return
    inside, _ = parameter.__tensor_flatten__()  # type: ignore[attr-defined]
    yield from ((f"{name}.{part}", getattr(parameter, part)) for part in inside)


def is_of_the_base(model: nn.Module, name: str) -> bool:
    """Whether a parameter of this name is the base's, not the adapter's."""
    if not isinstance(model, PeftModel):
        return True
    added = (model.base_model.prefix, *_ADDED_PARTS)
    return not any(part in name for part in added)


def name_in_base(name: str) -> str:
    """A parameter's or module's name as it is without an adapter."""
    return _WRAPPERS.sub("", name.removeprefix("base_model.model."))
