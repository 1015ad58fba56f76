"""What is minimised: a number for every completion token, and the weight with which it enters the sum.

log-probs, advantages, mask -> per-token objective, weights -> loss

Pure functions of tensors; ``registry.py`` says which of them a loss is made of. Shapes: N rows (completions), T
completion tokens; (N, 1) where one value holds for a whole row.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from perl.algorithms.kl_place import off_reward
from perl.algorithms.registry import ARGUMENTS, LOSSES, function_at
from perl.algorithms.train_fields import train_fields

RatioLevel = Literal["token", "sequence"]
KLEstimator = Literal["k1", "k2", "k3"]
Divergence = Literal["tv", "kl"]
Surrogate = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The objective of each token, (N, T) or (N, 1), and by name what is logged of it, of either shape."""

# VESPO works in log space between these, its reference implementation's bounds.
_LOWEST_LOG_WEIGHT = math.log(1e-8)
_HIGHEST_LOG_WEIGHT = 20.0
# Usual thresholds of DPPO, by divergence: a difference of probabilities, and nats.
DPPO_THRESHOLDS: Mapping[Divergence, float] = {"tv": 0.15, "kl": 0.05}
# Least probability of all other tokens together, for its logarithm; verl's value.
_LEAST_REST = 1e-8


@dataclass(frozen=True)
class LossSettings:
    """The settings of the objective; names and meaning are those of TRL's ``GRPOConfig``.

    Attributes:
        loss_type: A name of :data:`perl.algorithms.registry.LOSSES`.
        ratio_level: TRL's ``importance_sampling_level``: one ratio a token, or its geometric mean over the row (GSPO).
        delta: Dual clip: upper bound of the ratio where the advantage is negative, which the clip leaves open there;
            None: none.
        beta: Weight of the KL divergence to the reference policy.
        correct_kl: Multiply the KL estimate by the ratio, so that it is unbiased off policy.
        max_completion_length: The constant that Dr. GRPO divides by, in tokens.
        kl_estimator: Of the KL divergence; see :func:`kl_estimate`.
        entropy_weight: What the entropy of each token's distribution is multiplied by, to be taken off the objective.
        dppo_divergence: What DPPO bounds.
        dppo_threshold: By how much; None: by :data:`DPPO_THRESHOLDS`.
        cov_kl_weight: Of KL-Cov's penalty on selected tokens.
    """

    loss_type: str = "dapo"
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
    kl_estimator: KLEstimator = "k3"
    entropy_weight: float = 0.0
    dppo_divergence: Divergence = "tv"
    dppo_threshold: float | None = None
    cov_kl_weight: float = 1.0

    @classmethod
    def of(cls, args: Any) -> "LossSettings":  # noqa: ANN401 (TRL's GRPOConfig or any object with its fields)
        """The settings that a trainer's arguments hold.

        Args:
            args: TRL's ``GRPOConfig``; an ``epsilon_high`` of None stands for ``epsilon``. What it has no field for is
                as it is here by default.
        """
        values: dict[str, Any] = {
            f.name: getattr(args, name, f.default) if train_fields()[name].ours else getattr(args, name)
            for f, name in ((f, ARGUMENTS.get(f.name, f.name)) for f in dataclasses.fields(cls))
        }
        if values["epsilon_high"] is None:
            values["epsilon_high"] = args.epsilon
        if off_reward(vars(args)):
            values["beta"] = 0.0
        return cls(**values)


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
        sampling_log_probs: (N, T) float, by the engine that sampled; NaN where it has none; None: it has none at all.
        entropies: (N, T) of the policy, in nats, with gradient; None where the entropy has no weight.
        selected: (N, T) 1 for the tokens that Clip-Cov or KL-Cov treat apart; None: there are none.
    """

    policy_log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    reference_log_probs: torch.Tensor | None = None
    sampling_ratio: torch.Tensor | None = None
    keep: torch.Tensor | None = None
    sampling_log_probs: torch.Tensor | None = None
    entropies: torch.Tensor | None = None
    selected: torch.Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """The objective of every token, and what it was made of.

    Attributes:
        per_token: (N, T) or (N, 1), to be weighted and summed.
        ratio: (N, T) or (N, 1), policy over old policy, detached.
        kl: (N, T) estimate of KL(policy || reference) in nats; None where beta is 0.
        logged: What the loss logs, by quantity, (N, T) or (N, 1).
    """

    per_token: torch.Tensor
    ratio: torch.Tensor
    kl: torch.Tensor | None = None
    logged: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)


def objective(inputs: LossInputs, settings: LossSettings) -> Objective:
    """The per-token objective of any loss, KL included, before weighting.

    Args:
        inputs: Log-probs, advantages and mask of the rows.
        settings: Loss type and its constants.

    Returns:
        The objective; its sum over tokens with :func:`token_weights` is the loss.

    Raises:
        ValueError: beta is not 0, and there are no log-probs of the reference; or the entropy has a weight, and there
            are no entropies.
    """
    row = LOSSES[settings.loss_type]
    # log r_t = log p(t) - log p_old(t)
    log_ratio_NT = inputs.policy_log_probs - inputs.old_log_probs
    ratio = ratio_at(settings.ratio_level, log_ratio_NT, inputs.mask)
    per_token, logged = function_at(row.surrogate)(ratio, inputs, settings)
    if inputs.sampling_ratio is not None and not row.corrects_sampling:
        per_token = per_token * inputs.sampling_ratio
    if inputs.keep is not None:
        per_token = per_token * inputs.keep
    kl_NT = None
    if settings.beta != 0.0:
        if inputs.reference_log_probs is None:
            raise ValueError("beta is not 0, so the reference's log-probabilities are needed")
        kl_NT = kl_estimate(inputs.policy_log_probs, inputs.reference_log_probs, settings.kl_estimator)
        if settings.correct_kl:  # E_old[r k3] = E_policy[k3]
            kl_NT = kl_NT * ratio
        per_token = per_token + settings.beta * kl_NT
    if settings.entropy_weight != 0.0:
        if inputs.entropies is None:
            raise ValueError("the entropy has a weight, so entropies are needed")
        per_token = per_token - settings.entropy_weight * inputs.entropies
    return Objective(per_token, ratio.detach(), None if kl_NT is None else kl_NT.detach(), logged)


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
    # (prod_t r_t)^(1/|o|) = exp(mean_t log r_t); a row without tokens has the ratio 1
    return ((log_ratio * mask).sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1.0)).exp()


def kl_estimate(
    policy_log_probs: torch.Tensor, reference_log_probs: torch.Tensor, estimator: KLEstimator = "k3"
) -> torch.Tensor:
    """An estimate of KL(policy || reference) for each sampled token, in nats.

    Args:
        policy_log_probs: (N, T) float.
        reference_log_probs: (N, T) float.
        estimator: ``k1``: log p / p_ref, of either sign; ``k2``: half its square, biased; ``k3``: never negative, and
            like k1 the divergence on average. What is minimised is the estimate itself: on policy the gradient of k1 is
            0 on average unless it is multiplied by the ratio, that of k2 is the divergence's.

    Source: Schulman 2020, "Approximating KL Divergence"; k3: Shao et al. 2024, arXiv:2402.03300, equation 4.
    """
    difference = reference_log_probs - policy_log_probs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference**2
    return difference.exp() - difference - 1


def clipped_surrogate(ratio: torch.Tensor, inputs: LossInputs, settings: LossSettings) -> Surrogate:
    """-min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A), r bounded by ``delta`` in the first term.

    Logs where the clip takes the gradient away: below the lower bound with A < 0, above the upper one with A > 0.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; two epsilons: Yu et al. 2025 (DAPO),
        arXiv:2503.14476, equation 10; delta: dual clip, Ye et al. 2020, arXiv:1912.09729, equation 5, whose c it is (3
        there), max(min(r A, clip(r) A), c A) for A < 0; in TRL after INTELLECT-2, arXiv:2505.07291, section 3.4.
    """
    low, high, advantages = 1 - settings.epsilon_low, 1 + settings.epsilon_high, inputs.advantages
    is_low = ((ratio < low) & (advantages < 0)).float()
    is_high = ((ratio > high) & (advantages > 0)).float()
    clipped = ratio.clamp(low, high)
    if settings.delta is not None:
        ratio = ratio.clamp(max=settings.delta)
    logged = {"clip_ratio/low": is_low, "clip_ratio/high": is_high, "clip_ratio/region": torch.maximum(is_low, is_high)}
    return -torch.min(ratio * advantages, clipped * advantages), logged


def cispo_surrogate(ratio: torch.Tensor, inputs: LossInputs, settings: LossSettings) -> Surrogate:
    """-stop(min(r, epsilon_high)) A log p: the weight is clipped, no token loses its gradient.

    Source: MiniMax-M1 (CISPO), arXiv:2506.13585, equation 4.
    """
    weight = ratio.detach().clamp(max=settings.epsilon_high)
    is_clipped = (ratio > settings.epsilon_high) & (inputs.advantages > 0)
    return -weight * inputs.advantages * inputs.policy_log_probs, {"cispo_clip_ratio": is_clipped.float()}


def sapo_surrogate(ratio: torch.Tensor, inputs: LossInputs, settings: LossSettings) -> Surrogate:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the advantage's sign: a soft gate instead of a clip.

    Source: Soft Adaptive Policy Optimization, arXiv:2511.20347.
    """
    tau = torch.where(inputs.advantages > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
    # the slope at r = 1 is 4 / tau * tau * sigmoid'(0) = 1, as of r A itself
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * inputs.advantages, {}


def vespo_surrogate(_: torch.Tensor, inputs: LossInputs, settings: LossSettings) -> Surrogate:
    """-phi(w) A log p, w the importance weight of the whole completion; phi has no gradient."""
    phi_N1 = vespo_row_weights(inputs, inputs.policy_log_probs - inputs.old_log_probs, settings)
    return -phi_N1 * inputs.advantages * inputs.policy_log_probs, {"vespo/phi_seq": phi_N1}


@torch.no_grad()
def vespo_row_weights(inputs: LossInputs, log_ratio: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """phi(w) = exp(lambda) w^k exp(-lambda w) of a row's importance weight w; phi(1) = 1, no gradient.

    Returns:
        (N, 1) float.

    Source: VESPO, arXiv:2602.10693, with the clamps of its reference implementation.
    """
    bound = _HIGHEST_LOG_WEIGHT
    # log w = sum_t log r_t, and of the engine's correction where there is one
    log_weight_N1 = (log_ratio.clamp(-bound, bound) * inputs.mask).sum(dim=-1, keepdim=True)
    if inputs.sampling_ratio is not None:
        log_sampling = inputs.sampling_ratio.log().clamp(_LOWEST_LOG_WEIGHT, bound)
        log_weight_N1 = log_weight_N1 + log_sampling.sum(dim=-1, keepdim=True)
    log_weight_N1 = log_weight_N1.clamp(_LOWEST_LOG_WEIGHT, bound)
    raised = inputs.advantages >= 0
    k = torch.where(raised, settings.vespo_k_pos, settings.vespo_k_neg)
    rate = torch.where(raised, settings.vespo_lambda_pos, settings.vespo_lambda_neg).clamp(min=1e-4)
    # log phi(w) = lambda + k log w - lambda w
    return (rate + k * log_weight_N1 - rate * log_weight_N1.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def reinforce_surrogate(_: torch.Tensor, inputs: LossInputs, __: LossSettings) -> Surrogate:
    """-A log p: no ratio, so nothing corrects for an update since the rollout.

    Source: Ahmadian et al. 2024, arXiv:2402.14740, the REINFORCE estimator; the policy loss of GPG, arXiv:2504.02546.
    """
    return -inputs.advantages * inputs.policy_log_probs, {}


def dppo_surrogate(ratio: torch.Tensor, inputs: LossInputs, settings: LossSettings) -> Surrogate:
    """-M r A: M = 0 for a token whose probability has moved too far from where it was sampled, and would move on.

    Logs where M is 0.

    Source: Qi et al. 2026 (DPPO), arXiv:2602.04879, objective of equation 11, mask of equation 12, binary divergences
        of equations 13 (TV) and 14 (KL); verl truncates r at 20 besides, and takes the same gradient through log p.
    """
    with torch.no_grad():
        policy_NT, sampled_NT = inputs.policy_log_probs, inputs.old_log_probs
        if inputs.sampling_log_probs is not None:
            sampled_NT = torch.where(inputs.sampling_log_probs.isnan(), sampled_NT, inputs.sampling_log_probs)
        # towards more probability with A > 0, less with A < 0
        moves_on = (policy_NT - sampled_NT) * inputs.advantages > 0
        threshold = settings.dppo_threshold
        threshold = DPPO_THRESHOLDS[settings.dppo_divergence] if threshold is None else threshold
        masked_NT = moves_on & (binary_divergence(sampled_NT, policy_NT, settings.dppo_divergence) > threshold)
    return (-ratio * inputs.advantages).masked_fill(masked_NT, 0.0), {"dppo_masked": masked_NT.float()}


def binary_divergence(
    sampled_log_probs: torch.Tensor, policy_log_probs: torch.Tensor, kind: Divergence
) -> torch.Tensor:
    """The divergence of two policies that know two events: the sampled token, and any other.

    Args:
        sampled_log_probs: (N, T) float, q, of the policy that sampled.
        policy_log_probs: (N, T) float, p.
        kind: ``tv``: |q - p|; ``kl``: q log (q / p) + (1 - q) log ((1 - q) / (1 - p)), in nats.

    Returns:
        (N, T) float, not above the divergence over the whole vocabulary.

    Source: Qi et al. 2026, arXiv:2602.04879, equations 13 and 14.
    """
    if kind == "tv":
        return (sampled_log_probs.exp() - policy_log_probs.exp()).abs()
    # 1 - q = -expm1(log q), exact for a token that is nearly certain
    rest_q, rest_p = (-torch.expm1(values) for values in (sampled_log_probs, policy_log_probs))
    of_rest = rest_q * (rest_q.clamp(min=_LEAST_REST).log() - rest_p.clamp(min=_LEAST_REST).log())
    return sampled_log_probs.exp() * (sampled_log_probs - policy_log_probs) + of_rest


def gmpo_surrogate(_: torch.Tensor, inputs: LossInputs, settings: LossSettings) -> Surrogate:
    """-A (prod_t r_t)^(1/|o|), each log r bounded first: above where A > 0, below where A < 0.

    Logs where a bound takes the gradient away, as the clipped surrogate does.

    Source: Zhao et al. 2025 (GMPO), arXiv:2507.20673, its objective, as ``geo_mean`` in verl; the bounds of log r are
        -epsilon_low and epsilon_high. Advantages of tokens are averaged over the completion, as there.
    """
    low, high, mask_NT = -settings.epsilon_low, settings.epsilon_high, inputs.mask
    log_ratio_NT = inputs.policy_log_probs - inputs.old_log_probs
    is_low = (log_ratio_NT < low) & (inputs.advantages < 0)
    is_high = (log_ratio_NT > high) & (inputs.advantages > 0)
    bounded_NT = torch.where(is_low | is_high, log_ratio_NT.clamp(low, high), log_ratio_NT)
    tokens_N1 = mask_NT.sum(dim=-1, keepdim=True).clamp(min=1.0)
    ratio_N1 = ((bounded_NT * mask_NT).sum(dim=-1, keepdim=True) / tokens_N1).exp()
    advantages = inputs.advantages
    if advantages.size(1) > 1:
        advantages = (advantages * mask_NT).sum(dim=-1, keepdim=True) / tokens_N1
    logged = {"clip_ratio/low": is_low.float(), "clip_ratio/high": is_high.float()}
    return -ratio_N1 * advantages, {**logged, "clip_ratio/region": (is_low | is_high).float()}


@dataclass(frozen=True)
class Step:
    """What the weight of a token depends on beside its own micro-batch.

    Attributes:
        micro_batches: Micro-batches in the accumulation window of the optimizer step.
        window_tokens: Tokens in that window that count, divided by the number of processes.
        max_completion_length: In tokens.
    """

    micro_batches: float
    window_tokens: torch.Tensor | float
    max_completion_length: int


def token_weights(
    mask_NT: torch.Tensor,
    loss_type: str,
    *,
    micro_batches: float,
    window_tokens: torch.Tensor | float,
    max_completion_length: int,
) -> torch.Tensor:
    """The weight of every token in its optimizer step's loss: the loss is sum(weights * objective).

    Args:
        mask_NT: (N, T) 1 where a token counts; one micro-batch of N rows.
        loss_type: Its row says what the sum is divided by.
        micro_batches: Micro-batches in the window of one optimizer step.
        window_tokens: Tokens in the window that count, divided by the number of processes.
        max_completion_length: Dr. GRPO's constant, in tokens.

    Returns:
        (N, T) float32, 0 where the mask is 0.

    Source: the table of normalisers in TRL 1.16's ``_compute_loss``, written as weights.
    """
    step = Step(micro_batches, window_tokens, max_completion_length)
    weights_NT: torch.Tensor = function_at(LOSSES[loss_type].aggregation)(mask_NT.float(), step)
    return weights_NT


def completion_mean(mask_NT: torch.Tensor, step: Step) -> torch.Tensor:
    """1 / (M N |o|): the mean over completions of each one's mean."""
    return mask_NT * (1 / (step.micro_batches * len(mask_NT) * mask_NT.sum(dim=-1, keepdim=True).clamp(min=1.0)))


def micro_batch_mean(mask_NT: torch.Tensor, step: Step) -> torch.Tensor:
    """1 / (M tokens of the micro-batch)."""
    return mask_NT / (step.micro_batches * mask_NT.sum().clamp(min=1.0))


def constant_length(mask_NT: torch.Tensor, step: Step) -> torch.Tensor:
    """1 / (M N max_completion_length)."""
    return mask_NT / (step.micro_batches * len(mask_NT) * step.max_completion_length)


def completion_sum(mask_NT: torch.Tensor, step: Step) -> torch.Tensor:
    """1 / (M N): the mean over completions of each one's sum."""
    return mask_NT / (step.micro_batches * len(mask_NT))


def step_mean(mask_NT: torch.Tensor, step: Step) -> torch.Tensor:
    """1 / tokens of the window."""
    return mask_NT / step.window_tokens
