"""Rewards compared with the rest of their group.

rewards -> advantages

Pure functions of tensors. Shapes: P prompts, G completions of a prompt (a group), K reward functions. NaN marks a
completion that could not be scored.
"""

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
    normalized_PGK = torch.stack([_keep_nan(group_advantages(c, epsilon=epsilon), c) for c in columns_KPG], dim=-1)
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


def _keep_nan(values: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
    return values.masked_fill(template.isnan(), torch.nan)
