"""Clip-Cov and KL-Cov: a few tokens of a batch, by the covariance of log p and A, and what is done to them.

log-probs of the old policy, advantages -> covariance of each token -> selected tokens -> objective

Pure functions of tensors. Shapes: N completions of this process, T tokens of the longest. Statistics and the choice are
over all processes, which the functions reach by ``total`` and ``gather`` alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy
import torch

from perl.algorithms.losses import LossInputs, LossSettings, Surrogate, clipped_surrogate

Draw = Callable[[], torch.Tensor]
"""(N, T) numbers from 0 to 1, one for each token."""
_COLUMNS = 2**32
"""More than a completion has tokens: the place of a token in the batch is row * this + column."""


@dataclass(frozen=True)
class CovarianceSettings:
    """Which tokens are selected.

    Attributes:
        fraction: Of the tokens of the batch, above 0, at most 1.
        low: Clip-Cov draws among tokens whose covariance is above this.
        high: And below this.
    """

    fraction: float = 2e-4
    low: float = 1.0
    high: float = 5.0

    def count(self, tokens: int) -> int:
        """How many of so many tokens are selected at most: the fraction, rounded down, but one at least."""
        return max(1, int(self.fraction * tokens))


def covariances(
    log_probs_NT: torch.Tensor,
    advantages: torch.Tensor,
    mask_NT: torch.Tensor,
    total: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums,
) -> tuple[torch.Tensor, int]:
    """What each token adds to the covariance of log-probability and advantage over the batch.

    Args:
        log_probs_NT: (N, T) float, of the policy that the batch was sampled from.
        advantages: (N, 1) or (N, T) float.
        mask_NT: (N, T) 1 where a token counts.
        total: Adds up (3,) sums over all processes.

    Returns:
        (N, T) float64, 0 where the mask is; and how many tokens of all processes count.

    Source: Cui et al. 2025, arXiv:2505.22617, section 4.2: (log p_t - mean log p) (A_t - mean A), means over the tokens
        of the batch of rollouts. Verl, the authors' code, takes those of a micro-batch.
    """
    counts_NT = mask_NT.bool()
    pairs = [
        values.double().expand(mask_NT.shape).masked_fill(~counts_NT, 0.0) for values in (log_probs_NT, advantages)
    ]
    sums = total(torch.stack([*(values.sum() for values in pairs), counts_NT.sum().double()]))
    tokens = sums[2].clamp(min=1.0)
    centred = [values - added / tokens for values, added in zip(pairs, sums[:2], strict=True)]
    return (centred[0] * centred[1]).masked_fill(~counts_NT, 0.0), int(sums[2].item())


def drawn_within_bounds(covariances_NT: torch.Tensor, draw: Draw, settings: CovarianceSettings) -> torch.Tensor:
    """(N, T) rank of each token for Clip-Cov: a random number within the bounds, else -inf.

    Source: Cui et al. 2025, arXiv:2505.22617, section 4.2, Clip-Cov: r N tokens, uniformly among those in the bounds.
    """
    within_NT = (covariances_NT > settings.low) & (covariances_NT < settings.high)
    return draw().to(covariances_NT).masked_fill(~within_NT, -torch.inf)


def by_covariance(covariances_NT: torch.Tensor, _: Draw, __: CovarianceSettings) -> torch.Tensor:
    """(N, T) rank of each token for KL-Cov: its covariance.

    Source: Cui et al. 2025, arXiv:2505.22617, section 4.2, KL-Cov: the k N tokens of the largest covariance.
    """
    return covariances_NT


def drawn(shape: torch.Size, first: int, seed: int, step: int) -> torch.Tensor:
    """Numbers of tokens that depend on nothing but seed, step, row and column.

    So they are the same however rows are divided over processes and whatever a completion is padded to.

    Args:
        shape: (N, T).
        first: Place of the first row in the batch of all processes.
        seed: Of the run, 0 or more.
        step: Optimizer steps taken.

    Returns:
        (N, T) float64, from 0 to 1, on the CPU.
    """
    rows, columns = shape
    numbers = [numpy.random.default_rng([seed, step, first + row]).random(columns) for row in range(rows)]
    return torch.from_numpy(numpy.stack(numbers)) if numbers else torch.zeros(shape, dtype=torch.float64)


def highest(
    ranks_NT: torch.Tensor,
    count: int,
    first: int = 0,
    gather: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
) -> torch.Tensor:
    """The tokens of the highest ranks in the batch of all processes.

    Args:
        ranks_NT: (N, T) float64; -inf where a token is not to be chosen.
        count: How many are chosen at most.
        first: Place of the first row in the batch of all processes.
        gather: Puts (count,) values of all processes one after the other, in the order of their rows.

    Returns:
        (N, T) bool. Of equal ranks the first in the batch comes first.
    """
    device = ranks_NT.device
    rows_N1 = torch.arange(first, first + ranks_NT.size(0), device=device).unsqueeze(1)
    places_NT = rows_N1 * _COLUMNS + torch.arange(ranks_NT.size(1), device=device)
    best, order = ranks_NT.flatten().sort(descending=True, stable=True)
    missing = max(count - len(best), 0)
    best = torch.nn.functional.pad(best[:count], (0, missing), value=-torch.inf)
    places = torch.nn.functional.pad(places_NT.flatten()[order][:count], (0, missing), value=-1)
    best, places = gather(best), gather(places)
    best, order = best.sort(descending=True, stable=True)
    return torch.isin(places_NT, places[order][:count][best[:count] > -torch.inf])


def clip_cov_surrogate(ratio: torch.Tensor, inputs: LossInputs, settings: LossSettings) -> Surrogate:
    """The clipped surrogate, 0 for selected tokens: they have no gradient.

    Source: Cui et al. 2025, arXiv:2505.22617, section 4.2, Clip-Cov, with the clip of the authors' code.
    """
    per_token_NT, logged = clipped_surrogate(ratio, inputs, settings)
    if inputs.selected is not None:
        per_token_NT = per_token_NT.masked_fill(inputs.selected.bool(), 0.0)
    return per_token_NT, logged


def kl_cov_surrogate(ratio: torch.Tensor, inputs: LossInputs, settings: LossSettings) -> Surrogate:
    """-r A, and for selected tokens the weight times abs(log r) besides.

    Where the policy is the old one the penalty is 0 and so is its gradient (sign(0) = 0): as of the divergence
    KL(p_old || p) that it stands for, whose least value is there. It holds tokens back from the second update on.

    Source: Cui et al. 2025, arXiv:2505.22617, section 4.2, KL-Cov; abs(log r) as divergence: the authors' code (verl).
    """
    per_token_NT = -ratio * inputs.advantages
    if inputs.selected is not None:
        moved_NT = (inputs.policy_log_probs - inputs.old_log_probs).abs()
        per_token_NT = per_token_NT + settings.cov_kl_weight * moved_NT * inputs.selected
    return per_token_NT, {}
