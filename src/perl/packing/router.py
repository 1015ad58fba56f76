"""The loss that keeps a model's experts in even use, of packed rows as of padded ones.

router logits of each layer, how often each token counts -> loss

Transformers' own function of the model, which takes weights as its mask of padding: a prompt that several completions
share counts once for each of them, as it would in rows of their own. The last token of a completion, which predicts
nothing and is not run, has no part in it.
"""

import inspect
from typing import Any

import torch
from torch import nn

from perl.packing.rows import Layout
from perl.policy.model import base_of, beside

_FUNCTION = "load_balancing_loss_func"


def balances(model: nn.Module) -> bool:
    """Whether transformers has that loss for a model, and it has experts."""
    function, config = beside(base_of(model), _FUNCTION), base_of(model).config.get_text_config()
    takes = set() if function is None else set(inspect.signature(function).parameters)
    return {"num_experts", "top_k", "attention_mask"} <= takes and _experts(config) > 1


def _experts(config: Any) -> int:  # noqa: ANN401 (of transformers)
    return int(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0)


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
    weights_NL = mask_NL if layout is None else layout.counts
    how = {"top_k": config.num_experts_per_tok, "attention_mask": weights_NL}
    loss: torch.Tensor = beside(model, _FUNCTION)(logits, _experts(config), **how)
    return loss
