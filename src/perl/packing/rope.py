"""Rotary factors that depend on the longest position of a forward pass, fixed to the batch that rows came in.

model, width of a batch -> the width its factors stand for; model, width -> the same factors in any forward pass

Long RoPE (Phi-3, Phi-4-mini) and dynamic NTK scaling choose the factors of all tokens by the longest position that is
run, and transformers' dynamic scaling also by what ran before. Packed rows, and rows padded to their own longest, would
get other factors from the old policy than from the trained one. Here they get those of the padded batch they came in.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# What transformers' own update of the factors looks for in a rotary embedding's type; under this one it does nothing.
_FIXED = "fixed"
_LONGROPE, _DYNAMIC = "longrope", "dynamic"


def rope_width(model: nn.Module) -> Callable[[int], int]:
    """What tells rows apart whose rotary factors differ.

    Args:
        model: With or without an adapter and wrappers.

    Returns:
        Tokens of the longest padded row of a batch -> the width that its factors stand for: the same number for all
        widths with the same factors, 0 where the model's never change.
    """
    found = [(kind, limit) for module in _embeddings(model) for kind, limit in _limits(module)]
    if not found:
        return lambda _: 0
    # Up to the length it was trained on factors are the usual ones; beyond it long RoPE has one other set.
    shortest = min(limit for _, limit in found)
    two_sets = len(set(found)) == 1 and found[0][0] == _LONGROPE
    return lambda width: min(max(width, shortest), shortest + 1) if two_sets else max(width, shortest)


@contextlib.contextmanager
def of_width(model: nn.Module, width: int) -> Iterator[None]:
    """A forward pass inside has the rotary factors of a batch of this width, whatever it runs.

    Args:
        model: With or without an adapter and wrappers.
        width: From :func:`rope_width`; 0: nothing is changed.
    """
    embeddings = list(_embeddings(model)) if width else []
    own = [vars(module).get("forward") for module in embeddings]  # there is one where layers lie on several devices
    for module in embeddings:
        module.forward = _Fixed(module, width)
    try:
        yield
    finally:
        for module, forward in zip(embeddings, own, strict=True):
            if forward is None:
                del module.forward  # the class's again
            else:
                module.forward = forward


class _Fixed:
    """A rotary embedding's forward with the factors of one width; the module is as before when it returns."""

    def __init__(self, module: nn.Module, width: int) -> None:
        self.module: Any = module
        self.forward = module.forward
        self.width = width

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        module = self.module
        own = module.rope_type if layer_type is None else module.rope_type[layer_type]
        arguments = {} if layer_type is None else {"layer_type": layer_type}
        if not _depends(own):
            found: tuple[torch.Tensor, torch.Tensor] = self.forward(x, position_ids, **arguments)
            return found
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        kept = {"rope_type": module.rope_type, name: getattr(module, name)}
        longest = torch.tensor(self.width, device=x.device)  # a tensor, as transformers has it: to the same last bit
        factors, _ = ROPE_INIT_FUNCTIONS[own](module.config, x.device, seq_len=longest, layer_type=layer_type)
        module.rope_type = _FIXED if layer_type is None else {**module.rope_type, layer_type: _FIXED}
        setattr(module, name, factors)
        try:
            found = self.forward(x, position_ids, **arguments)
            return found
        finally:
            for attribute, value in kept.items():
                setattr(module, attribute, value)


def _embeddings(model: nn.Module) -> Iterator[Any]:
    """The rotary embeddings whose factors depend on what is run."""
    for module in model.modules():
        if hasattr(module, "rope_type") and hasattr(module, "config") and next(_limits(module), None):
            yield module


def _limits(module: Any) -> Iterator[tuple[str, int]]:  # noqa: ANN401 (a model's rotary embedding)
    """The kind of an embedding's factors and the longest row that has the usual ones, for each type of layer."""
    types = module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}
    for layer_type, kind in types.items():
        if not _depends(kind):
            continue
        parameters = module.config.rope_parameters
        own = parameters if layer_type is None else parameters[layer_type]
        limit = own["original_max_position_embeddings"] if kind == _LONGROPE else module.config.max_position_embeddings
        yield (_LONGROPE if kind == _LONGROPE else _DYNAMIC), int(limit)


def _depends(kind: object) -> bool:
    """As transformers asks: any kind with "dynamic" in its name, and long RoPE."""
    return isinstance(kind, str) and (kind == _LONGROPE or _DYNAMIC in kind)
