"""Every loss type token by token on plain numbers, from the papers that define them.

PPO arXiv:1707.06347, GRPO arXiv:2402.03300, Dr. GRPO arXiv:2503.20783, DAPO arXiv:2503.14476, two-sided clipping
arXiv:2505.07291, GSPO arXiv:2507.18071, CISPO arXiv:2506.13585, SAPO arXiv:2511.20347, VESPO arXiv:2602.10693,
REINFORCE arXiv:2402.14740, DPPO arXiv:2602.04879, GMPO arXiv:2507.20673, Clip-Cov and KL-Cov arXiv:2505.22617.
"""

import math
from dataclasses import dataclass

Rows = list[list[float]]


@dataclass(frozen=True)
class Setting:
    """The constants of an objective."""

    loss_type: str
    level: str = "token"
    beta: float = 0.0
    delta: float | None = None
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    correct_kl: bool = True
    sapo: tuple[float, float] = (1.0, 1.05)  # for positive and negative advantages
    vespo: tuple[tuple[float, float], tuple[float, float]] = ((2.0, 3.0), (3.0, 2.0))  # (k, lambda), likewise
    kl: str = "k3"
    entropy: float = 0.0
    dppo: tuple[str, float] = ("tv", 0.15)
    cov_kl: float = 1.0


@dataclass(frozen=True)
class Batch:
    """A micro-batch; ``old`` is None on policy."""

    advantages: list[float]
    mask: list[list[int]]
    old: Rows | None
    reference: Rows
    sampling: Rows | None  # one number a token, or one a row
    engine: Rows | None = None  # log-probs; NaN where there is none
    entropies: Rows | None = None
    selected: list[list[int]] | None = None


def objectives(policy: Rows, batch: Batch, setting: Setting, held: Rows | None = None) -> Rows:
    """What each token is to be made small; ``held``: the policy where it counts as a constant (no gradient)."""
    held = policy if held is None else held
    result = []
    for n in range(len(batch.advantages)):
        old = held[n] if batch.old is None else batch.old[n]
        ratios = _ratios(policy[n], old, batch.mask[n], setting.level)
        row = _of_policy(policy[n], held[n], old, batch, n, setting)
        for t, log_prob in enumerate(policy[n]):
            if batch.sampling is not None and setting.loss_type != "vespo":  # which has it in its weight
                row[t] *= batch.sampling[n][t if len(batch.sampling[n]) > 1 else 0]
            if setting.entropy and batch.entropies is not None:
                row[t] -= setting.entropy * batch.entropies[n][t]
            if setting.beta:
                gap = batch.reference[n][t] - log_prob
                kl = {"k1": -gap, "k2": gap**2 / 2, "k3": math.exp(gap) - gap - 1}[setting.kl]
                row[t] += setting.beta * kl * (ratios[t] if setting.correct_kl else 1.0)
        result.append(row)
    return result


def _of_policy(
    policy: list[float], held: list[float], old: list[float], batch: Batch, n: int, setting: Setting
) -> list[float]:
    """What the advantage of a row makes of its tokens."""
    mask, advantage = batch.mask[n], batch.advantages[n]
    ratios, constants = (_ratios(p, old, mask, setting.level) for p in (policy, held))
    if setting.loss_type == "vespo":
        weight = _vespo_weight(held, old, mask, batch.sampling[n] if batch.sampling else None, advantage, setting)
        return [-weight * advantage * log_prob for log_prob in policy]
    if setting.loss_type == "gmpo":
        return [-_geometric_mean(policy, old, mask, advantage, setting) * advantage] * len(policy)
    if setting.loss_type == "dppo":
        engine = batch.engine[n] if batch.engine else [math.nan] * len(policy)
        sampled = [o if math.isnan(e) else e for o, e in zip(old, engine, strict=True)]
        masked = [m and _is_masked(p, q, advantage, setting) for p, q, m in zip(held, sampled, mask, strict=True)]
        return [0.0 if gone else -ratio * advantage for gone, ratio in zip(masked, ratios, strict=True)]
    tokens = zip(ratios, constants, policy, strict=True)
    values = [_surrogate(ratio, constant, advantage, p, setting) for ratio, constant, p in tokens]
    for t, apart in enumerate(batch.selected[n] if batch.selected else []):
        if apart and setting.loss_type == "clip_cov":
            values[t] = 0.0
        if apart and setting.loss_type == "kl_cov":
            values[t] += setting.cov_kl * abs(policy[t] - old[t])
    return values


