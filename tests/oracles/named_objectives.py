"""The whole objective of every algorithm with a name, each from its paper in a few lines of float64.

rollouts of a batch -> a number to be made small, with the gradient of autograd

Nothing of the package is used: advantage, ratio, bounds, divergence, masks and mean stand here with their constants.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.oracles.covariance import covariances, selected
from tests.oracles.distillation import reverse_kl
from tests.oracles.ppo import advantages as gae

Tensor = torch.Tensor
STD_EPSILON = 1e-4  # TRL's, added to each deviation


@dataclass(frozen=True)
class Batch:
    """Rollouts of P prompts, G completions each, N = P G rows of T tokens, by K rewards; log-probs in nats.

    Attributes:
        policy: (N, T) with gradient.
        old: (N, T) of the policy that the ratio is taken against.
        reference: (N, T).
        engine: (N, T) of the engine that sampled.
        mask: (N, T) 1 where a token counts.
        truncated: (N,) bool, completions that were cut off.
        rewards: (P, G, K).
        weights: (K,) of the rewards.
        greedy: (P, G, K) rewards of the prompt's greedy completion.
        values: (N, T) of the critic, with gradient.
        old_values: (N, T) of the critic when the batch was sampled.
        logits: (N, T, V) that ``policy`` is made of, with gradient.
        teacher: (N, T, V) logits.
        longest: Tokens of the longest completion that is sampled.
        micro_batches: How many, of equally many rows.
        seed, step: Of the training.
    """

    policy: Tensor
    old: Tensor
    reference: Tensor
    engine: Tensor
    mask: Tensor
    truncated: Tensor
    rewards: Tensor
    weights: Tensor
    greedy: Tensor
    values: Tensor
    old_values: Tensor
    logits: Tensor
    teacher: Tensor
    longest: int
    micro_batches: int
    seed: int
    step: int

    @property
    def ratio(self) -> Tensor:
        """(N, T)."""
        return (self.policy - self.old).exp()

    @property
    def mean_ratio(self) -> Tensor:
        """(N, 1) geometric mean over the completion."""
        return (((self.policy - self.old) * self.mask).sum(1, keepdim=True) / self.lengths.clamp(min=1)).exp()

    @property
    def lengths(self) -> Tensor:
        """(N, 1) tokens that count."""
        return self.mask.sum(1, keepdim=True)

    @property
    def sums(self) -> Tensor:
        """(P, G) reward of each completion."""
        return (self.rewards * self.weights).sum(2)


def column(advantages_PG: Tensor) -> Tensor:
    """(N, 1)."""
    return advantages_PG.reshape(-1, 1)


def centred(rewards_PG: Tensor) -> Tensor:
    return rewards_PG - rewards_PG.mean(1, keepdim=True)


def of_group(x: Batch) -> Tensor:
    return column(centred(x.sums) / (x.sums.std(1, keepdim=True) + STD_EPSILON))


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def over_tokens(per_token: Tensor, x: Batch, mask: Tensor | None = None) -> Tensor:
    mask = x.mask if mask is None else mask
    return (per_token * mask).sum() / mask.sum()


def over_completions(per_token: Tensor, x: Batch) -> Tensor:
    return ((per_token * x.mask).sum(1, keepdim=True) / x.lengths.clamp(min=1)).mean()


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    tokens = values[mask.bool()]
    return (values - tokens.mean()) / (tokens.std() + STD_EPSILON) * mask


def grpo(x: Batch) -> Tensor:
    gap = x.reference - x.policy
    return over_completions(clipped(x.ratio, of_group(x), 0.2, 0.2) + 0.04 * (gap.exp() - gap - 1), x)


def dr_grpo(x: Batch) -> Tensor:
    per_token = clipped(x.ratio, column(centred(x.sums)), 0.2, 0.2)
    return (per_token * x.mask).sum() / (len(x.mask) * x.longest)


def dapo(x: Batch) -> Tensor:
    return over_tokens(clipped(x.ratio, of_group(x), 0.2, 0.28), x, x.mask * ~x.truncated.unsqueeze(1))


def gspo(x: Batch) -> Tensor:
    return (clipped(x.mean_ratio, of_group(x), 3e-4, 4e-4) * (x.lengths > 0)).mean()


def cispo(x: Batch) -> Tensor:
    return over_tokens(-x.ratio.detach().clamp(max=5.0) * of_group(x) * x.policy, x)


def sapo(x: Batch) -> Tensor:
    advantages = of_group(x)
    tau = torch.where(advantages > 0, 1.0, 1.05).double()
    return over_completions(-4 / tau / (1 + (-tau * (x.ratio - 1)).exp()) * advantages, x)


def reinforce(x: Batch, advantages_PG: Tensor) -> Tensor:
    return over_tokens(-column(advantages_PG) * x.policy, x)


def rloo(x: Batch) -> Tensor:
    divergence = ((x.old - x.reference) * x.mask).sum(1).view_as(x.sums)
    rewards, others = x.sums - 0.03 * divergence, x.sums.size(1) - 1
    return reinforce(x, rewards - (rewards.sum(1, keepdim=True) - rewards) / others)


def reinforce_pp(x: Batch) -> Tensor:
    divergence = (x.old - x.reference) * x.mask
    to_go = torch.stack([divergence[:, t:].sum(1) for t in range(x.mask.size(1))], dim=1)
    return over_tokens(clipped(x.ratio, whiten(column(x.sums) - 0.01 * to_go, x.mask), 0.2, 0.2), x)


def reinforce_pp_baseline(x: Batch) -> Tensor:
    advantages = centred(x.sums) / (centred(x.sums).std() + STD_EPSILON)
    per_token = clipped(x.ratio, column(advantages), 0.2, 0.2) + 1e-5 * (x.policy - x.reference) ** 2 / 2
    return over_tokens(per_token, x)


def maxrl(x: Batch) -> Tensor:
    return reinforce(x, centred(x.sums) / x.sums.mean(1, keepdim=True))


def dppo(x: Batch) -> Tensor:
    advantages, p, q = column(centred(x.sums)), x.policy.detach().exp(), x.old.exp()
    on = ((advantages > 0) & (p > q)) | ((advantages < 0) & (p < q))
    return over_tokens(-x.ratio * advantages * ~(on & ((p - q).abs() > 0.15)), x)


def opd(x: Batch) -> Tensor:
    divergence = reverse_kl(x.logits.flatten(0, 1), x.teacher.flatten(0, 1)).view_as(x.mask)
    return over_tokens(clipped(x.ratio, of_group(x), 0.2, 0.2) + divergence, x)


def ppo(x: Batch) -> Tensor:
    rewards = torch.zeros_like(x.old_values)
    for row, reward in enumerate(x.sums.flatten()):
        for place in x.mask[row].nonzero()[-1:]:
            rewards[row, place] = reward.item()
    found = torch.tensor(gae(rewards.tolist(), x.old_values.tolist(), x.mask.tolist(), 1.0, 0.95)).double()
    of_policy = over_tokens(clipped(x.ratio, whiten(found, x.mask), 0.2, 0.2), x)
    near = x.old_values + (x.values - x.old_values).clamp(-0.2, 0.2)
    errors = [(values - found - x.old_values) ** 2 for values in (x.values, near)]
    return of_policy + over_tokens(torch.maximum(*errors) / 2, x)


def bnpo(x: Batch) -> Tensor:
    per_token = clipped(x.ratio, of_group(x), 0.2, 0.2) * x.mask
    parts = zip(per_token.chunk(x.micro_batches), x.mask.chunk(x.micro_batches), strict=True)
    return sum((values.sum() / mask.sum() for values, mask in parts), torch.zeros(())) / x.micro_batches


def luspo(x: Batch) -> Tensor:
    return (clipped(x.mean_ratio, of_group(x), 2e-3, 2.5e-3) * x.lengths).mean()


def vespo(x: Batch) -> Tensor:
    advantages = of_group(x)
    w = ((x.policy.detach() - x.old) * x.mask).sum(1, keepdim=True).exp()
    phi = torch.where(advantages >= 0, w**2 * (3 * (1 - w)).exp(), w**3 * (2 * (1 - w)).exp())
    return over_tokens(-phi * advantages * x.policy, x)


def lite_ppo(x: Batch) -> Tensor:
    return over_tokens(clipped(x.ratio, column(centred(x.sums) / (x.sums.std() + STD_EPSILON)), 0.2, 0.2), x)


def gdpo(x: Batch) -> Tensor:
    each = (x.rewards - x.rewards.mean(1, keepdim=True)) / (x.rewards.std(1, keepdim=True) + STD_EPSILON)
    sums = (each * x.weights).sum(2)
    advantages = (sums - sums.mean()) / (sums.std() + STD_EPSILON)
    differ = (x.rewards.std(1) > 0).any(1, keepdim=True)  # else there is no signal
    return over_completions(clipped(x.ratio, column(advantages * differ), 0.2, 0.2), x)


def icepop(x: Batch) -> Tensor:
    apart = (x.old - x.engine).exp()
    kept = apart * ((apart >= 0.5) & (apart <= 5.0))
    return over_completions(clipped(x.ratio, of_group(x), 0.2, 0.2) * kept, x)


def gmpo(x: Batch) -> Tensor:
    advantages, gap = of_group(x), x.policy - x.old
    bounded = torch.where(advantages > 0, gap.clamp(max=0.4), gap.clamp(min=-0.4))
    ratio = ((bounded * x.mask).sum(1, keepdim=True) / x.lengths.clamp(min=1)).exp()
    return (-ratio * advantages * (x.lengths > 0)).mean()


def apart(x: Batch, advantages: Tensor, **settings: Any) -> Tensor:
    found = covariances(x.old.tolist(), advantages.expand(x.mask.shape).tolist(), x.mask.tolist())
    chosen = torch.zeros_like(x.mask, dtype=torch.bool)
    for token in selected(found, settings, x.seed, x.step):
        chosen[token] = True
    return chosen


def clip_cov(x: Batch) -> Tensor:
    advantages = of_group(x)
    gone = apart(x, advantages, loss_type="clip_cov", cov_fraction=2e-4, cov_low=1.0, cov_high=5.0)
    return over_tokens(clipped(x.ratio, advantages, 1.0, 1.0) * ~gone, x)


def kl_cov(x: Batch) -> Tensor:
    advantages = of_group(x)
    held = apart(x, advantages, loss_type="kl_cov", cov_fraction=2e-3)
    return over_tokens(-x.ratio * advantages + (x.policy - x.old).abs() * held, x)


def opo(x: Batch) -> Tensor:
    lengths = x.lengths.view_as(x.sums)
    return reinforce(x, x.sums - (lengths * x.sums).sum(1, keepdim=True) / lengths.sum(1, keepdim=True))


def gpg(x: Batch) -> Tensor:
    live = (x.sums.amax(1) > x.sums.amin(1)).sum()
    return reinforce(x, centred(x.sums) * len(x.sums) / live)


def remax(x: Batch) -> Tensor:
    return reinforce(x, x.sums - (x.greedy * x.weights).sum(2))


def pass_at_k(x: Batch) -> Tensor:
    best, second = x.sums.sort(dim=1, descending=True).values[:, :2].T.unsqueeze(2)
    return reinforce(x, (best - second) * (x.sums == best))


NAMED: dict[str, Callable[[Batch], Tensor]] = {
    function.__name__: function
    for function in (
        *(grpo, dr_grpo, dapo, gspo, cispo, sapo, rloo, reinforce_pp, reinforce_pp_baseline, maxrl, dppo, opd, ppo),
        *(bnpo, luspo, vespo, lite_ppo, gdpo, icepop, gmpo, clip_cov, kl_cov, opo, gpg, remax, pass_at_k),
    )
}
