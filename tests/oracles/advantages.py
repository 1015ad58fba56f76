"""Advantages as loops over plain numbers, from arXiv:2402.03300 (4.1.2), 2503.20783 (3.2) and 2601.05242."""

import math


def group_advantages(groups: list[list[float]], scale: str, epsilon: float) -> list[list[float]]:
    """Reward minus group mean, over a standard deviation; 0 for a reward that is missing (NaN)."""
    everything = _scored([reward for group in groups for reward in group])
    result = []
    for group in groups:
        scored = _scored(group)
        mean = sum(scored) / len(scored) if scored else 0.0
        divisor = 1.0
        if scale == "group":
            divisor = _deviation(scored) + epsilon
        if scale == "batch":
            divisor = _deviation(everything) + epsilon
        result.append([0.0 if math.isnan(reward) else (reward - mean) / divisor for reward in group])
    return result


def normalized_sum_advantages(
    rewards: list[list[list[float]]], weights: list[float], epsilon: float
) -> list[list[float]]:
    """rewards[prompt][completion][function]: each function normalised within its group, their sum over the batch."""
    sums: list[list[float]] = []
    for group in rewards:
        row = [0.0] * len(group)
        for k, weight in enumerate(weights):
            column = [completion[k] for completion in group]
            for i, value in enumerate(group_advantages([column], "group", epsilon)[0]):
                row[i] += weight * value
        for i, completion in enumerate(group):
            # A function that scored others of the group but not this completion leaves it without a reward.
            partial = [k for k in range(len(weights)) if not all(math.isnan(other[k]) for other in group)]
            if all(math.isnan(reward) for reward in completion) or any(math.isnan(completion[k]) for k in partial):
                row[i] = math.nan
        sums.append(row)
    scored = _scored([value for row in sums for value in row])
    mean, divisor = sum(scored) / len(scored), _deviation(scored) + epsilon
    return [[0.0 if math.isnan(value) else (value - mean) / divisor for value in row] for row in sums]


def _scored(rewards: list[float]) -> list[float]:
    return [reward for reward in rewards if not math.isnan(reward)]


def _deviation(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
