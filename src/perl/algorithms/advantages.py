"""Rewards compared with the rest of their group: GRPO's advantage, and the estimators beside it.

rewards, lengths -> advantages

Pure functions of tensors; ``estimators.py`` has a row for each. Shapes: P prompts, G completions of a prompt (a group),
K reward functions. NaN marks a completion that could not be scored: it is left out of every statistic, and its
advantage is 0. Rewards are those of all processes, and so are the statistics.
"""

from collections.abc import Callable
from typing import Literal

import torch

Scale = Literal["group", "batch", "none"]

# Added to the standard deviation, in reward units; TRL's value.
STD_EPSILON = 1e-4


def weighted_rewards(rewards_PGK: torch.Tensor, weights_K: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the rewards of all functions.

    A function that scored no completion of a group does not apply to that prompt and is left out of its sums. One that
    scored some of them but not this one leaves it without a reward: without its term the sum would stand beside the
    others' as if it had been 0.

    Args:
        rewards_PGK: (P, G, K) float; NaN where a function did not score a completion.
        weights_K: (K,) float.

    Returns:
        (P, G) float32; NaN where a function is missing that scored others of the group, and where none applies.

    Source: TRL 1.16 sums what there is (``nansum``), so that a completion which could not be judged may get the largest
        advantage of its group. We differ where a function scored a part of a group.
    """
    lost_PG = partly_scored(rewards_PGK).any(dim=2) | rewards_PGK.isnan().all(dim=2)
    return (rewards_PGK * weights_K.to(rewards_PGK.device)).nansum(dim=2).masked_fill(lost_PG, torch.nan)


def partly_scored(rewards_PGK: torch.Tensor) -> torch.Tensor:
    """Where a function did not score a completion although it scored others of the group.

    Args:
        rewards_PGK: (P, G, K) float; NaN where a function did not score a completion.

    Returns:
        (P, G, K) bool.
    """
    missing_PGK = rewards_PGK.isnan()
    return missing_PGK & ~missing_PGK.all(dim=1, keepdim=True)


def group_advantages(rewards_PG: torch.Tensor, *, scale: Scale = "group", epsilon: float = STD_EPSILON) -> torch.Tensor:
    """Reward minus the group's mean, divided by a standard deviation (GRPO).

    Args:
        rewards_PG: (P, G) float; NaN is left out of mean and deviation.
        scale: ``group``: divide by the group's own standard deviation (unbiased); ``batch``: by that of all rewards;
            ``none``: do not divide (Dr. GRPO).
        epsilon: Added to the standard deviation, in reward units.

    Returns:
        (P, G) float32. Exactly 0 for every member of a group whose rewards agree, and for NaN.

    Raises:
        ValueError: ``scale`` is another word.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2; without division: Liu et al. 2025, arXiv:2503.20783,
        section 3.2. We differ from TRL 1.16 in groups that agree on a reward that is no dyadic number (0.7): there
        the rounding of the mean, divided by epsilon, gives TRL advantages of up to 2e-3 out of nothing.
    """
    rewards_PG = rewards_PG.float()
    # A = r - mean(r), divided by std(r) + epsilon
    centred_PG = rewards_PG - rewards_PG.nanmean(dim=1, keepdim=True)
    if scale == "group":
        centred_PG = centred_PG / (nan_std(rewards_PG).unsqueeze(1) + epsilon)
    elif scale == "batch":
        centred_PG = centred_PG / (nan_std(rewards_PG.reshape(1, -1)) + epsilon)
    elif scale != "none":
        raise ValueError(f"scale must be group, batch or none, not {scale!r}")
    # exactly 0 where there is no signal: rounding of the mean is not one
    return centred_PG.masked_fill(agreeing_groups(rewards_PG).unsqueeze(1), 0.0).nan_to_num(nan=0.0)


def normalized_sum_advantages(
    rewards_PGK: torch.Tensor, weights_K: torch.Tensor, *, epsilon: float = STD_EPSILON
) -> torch.Tensor:
    """Each reward function normalised within its group first, then summed and normalised over the batch (GDPO).

    Args:
        rewards_PGK: (P, G, K) float; NaN where a function did not apply.
        weights_K: (K,) float.
        epsilon: Added to each standard deviation.

    Returns:
        (P, G) float32; 0 for a completion without a reward, and in a group whose rewards agree, function by function.

    Source: GDPO, arXiv:2601.05242, as in TRL's ``multi_objective_aggregation="normalize_then_sum"``.
    """
    columns_KPG = rewards_PGK.permute(2, 0, 1)
    columns = [group_advantages(c, epsilon=epsilon).masked_fill(c.isnan(), torch.nan) for c in columns_KPG]
    normalized_PGK = torch.stack(columns, dim=-1)
    summed_PG = weighted_rewards(normalized_PGK, weights_K)
    centred_PG = (summed_PG - summed_PG.nanmean()) / (nan_std(summed_PG.reshape(1, -1)) + epsilon)
    flat_P = torch.stack([agreeing_groups(column_PG) for column_PG in columns_KPG]).all(dim=0)
    return centred_PG.masked_fill(flat_P.unsqueeze(1), 0.0).nan_to_num(nan=0.0)


def agreeing_groups(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Groups without a signal: all of their scored rewards are the same number, or none is scored.

    Args:
        rewards_PG: (P, G) float, NaN where not scored.

    Returns:
        (P,) bool.
    """
    highest_P = rewards_PG.nan_to_num(nan=-torch.inf).amax(dim=1)
    lowest_P = rewards_PG.nan_to_num(nan=torch.inf).amin(dim=1)
    return highest_P <= lowest_P


def nan_std(values_PG: torch.Tensor) -> torch.Tensor:
    """Unbiased standard deviation of each row without its NaN.

    Args:
        values_PG: (P, G) float.

    Returns:
        (P,) float; 0 for a row with one value, NaN for a row with none.
    """
    # sqrt(sum (x - mean)^2 / (n - 1)) over what is there
    count_P = (~values_PG.isnan()).sum(dim=1)
    squares_P = (values_PG - values_PG.nanmean(dim=1, keepdim=True)).pow(2).nansum(dim=1)
    std_P = (squares_P / (count_P - 1).clamp(min=1)).sqrt()
    return std_P.masked_fill(count_P == 0, torch.nan)


def leave_one_out_advantages(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Reward minus the mean reward of the group's other completions (RLOO).

    Args:
        rewards_PG: (P, G) float, G at least 2; NaN is left out.

    Returns:
        (P, G) float32. Exactly 0 where a group's rewards agree, and for the only scored completion of a group.

    Raises:
        ValueError: There are no other completions.

    Source: Ahmadian et al. 2024, arXiv:2402.14740, the RLOO estimator:
        r_i - 1 / (k - 1) sum_{j != i} r_j. Where a reward is missing, k counts those there are. In the paper, and with
        a KL penalty of rewards, r is less beta log (p / p_ref) of the completion (its equation 3).
    """
    if rewards_PG.size(1) < 2:
        raise ValueError("rloo compares a completion with the others of its group, which has only this one")
    rewards_PG = rewards_PG.float()
    count_P1 = (~rewards_PG.isnan()).sum(dim=1, keepdim=True)
    # r_i - (sum - r_i) / (n - 1) = n / (n - 1) (r_i - mean)
    factor_P1 = count_P1 / (count_P1 - 1).clamp(min=1)
    return _zero_where_flat(factor_P1 * _centred(rewards_PG), rewards_PG)


def batch_advantages(rewards_PG: torch.Tensor, *, epsilon: float = STD_EPSILON) -> torch.Tensor:
    """Reward minus the batch's mean, over the batch's standard deviation (REINFORCE++).

    Args:
        rewards_PG: (P, G) float, G at least 1; NaN is left out.
        epsilon: Added to the standard deviation, in reward units.

    Returns:
        (P, G) float32. Exactly 0 where all rewards of the batch agree; a group that agrees has a signal beside others.

    Source: Hu et al. 2025, arXiv:2501.03262, the global advantage normalisation. We differ from verl and OpenRLHF,
        which weigh each completion by its tokens in mean and deviation; the deviation is unbiased, as GRPO's here.
    """
    rewards_PG = rewards_PG.float()
    row_1N = rewards_PG.reshape(1, -1)
    scaled_1N = _centred(row_1N) / (nan_std(row_1N).unsqueeze(1) + epsilon)
    return _zero_where_flat(scaled_1N, row_1N).view_as(rewards_PG)


def group_then_batch_advantages(rewards_PG: torch.Tensor, *, epsilon: float = STD_EPSILON) -> torch.Tensor:
    """Reward minus the group's mean, over the standard deviation of these differences in the batch.

    Args:
        rewards_PG: (P, G) float; NaN is left out.
        epsilon: Added to the standard deviation, in reward units.

    Returns:
        (P, G) float32. Exactly 0 where a group's rewards agree; such groups count in the deviation.

    Source: Hu et al. 2025, arXiv:2501.03262, REINFORCE++ with baseline. We differ from verl and OpenRLHF, which weigh
        each completion by its tokens.
    """
    rewards_PG = rewards_PG.float()
    missing_PG = rewards_PG.isnan()
    centred_PG = _zero_where_flat(_centred(rewards_PG), rewards_PG)
    deviation_1 = nan_std(centred_PG.masked_fill(missing_PG, torch.nan).reshape(1, -1))
    return (centred_PG / (deviation_1 + epsilon)).nan_to_num(nan=0.0)


def rewards_alone(rewards_PG: torch.Tensor) -> torch.Tensor:
    """(P, G) float32: the rewards, from which a KL penalty is taken off before they are compared; NaN stays."""
    return rewards_PG.float()


def group_differences(rewards_PG: torch.Tensor) -> torch.Tensor:
    """(P, G) float32: rewards minus their group's mean, exactly 0 where a group agrees; NaN stays."""
    rewards_PG = rewards_PG.float()
    return _zero_where_flat(_centred(rewards_PG), rewards_PG).masked_fill(rewards_PG.isnan(), torch.nan)


def penalised_returns(
    rewards_N: torch.Tensor, divergences_NT: torch.Tensor, mask_NT: torch.Tensor, beta: float
) -> torch.Tensor:
    """What a token is still followed by: the reward of its completion, less the divergence from here to the end.

    Args:
        rewards_N: (N,) float, or a difference of them.
        divergences_NT: (N, T) float, log p_old - log p_ref of each token, in nats.
        mask_NT: (N, T) 1 where the policy wrote a token that counts.
        beta: Weight of the divergence.

    Returns:
        (N, T) float32; NaN in rows whose reward is.

    Source: Hu et al. 2025, arXiv:2501.03262, the token-level KL penalty, undiscounted:
        G_t = r - beta sum_{s >= t} log (p_old / p_ref)(s).
    """
    to_go_NT = (divergences_NT.float() * mask_NT).flip(1).cumsum(dim=1).flip(1)
    return rewards_N.float().unsqueeze(1) - beta * to_go_NT


def whitened(
    values_NT: torch.Tensor,
    mask_NT: torch.Tensor,
    total: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums,
    *,
    epsilon: float = STD_EPSILON,
) -> torch.Tensor:
    """Minus the mean, over the standard deviation, both over the tokens of the batch.

    Args:
        values_NT: (N, T) float; rows of NaN are left out.
        mask_NT: (N, T) 1 where a token counts.
        total: Adds up (2,) sums over all processes.
        epsilon: Added to the unbiased standard deviation.

    Returns:
        (N, T) float32, 0 where the mask is and in rows that are left out.

    Source: Hu et al. 2025, arXiv:2501.03262, the global advantage normalisation, over tokens as in verl and OpenRLHF.
    """
    counts_NT = mask_NT.bool() & ~values_NT.isnan()
    known_NT = values_NT.float().masked_fill(~counts_NT, 0.0)
    added, count = total(torch.stack([known_NT.sum(), counts_NT.sum().float()]))
    centred_NT = (known_NT - added / count.clamp(min=1)).masked_fill(~counts_NT, 0.0)
    squares, _ = total(torch.stack([centred_NT.pow(2).sum(), count]))
    return centred_NT / ((squares / (count - 1).clamp(min=1)).sqrt() + epsilon)


def left_out(values_NT: torch.Tensor, mask_NT: torch.Tensor) -> torch.Tensor:
    """(N, T) float32: the values, 0 where the mask is and in rows of NaN."""
    return (values_NT.float() * mask_NT).nan_to_num(nan=0.0)


def maximum_likelihood_advantages(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Reward minus the group's mean, over that mean (MaxRL): rare successes weigh as one over their rate.

    Args:
        rewards_PG: (P, G) float, not negative; NaN is left out.

    Returns:
        (P, G) float32. Exactly 0 where a group's rewards agree, and so where its mean is 0.

    Raises:
        ValueError: A reward is negative, so that the mean says nothing of a rate of success.

    Source: Tajwar et al. 2026, arXiv:2602.02710, its estimator, as in prime-rl's ``max_rl``.
    """
    rewards_PG = rewards_PG.float()
    if bool((rewards_PG < 0).any()):
        raise ValueError("maxrl divides by the mean of a group's rewards, and one of them is negative")
    mean_P1 = rewards_PG.nanmean(dim=1, keepdim=True)
    return _zero_where_flat(_centred(rewards_PG) / mean_P1, rewards_PG)


def optimal_baseline_advantages(rewards_PG: torch.Tensor, lengths_PG: torch.Tensor) -> torch.Tensor:
    """Reward minus the group's mean weighted by length (OPO).

    Args:
        rewards_PG: (P, G) float; NaN is left out.
        lengths_PG: (P, G) tokens of each completion that are in the loss.

    Returns:
        (P, G) float32. Exactly 0 where a group's rewards agree.

    Source: Hao et al. 2025, arXiv:2505.23585, the simplified optimal baseline sum(l r) / sum(l), for which the squared
        norm of a completion's gradient is taken to grow with its length. A group without a token has the plain mean.
    """
    rewards_PG = rewards_PG.float()
    scored_PG = (~rewards_PG.isnan()).float()
    weights_PG = lengths_PG * scored_PG
    weights_PG = torch.where(weights_PG.sum(dim=1, keepdim=True) > 0, weights_PG, scored_PG)
    # b = sum_i l_i r_i / sum_i l_i
    baseline_P1 = (weights_PG * rewards_PG).nansum(dim=1, keepdim=True) / weights_PG.sum(dim=1, keepdim=True)
    return _zero_where_flat(rewards_PG - baseline_P1, rewards_PG)


def live_share_advantages(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Reward minus the group's mean, times groups over groups with a signal (GPG).

    Args:
        rewards_PG: (P, G) float; NaN is left out.

    Returns:
        (P, G) float32. Exactly 0 where a group's rewards agree, which the others make up for.

    Source: Chu et al. 2025, arXiv:2504.02546, alpha of the objective, as ``inverse_alpha`` in AMAP-ML/GPG, which
        samples groups anew besides. verl counts rewards that are not 0 instead of groups with a signal.
    """
    rewards_PG = rewards_PG.float()
    live = (~agreeing_groups(rewards_PG)).sum().clamp(min=1)
    return _zero_where_flat(_centred(rewards_PG) * (len(rewards_PG) / live), rewards_PG)


def best_of_group_advantages(rewards_PG: torch.Tensor) -> torch.Tensor:
    """The lead of a group's best completion over its second best; 0 for every other completion (pass@k).

    Args:
        rewards_PG: (P, G) float, G at least 2; NaN is left out.

    Returns:
        (P, G) float32. Exactly 0 in a group whose best two rewards agree, or that has fewer than two.

    Raises:
        ValueError: There is no second best.

    Source: Tang et al. 2025, arXiv:2503.19595, as ``compute_grpo_passk_outcome_advantage`` in verl, without its
        division by the group's deviation.
    """
    if rewards_PG.size(1) < 2:
        raise ValueError("pass_at_k compares the best completion of a group with the second best, and it has only one")
    known_PG = rewards_PG.float().nan_to_num(nan=-torch.inf)
    best_P2, places_P2 = known_PG.topk(2, dim=1)
    lead_P1 = (best_P2[:, :1] - best_P2[:, 1:]).masked_fill(best_P2[:, 1:] == -torch.inf, 0.0)
    return torch.zeros_like(known_PG).scatter(1, places_P2[:, :1], lead_P1)


def _centred(rewards_PG: torch.Tensor) -> torch.Tensor:
    return rewards_PG - rewards_PG.nanmean(dim=1, keepdim=True)


def _zero_where_flat(values_PG: torch.Tensor, rewards_PG: torch.Tensor) -> torch.Tensor:
    """Exactly 0 where rewards agree or are missing: the rounding of a mean is no signal."""
    return values_PG.masked_fill(agreeing_groups(rewards_PG).unsqueeze(1), 0.0).nan_to_num(nan=0.0)


def greedy_baseline_advantages(rewards_PG: torch.Tensor, *, greedy_PG: torch.Tensor) -> torch.Tensor:
    """Reward minus that of the prompt's greedy completion, which takes the likeliest token each time (ReMax).

    Args:
        rewards_PG: (P, G) float, G at least 1; NaN is left out.
        greedy_PG: (P, G) float, the greedy completion's reward for each completion of its prompt; NaN without one.

    Returns:
        (P, G) float32. A group whose rewards agree has a signal where the greedy completion's differs.

    Source: Li et al. 2023, arXiv:2310.10505, algorithm 1: r(x, a) - r(x, greedy a).
    """
    return (rewards_PG.float() - greedy_PG.float()).nan_to_num(nan=0.0)
