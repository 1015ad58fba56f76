"""What is minimised: a number for every completion token, and the weight with which it enters the sum.

log-probabilities, advantages, mask -> per-token objective, weights -> loss

Pure functions on tensors. Knows nothing of models, prompts or TRL. Shapes: N rows (completions), T completion tokens;
(N, 1) where one value holds for a whole row.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
RatioLevel = Literal["token", "sequence"]

# VESPO works in log space between these, its reference implementation's bounds.
_LOWEST_LOG_WEIGHT = math.log(1e-8)
_HIGHEST_LOG_WEIGHT = 20.0


@dataclass(frozen=True)
class LossSettings:
    """The settings of the objective; names and meaning are those of TRL's ``GRPOConfig``.

    Attributes:
        ratio_level: TRL's ``importance_sampling_level``: one ratio a token, or its geometric mean over the row (GSPO).
        delta: Upper bound of the unclipped ratio where the advantage is negative; None: none.
        beta: Weight of the KL divergence to the reference policy.
        correct_kl: Multiply the KL estimate by the ratio, so that it is unbiased off policy.
        max_completion_length: The constant that Dr. GRPO divides by, in tokens.
    """

    loss_type: LossType = "dapo"
    ratio_level: RatioLevel = "token"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    correct_kl: bool = True
    max_completion_length: int = 512
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0


@dataclass(frozen=True)
class LossInputs:
    """What the objective of a micro-batch is computed from.

    Attributes:
        policy_log_probs: (N, T) float, with gradient.
        old_log_probs: (N, T) float, of the policy that the ratio is taken against; detached policy when on-policy.
        advantages: (N, 1) or (N, T) float.
        mask: (N, T) 1 for tokens the policy wrote, 0 for padding and tool results.
        reference_log_probs: (N, T) float; None where beta is 0.
        sampling_ratio: (N, T) or (N, 1) correction for an engine that samples from other numbers; None: none.
        keep: (N, 1) or (N, T) 0 where a row is too far off policy for its advantage to count; None: all count.
    """

    policy_log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    reference_log_probs: torch.Tensor | None = None
    sampling_ratio: torch.Tensor | None = None
    keep: torch.Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """The objective of every token, and what it was made of.

    Attributes:
        per_token: (N, T) or (N, 1), to be weighted and summed.
        ratio: (N, T) or (N, 1), policy over old policy, detached.
        kl: (N, T) estimate of KL(policy || reference) in nats; None where beta is 0.
        vespo_weight: (N, 1), VESPO's weight of each row; None for other losses.
    """

    per_token: torch.Tensor
    ratio: torch.Tensor
    kl: torch.Tensor | None = None
    vespo_weight: torch.Tensor | None = None


def objective(inputs: LossInputs, settings: LossSettings) -> Objective:
    """The per-token objective of any of the loss types, KL included, before weighting.

    Args:
        inputs: Log-probabilities, advantages and mask of the rows.
        settings: Loss type and its constants.

    Returns:
        The objective; its sum over tokens with :func:`token_weights` is the loss.
    """
    log_ratio = inputs.policy_log_probs - inputs.old_log_probs
    ratio = ratio_at(settings.ratio_level, log_ratio, inputs.mask)
    vespo_weight = None
    if settings.loss_type == "vespo":
        vespo_weight = vespo_row_weights(inputs, log_ratio, settings)
        per_token = -vespo_weight * inputs.advantages * inputs.policy_log_probs
    else:
        per_token = _SURROGATES[settings.loss_type](ratio, inputs, settings)
        if inputs.sampling_ratio is not None:  # VESPO has it in its weight
            per_token = per_token * inputs.sampling_ratio
    if inputs.keep is not None:
        per_token = per_token * inputs.keep
    kl = None
    if settings.beta != 0.0:
        if inputs.reference_log_probs is None:
            raise ValueError("beta is not 0, so the reference's log-probabilities are needed")
        kl = kl_estimate(inputs.policy_log_probs, inputs.reference_log_probs)
        if settings.correct_kl:
            kl = kl * ratio
        per_token = per_token + settings.beta * kl
    return Objective(per_token, ratio.detach(), None if kl is None else kl.detach(), vespo_weight)


def ratio_at(level: RatioLevel, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Probability of the tokens under the policy over that under the old policy.

    Args:
        level: ``token``: one a token; ``sequence``: the geometric mean over a row's tokens.
        log_ratio: (N, T) float.
        mask: (N, T) 1 where a token counts.

    Returns:
        (N, T) or (N, 1) float.

    Source: sequence level: Zheng et al. 2025 (GSPO), arXiv:2507.18071, equation 6.
    """
    if level == "token":
        return log_ratio.exp()
    return ((log_ratio * mask).sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1.0)).exp()


