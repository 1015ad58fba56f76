"""The loss that keeps a model's experts in even use, of packed rows as of padded ones.

router logits of each layer, how often each token counts -> loss

Transformers' own function of the model, which takes weights as its mask of padding: a prompt that several completions
share counts once for each of them, as it would in rows of their own. The last token of a completion, which predicts
nothing and is not run, has no part in it.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from perl.packing.rows import Layout
from perl.policy.model import base_of

_FUNCTION = "load_balancing_loss_func"


def balances(model: nn.Module) -> bool:
    """Whether transformers has that loss for a model."""
    return hasattr(sys.modules[type(base_of(model)).__module__], _FUNCTION)


def balancing_loss(
    model: nn.Module, logits: tuple[torch.Tensor, ...] | None, mask_NL: torch.Tensor | None, layout: Layout | None
) -> torch.Tensor:
    """The loss, of equation 4 to 6 of Switch Transformer (arXiv:2101.03961), a scalar.

    Args:
        model: Without wrappers.
        logits: Of each layer with experts, (tokens, experts); None or empty where there is none.
        mask_NL: Of padded rows, 1 for tokens; None: there is no padding.
        layout: Of packed rows.
    """
    if not logits:  # no layer has experts
        return torch.zeros(())
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    function: Callable[..., torch.Tensor] = getattr(sys.modules[type(model).__module__], _FUNCTION)
    return function(logits, experts, config.num_experts_per_tok, mask_NL if layout is None else layout.counts)
