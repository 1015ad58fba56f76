"""Corrections for rollouts whose tokens were drawn from other numbers than the trainer's.

log-probs of the old policy and of the sampling policy, mask -> ratios, rows to keep

An engine computes in its own order and type, so the policy that sampled is not quite the one that is trained. Pure
functions of tensors. Shapes: N rows, T completion tokens.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True)
class SamplingCorrection:
    """How the ratio of the old policy to the sampling policy is bounded; names as in TRL's ``GRPOConfig``.

    Attributes:
        mode: One ratio a token or one a row; what lies outside the bounds is moved to them, or set to 0.
        low: Lower bound; None: none.
        high: Upper bound; None: none.
    """

    mode: CorrectionMode
    low: float | None
    high: float | None


def sampling_ratio(
    old_log_probs_NT: torch.Tensor,
    sampling_log_probs_NT: torch.Tensor,
    mask_NT: torch.Tensor,
    correction: SamplingCorrection,
) -> torch.Tensor:
    """What the objective of each token is multiplied by.

    Args:
        old_log_probs_NT: (N, T) float, of the policy as it was at the rollout, by the trainer.
        sampling_log_probs_NT: (N, T) float, by the engine; NaN where it has none, which counts as equal.
        mask_NT: (N, T) 1 where the policy wrote a token.
        correction: Level and bounds.

    Returns:
        (N, T), or (N, 1) at the level of sequences, without gradient.

    Source: truncated and masked importance sampling as in TRL 1.16's ``vllm_importance_sampling_mode``.
    """
    # log (p_old / p_engine), of a token or summed over the row
    log_ratio = ((old_log_probs_NT - sampling_log_probs_NT) * mask_NT).nan_to_num(nan=0.0).detach()
    if correction.mode.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=-1, keepdim=True)
    ratio = log_ratio.exp()
    low = -math.inf if correction.low is None else correction.low
    high = math.inf if correction.high is None else correction.high
    if correction.mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def on_policy_rows(
    policy_log_probs_NT: torch.Tensor,
    sampling_log_probs_NT: torch.Tensor,
    advantages: torch.Tensor,
    mask_NT: torch.Tensor,
    threshold: float,
) -> torch.Tensor:
    """1 for rows to keep; 0 where the advantage is negative and the row is far from what is sampled now.

    Args:
        policy_log_probs_NT: (N, T) float.
        sampling_log_probs_NT: (N, T) float; NaN counts as equal.
        advantages: (N, 1) or (N, T) float.
        mask_NT: (N, T) 1 where the policy wrote a token.
        threshold: Largest mean difference over a row's tokens, in nats.

    Returns:
        Shape of the advantages, in the mask's type.

    Source: DeepSeek-V3.2, arXiv:2512.02556, off-policy sequence masking; TRL 1.16's ``get_off_policy_mask``.
    """
    # mean_t log (p_sampled / p_policy): an estimate of KL(sampling policy || policy) on this row
    difference_NT = (sampling_log_probs_NT - policy_log_probs_NT.detach()).nan_to_num(nan=0.0)
    mean_N1 = (difference_NT * mask_NT).sum(dim=1, keepdim=True) / mask_NT.sum(dim=1, keepdim=True).clamp(min=1.0)
    return ((advantages >= 0) | (mean_N1 <= threshold)).to(mask_NT.dtype)