def kl_estimate(policy_log_probs: torch.Tensor, reference_log_probs: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate of KL(policy || reference) for each sampled token, in nats; never negative.

    Source: Shao et al. 2024, arXiv:2402.03300, equation 4.
    """
    difference = reference_log_probs - policy_log_probs
    return difference.exp() - difference - 1


def clipped_surrogate(ratio: torch.Tensor, inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    """-min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A), r bounded by ``delta`` in the first term.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; two epsilons: Yu et al. 2025 (DAPO),
        arXiv:2503.14476, equation 10; delta: INTELLECT-2, arXiv:2505.07291, section 3.4.
    """
    clipped = ratio.clamp(1 - settings.epsilon_low, 1 + settings.epsilon_high)
    if settings.delta is not None:
        ratio = ratio.clamp(max=settings.delta)
    return -torch.min(ratio * inputs.advantages, clipped * inputs.advantages)


def cispo_surrogate(ratio: torch.Tensor, inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    """-stop(min(r, epsilon_high)) A log p: the weight is clipped, no token loses its gradient.

    Source: MiniMax-M1 (CISPO), arXiv:2506.13585, equation 4.
    """
    return -ratio.clamp(max=settings.epsilon_high).detach() * inputs.advantages * inputs.policy_log_probs


def sapo_surrogate(ratio: torch.Tensor, inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the advantage's sign: a soft gate instead of a clip.

    Source: Soft Adaptive Policy Optimization, arXiv:2511.20347.
    """
    tau = torch.where(inputs.advantages > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * inputs.advantages


_SURROGATES: dict[str, Callable[[torch.Tensor, LossInputs, LossSettings], torch.Tensor]] = {
    "grpo": clipped_surrogate,
    "bnpo": clipped_surrogate,
    "dr_grpo": clipped_surrogate,
    "dapo": clipped_surrogate,
    "luspo": clipped_surrogate,
    "cispo": cispo_surrogate,
    "sapo": sapo_surrogate,
}


@torch.no_grad()
def vespo_row_weights(inputs: LossInputs, log_ratio: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """phi(w) = exp(lambda) w^k exp(-lambda w) of a row's importance weight w; phi(1) = 1, no gradient.

    Returns:
        (N, 1) float.

    Source: VESPO, arXiv:2602.10693, with the clamps of its reference implementation.
    """
    bound = _HIGHEST_LOG_WEIGHT
    log_weight = (log_ratio.clamp(-bound, bound) * inputs.mask).sum(dim=-1, keepdim=True)
    if inputs.sampling_ratio is not None:
        log_sampling = inputs.sampling_ratio.log().clamp(_LOWEST_LOG_WEIGHT, bound)
        log_weight = log_weight + log_sampling.sum(dim=-1, keepdim=True)
    log_weight = log_weight.clamp(_LOWEST_LOG_WEIGHT, bound)
    raised = inputs.advantages >= 0
    k = torch.where(raised, settings.vespo_k_pos, settings.vespo_k_neg)
    rate = torch.where(raised, settings.vespo_lambda_pos, settings.vespo_lambda_neg).clamp(min=1e-4)
    return (rate + k * log_weight - rate * log_weight.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def token_weights(
    mask_NT: torch.Tensor,
    loss_type: LossType,
    *,
    micro_batches: float,
    window_tokens: torch.Tensor | float,
    max_completion_length: int,
) -> torch.Tensor:
    """The weight of every token in its optimizer step's loss: the loss is sum(weights * objective).

    Args:
        mask_NT: (N, T) 1 where a token counts; one micro-batch of N rows.
        loss_type: What the sum is normalised by: each row's own tokens (grpo, sapo), the micro-batch's (bnpo), a
            constant (dr_grpo), the window's tokens (dapo, cispo, vespo), or nothing but the rows (luspo).
        micro_batches: Micro-batches in the window of one optimizer step; each has the same say.
        window_tokens: Tokens in the window that count, divided by the number of processes.
        max_completion_length: Dr. GRPO's constant, in tokens.

    Returns:
        (N, T) float32, 0 where the mask is 0.

    Source: the table of normalisers in TRL 1.16's ``_compute_loss``, written as weights.
    """
    mask_NT = mask_NT.float()
    rows = mask_NT.size(0)
    if loss_type in ("grpo", "sapo"):
        per_row = 1 / (micro_batches * rows * mask_NT.sum(dim=-1, keepdim=True).clamp(min=1.0))
        return mask_NT * per_row
    if loss_type == "bnpo":
        return mask_NT / (micro_batches * mask_NT.sum().clamp(min=1.0))
    if loss_type == "dr_grpo":
        return mask_NT / (micro_batches * rows * max_completion_length)
    if loss_type == "luspo":
        return mask_NT / (micro_batches * rows)
    return mask_NT / window_tokens
