"""What is logged of a loss, under TRL's names, as means over the tokens of all processes.

Objective, LossInputs -> (name, value)
"""

from collections.abc import Iterator

import torch
from accelerate import Accelerator
from trl.trainer.utils import nanmax, nanmin

from perl.losses import LossInputs, LossSettings, Objective

_CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def loss_metrics(
    result: Objective,
    inputs: LossInputs,
    entropies: torch.Tensor,
    settings: LossSettings,
    accelerator: Accelerator,
) -> Iterator[tuple[str, float]]:
    """The metrics of one micro-batch."""
    mask = inputs.mask

    def mean(values: torch.Tensor) -> float:
        on_rows = values.size(1) == 1
        total = values.sum() if on_rows else (values * mask).sum()
        count = mask.new_tensor(values.size(0)) if on_rows else mask.sum()
        totals = accelerator.reduce(torch.stack([total.float(), count.float()]), reduction="sum")
        return float((totals[0] / totals[1].clamp(min=1.0)).item())

    def row_means(values: torch.Tensor) -> torch.Tensor:
        rows = values.squeeze(1) if values.size(1) == 1 else (values * mask).sum(-1) / mask.sum(-1)
        return accelerator.gather(rows)

    if result.kl is not None:
        yield "kl", mean(result.kl)
    yield "entropy", mean(entropies)
    if settings.loss_type in _CLIPPED_LOSSES:
        low = ((result.ratio < 1 - settings.epsilon_low) & (inputs.advantages < 0)).float()
        high = ((result.ratio > 1 + settings.epsilon_high) & (inputs.advantages > 0)).float()
        yield "clip_ratio/low_mean", mean(low)
        yield "clip_ratio/high_mean", mean(high)
        yield "clip_ratio/region_mean", mean(torch.maximum(low, high))
        yield "clip_ratio/low_min", nanmin(row_means(low)).item()
        yield "clip_ratio/high_max", nanmax(row_means(high)).item()
    elif settings.loss_type == "cispo":
        clipped = (result.ratio > settings.epsilon_high) & (inputs.advantages > 0)
        yield "cispo_clip_ratio", mean(clipped.float())
    elif result.vespo_weight is not None:
        yield "vespo/phi_seq_mean", mean(result.vespo_weight)
