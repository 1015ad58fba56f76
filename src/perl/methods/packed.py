"""Weights that are held as codes: which they are, how many numbers, and the numbers that they stand for.

parameter of a quantised layer -> its numbers

bitsandbytes' parameters hold integers; torchao's say that they are floating, and hold codes and scales inside.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from peft.utils.integrations import dequantize_bnb_weight, get_bnb_param_type
from torch import nn

from perl.run.shards import whole


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
