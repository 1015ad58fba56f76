"""What PPO computes with a critic: advantages and returns, the loss of its values, how well these explain the returns.

rewards of tokens, values -> advantages, returns; values, old values, returns -> loss

Pure functions of tensors. Shapes: N completions, T tokens of the longest. A mask has 1 where the policy wrote a token
that counts; tokens of a tool and padding are no states of their own: what stands before them is followed by the next
token that counts, and no discount is taken for them.
"""

from dataclasses import dataclass

import torch


def token_rewards(rewards_N: torch.Tensor, penalties_NT: torch.Tensor, mask_NT: torch.Tensor) -> torch.Tensor:
    """The reward of each token: that of its completion on the last one that counts, less a penalty on each.

    Args:
        rewards_N: (N,) float, of completions; NaN where one is missing.
        penalties_NT: (N, T) float, of tokens (beta times log p_old - log p_ref), or a single number.
        mask_NT: (N, T) 1 where a token counts.

    Returns:
        (N, T) float, 0 where the mask is; NaN on every token of a completion without a reward.
    """
    rewards_NT = rewards_N.unsqueeze(1).expand(mask_NT.shape)
    to_come_NT = mask_NT.flip(1).cumsum(dim=1).flip(1)  # tokens that count from here to the end, this one included
    is_last_NT = mask_NT.bool() & (to_come_NT == 1)
    found_NT = rewards_NT.masked_fill(~is_last_NT & ~rewards_NT.isnan(), 0.0)
    return (found_NT - penalties_NT).masked_fill(~mask_NT.bool(), 0.0)


def generalised_advantages(
    rewards_NT: torch.Tensor, values_NT: torch.Tensor, mask_NT: torch.Tensor, *, gamma: float, lambda_: float
) -> torch.Tensor:
    """Generalised advantage estimates.

    Args:
        rewards_NT: (N, T) float, of tokens.
        values_NT: (N, T) float, the critic's of the states before the tokens.
        mask_NT: (N, T) 1 where a token counts.
        gamma: Discount of a step from token to token, from 0 to 1.
        lambda_: 0 is one-step TD, 1 is Monte Carlo.

    Returns:
        (N, T), 0 where the mask is; added to the values they give the returns.

    Source: Schulman et al. 2016, arXiv:1506.02438, equations 11, 12 and 16:
        delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lambda A_{t+1}, both 0 behind the last token.
        A completion that is cut at its longest length counts as ended, as in verl and OpenRLHF.
    """
    advantages_NT = torch.zeros_like(values_NT)
    value_N, advantage_N = torch.zeros_like(values_NT[:, 0]), torch.zeros_like(values_NT[:, 0])  # of the next token
    for t in reversed(range(values_NT.size(1))):
        counts_N = mask_NT[:, t].bool()
        delta_N = rewards_NT[:, t] + gamma * value_N - values_NT[:, t]
        advantage_N = torch.where(counts_N, delta_N + gamma * lambda_ * advantage_N, advantage_N)
        value_N = torch.where(counts_N, values_NT[:, t], value_N)
        advantages_NT[:, t] = advantage_N
    return advantages_NT.masked_fill(~mask_NT.bool(), 0.0)


@dataclass(frozen=True)
class ValueLoss:
    """What a critic minimises.

    Attributes:
        per_token: (N, T) float32, finite everywhere.
        clipped: (N, T) bool, where the bound made it larger.
    """

    per_token: torch.Tensor
    clipped: torch.Tensor


def value_loss(
    values_NT: torch.Tensor, old_values_NT: torch.Tensor, returns_NT: torch.Tensor, *, clip: float | None
) -> ValueLoss:
    """Half the squared error of each value, bounded so that it gains nothing by moving far from the old value.

    Args:
        values_NT: (N, T) float, with a gradient.
        old_values_NT: (N, T) float, of the critic that the returns were made with.
        returns_NT: (N, T) float; NaN where there is none, for which the loss is 0.
        clip: How far a value may move, in units of the reward; None: as far as it likes.

    Source: half of max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), which is not in Schulman et al. 2017
        (arXiv:1707.06347) but in its code (OpenAI's baselines, ppo2), with c = 0.2.
    """
    known_NT = ~returns_NT.isnan()
    returns_NT = returns_NT.masked_fill(~known_NT, 0.0)  # before the square, whose gradient would not be finite
    squares_NT = (values_NT - returns_NT).square()
    if clip is None:
        return ValueLoss((0.5 * squares_NT).masked_fill(~known_NT, 0.0), torch.zeros_like(known_NT))
    bounded_NT = old_values_NT + (values_NT - old_values_NT).clamp(-clip, clip)
    of_bounded_NT = (bounded_NT - returns_NT).square()
    loss_NT = 0.5 * torch.maximum(squares_NT, of_bounded_NT)
    return ValueLoss(loss_NT.masked_fill(~known_NT, 0.0), (of_bounded_NT > squares_NT) & known_NT)


def moments(values_NT: torch.Tensor, returns_NT: torch.Tensor, mask_NT: torch.Tensor) -> torch.Tensor:
    """(6,) float64 sums over the tokens that count: 1, R, R^2, R - V, (R - V)^2, V; they add up over processes."""
    counts_NT = mask_NT.bool() & ~returns_NT.isnan()
    values_S, returns_S = values_NT[counts_NT].double(), returns_NT[counts_NT].double()
    errors_S = returns_S - values_S
    sums = (torch.ones_like(returns_S), returns_S, returns_S.square(), errors_S, errors_S.square(), values_S)
    return torch.stack([part.sum() for part in sums])


def explained_variance(sums_6: torch.Tensor) -> float:
    """How much of the returns' variance the values explain: 1 - Var(R - V) / Var(R).

    Args:
        sums_6: From :func:`moments`, of all processes.

    Returns:
        1: all of it; 0: no more than a constant; below 0: less than that. NaN where returns do not vary.
    """
    count, returns, squares, errors, squared_errors, _ = sums_6.tolist()
    if count == 0:
        return float("nan")
    variance = squares / count - (returns / count) ** 2
    left = squared_errors / count - (errors / count) ** 2
    return 1.0 - left / variance if variance > 1e-12 else float("nan")
