"""Advantages as loops over plain numbers, from arXiv:2402.03300 (4.1.2), 2503.20783 (3.2) and 2601.05242.

``estimated`` has the other estimators: arXiv:2402.14740, 2501.03262, 2602.02710, 2505.23585, 2504.02546, 2503.19595.
"""

import math
from collections.abc import Callable


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


def estimated(name: str, groups: list[list[float]], lengths: list[list[int]], epsilon: float) -> list[list[float]]:
    """Advantages of any estimator but ``group``; 0 for a reward that is missing, and for one that has no other."""
    everything = _scored([reward for group in groups for reward in group])
    differences = [r - _mean(_scored(group)) for group in groups for r in _scored(group)]
    live = sum(len(set(_scored(group))) > 1 for group in groups)
    formulas: dict[str, Callable[[float, int, list[float], list[int]], float]] = {
        "rloo": lambda r, i, group, _: r - _mean(_scored(group[:i] + group[i + 1 :]), r),
        "batch": lambda r, *_: (r - _mean(everything)) / (_deviation(everything) + epsilon),
        "gae": lambda r, *_: (r - _mean(everything)) / (_deviation(everything) + epsilon),  # in the log
        "group_then_batch": lambda r, _, group, __: (r - _mean(_scored(group))) / (_deviation(differences) + epsilon),
        "maxrl": lambda r, _, group, __: (r - _mean(_scored(group))) / (_mean(_scored(group)) or 1.0),
        "opo": lambda r, _, group, sizes: r - _weighted_mean(group, sizes),
        "gpg": lambda r, _, group, __: (r - _mean(_scored(group))) * len(groups) / max(live, 1),
        "pass_at_k": lambda r, i, group, _: max(r - max(_scored(group[:i] + group[i + 1 :]), default=r), 0.0),
    }
    return [
        [0.0 if math.isnan(r) else formulas[name](r, i, group, sizes) for i, r in enumerate(group)]
        for group, sizes in zip(groups, lengths, strict=True)
    ]


def penalised(
    name: str,
    groups: list[list[float]],
    divergences: list[list[float]],
    masks: list[list[int]],
    beta: float,
    epsilon: float,
) -> list[list[float]]:
    """Token by token, a row for each completion of all groups in order: REINFORCE++, with its baseline, and RLOO."""
    if name == "rloo":  # all of a completion's divergence at once, before rewards are compared
        pairs = zip(divergences, masks, strict=True)
        sums = iter([sum(k * m for k, m in zip(row, mask, strict=True)) for row, mask in pairs])
        less = [[r - beta * next(sums) for r in group] for group in groups]
        found = [a for group in estimated(name, less, [[1] * len(group) for group in less], epsilon) for a in group]
        return [[a * m for m in mask] for a, mask in zip(found, masks, strict=True)]
    rewards = [r - (_mean(_scored(group)) if name == "group_then_batch" else 0.0) for group in groups for r in group]
    returns = []
    for reward, row, mask in zip(rewards, divergences, masks, strict=True):
        to_go = [sum(k for k, m in list(zip(row, mask, strict=True))[t:] if m) for t in range(len(row))]
        returns.append([reward - beta * later for later in to_go])
    pairs = [zip(row, mask, strict=True) for row, mask in zip(returns, masks, strict=True)]
    tokens = _scored([value for row in pairs for value, m in row if m])
    mean, divisor = _mean(tokens), _deviation(tokens) + epsilon
    return [
        [(value - mean) / divisor if m and not math.isnan(value) else 0.0 for value, m in zip(row, mask, strict=True)]
        for row, mask in zip(returns, masks, strict=True)
    ]


def _mean(values: list[float], empty: float = 0.0) -> float:
    return sum(values) / len(values) if values else empty


def _weighted_mean(rewards: list[float], sizes: list[int]) -> float:
    pairs = [(r, size) for r, size in zip(rewards, sizes, strict=True) if not math.isnan(r)]
    return sum(r * size for r, size in pairs) / sum(size for _, size in pairs)


def _scored(rewards: list[float]) -> list[float]:
    return [reward for reward in rewards if not math.isnan(reward)]


def _deviation(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