def micro_batch_loss(
    values: Rows, mask: list[list[int]], loss_type: str, micro_batches: int, window_tokens: float, longest: int
) -> float:
    """The part of an optimizer step's loss that comes from one micro-batch."""
    sums = [sum(v for v, m in zip(row, keep, strict=True) if m) for row, keep in zip(values, mask, strict=True)]
    counts = [sum(keep) for keep in mask]
    rows = len(values)
    if loss_type in ("grpo", "sapo", "gmpo"):
        return sum(s / max(c, 1) for s, c in zip(sums, counts, strict=True)) / rows / micro_batches
    if loss_type == "bnpo":
        return sum(sums) / max(sum(counts), 1) / micro_batches
    if loss_type == "dr_grpo":
        return sum(sums) / (rows * longest) / micro_batches
    if loss_type == "luspo":
        return sum(sums) / rows / micro_batches
    return sum(sums) / window_tokens


def _ratios(policy: list[float], old: list[float], mask: list[int], level: str) -> list[float]:
    gaps = [p - o for p, o in zip(policy, old, strict=True)]
    if level == "token":
        return [math.exp(gap) for gap in gaps]
    kept = [gap for gap, m in zip(gaps, mask, strict=True) if m]
    return [math.exp(sum(kept) / max(len(kept), 1))] * len(gaps)


def _surrogate(ratio: float, constant: float, advantage: float, log_prob: float, setting: Setting) -> float:
    if setting.loss_type == "reinforce":
        return -advantage * log_prob
    if setting.loss_type == "cispo":
        return -min(constant, setting.epsilon_high) * advantage * log_prob
    if setting.loss_type == "sapo":
        tau = setting.sapo[0] if advantage > 0 else setting.sapo[1]
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
    if setting.loss_type == "kl_cov":
        return -ratio * advantage
    clipped = min(max(ratio, 1 - setting.epsilon_low), 1 + setting.epsilon_high)
    bounded = ratio if setting.delta is None else min(ratio, setting.delta)
    return -min(bounded * advantage, clipped * advantage)


def _is_masked(log_prob: float, sampled: float, advantage: float, setting: Setting) -> bool:
    """The four cases of the paper's mask; two events: the token, any other."""
    p, q = math.exp(log_prob), math.exp(sampled)
    kind, threshold = setting.dppo
    distance = abs(p - q) if kind == "tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    moves_on = (advantage > 0 and p > q) or (advantage < 0 and p < q)
    return moves_on and distance > threshold


def _geometric_mean(
    policy: list[float], old: list[float], mask: list[int], advantage: float, setting: Setting
) -> float:
    sign = 1 if advantage > 0 else -1
    logs = []
    for p, o, m in zip(policy, old, mask, strict=True):
        if m:
            clamped = min(max(p - o, -setting.epsilon_low), setting.epsilon_high)
            logs.append(sign * min(sign * (p - o), sign * clamped))
    return math.exp(sum(logs) / max(len(logs), 1))


def _vespo_weight(
    held: list[float],
    old: list[float],
    mask: list[int],
    sampling: list[float] | None,
    advantage: float,
    setting: Setting,
) -> float:
    weight = math.exp(sum(p - o for p, o, m in zip(held, old, mask, strict=True) if m))
    for ratio in sampling or []:
        weight *= ratio
    k, rate = setting.vespo[0] if advantage >= 0 else setting.vespo[1]
    return weight**k * math.exp(rate - rate * weight)
