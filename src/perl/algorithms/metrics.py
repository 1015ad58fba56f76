"""What is logged of an optimizer step's loss, under TRL's names and with TRL's meaning.

Objective, rows -> sums for each micro-batch as TRL would have cut it -> (name, value)

TRL logs a mean for every micro-batch, over the tokens of all processes. Here the rows of a micro-batch may have gone
through the model in several passes, so sums are kept for each and reduced over processes once a step. Rows that were
left out are not in them: a metric is a mean over the rows that were trained.
"""

from collections.abc import Iterator

import torch
from accelerate import Accelerator

from perl.algorithms.losses import LossInputs, LossSettings, Objective
from perl.algorithms.registry import LOSSES

CORRECTED = "sampling/corrected_fraction"
"""Share of what was sampled whose ratio the importance correction has bounded: of tokens, or of rows."""
MUCH_CORRECTED = 0.2
# In nats: a weight beyond it counts as this one, so that its square is a number in float32.
_LARGEST_LOG_WEIGHT = 40.0


class LossMetrics:
    """Sums over the rows of an accumulation window, by micro-batch."""

    def __init__(self, micro_batches: int, settings: LossSettings, device: torch.device) -> None:
        """Starts at zero.

        Args:
            micro_batches: M, of the window.
            settings: Of the loss, whose row says what is logged; the names are the same on every process.
            device: Of the sums.
        """
        metrics = LOSSES[settings.loss_type].metrics
        self._means = {name: quantity for name, (quantity, how) in metrics.items() if how == "mean"}
        # The largest value is kept as the least of the negated ones.
        signs = {"min": 1.0, "max": -1.0}
        self._extremes = {name: (quantity, signs[how]) for name, (quantity, how) in metrics.items() if how in signs}
        of_all = ["entropy", *(["kl"] if settings.beta != 0.0 else [])]
        # name -> (M, 2) sum and count
        self._sums = {name: torch.zeros(micro_batches, 2, device=device) for name in (*of_all, *self._means)}
        # (E, M) for E extremes
        self._least = torch.full((len(self._extremes), micro_batches), torch.inf, device=device)

    @torch.no_grad()
    def add(
        self, result: Objective, inputs: LossInputs, entropies_NT: torch.Tensor, micro_batch_N: torch.Tensor
    ) -> None:
        """Adds rows.

        Args:
            result: Their objective.
            inputs: What it was computed from.
            entropies_NT: (N, T) float.
            micro_batch_N: (N,) int64, which micro-batch each belongs to.
        """
        self._add("entropy", entropies_NT, inputs.mask, micro_batch_N)
        if result.kl is not None:
            self._add("kl", result.kl, inputs.mask, micro_batch_N)
        for name, quantity in self._means.items():
            self._add(name, result.logged[quantity], inputs.mask, micro_batch_N)
        for least_M, (quantity, sign) in zip(self._least, self._extremes.values(), strict=True):
            means_N1 = result.logged[quantity]  # of rows over their tokens; of one without any it is no extreme
            if means_N1.size(1) > 1:
                tokens_N1 = inputs.mask.sum(dim=1, keepdim=True)
                means_N1 = (means_N1 * inputs.mask).sum(dim=1, keepdim=True) / tokens_N1
                means_N1 = means_N1.masked_fill(tokens_N1 == 0, sign * torch.inf)
            means_N = sign * means_N1[:, 0]
            least_M.scatter_reduce_(0, micro_batch_N, means_N.to(least_M), "amin")

    def values(self, accelerator: Accelerator) -> Iterator[tuple[str, float]]:
        """A value for each metric and micro-batch with rows, over all processes; every process must ask."""
        totals = accelerator.reduce(torch.stack(list(self._sums.values())), reduction="sum")
        for name, means in zip(self._sums, totals.tolist(), strict=True):
            yield from ((name, total / count) for total, count in means if count)
        if self._extremes:
            least = accelerator.gather(self._least.unsqueeze(0)).amin(dim=0).tolist()
            for (name, (_, sign)), values in zip(self._extremes.items(), least, strict=True):
                yield from ((name, sign * value) for value in values if value != torch.inf)

    def _add(self, name: str, values: torch.Tensor, mask_NT: torch.Tensor, micro_batch_N: torch.Tensor) -> None:
        if values.size(1) == 1:  # one number a row, as at the level of sequences
            sums, counts = values[:, 0], torch.ones_like(values[:, 0])
        else:
            sums, counts = (values * mask_NT).sum(dim=1), mask_NT.sum(dim=1)
        self._sums[name].index_add_(0, micro_batch_N, torch.stack([sums, counts], dim=1).float())


class SamplingMetrics:
    """How far the engine's numbers are from the trainer's, and how old they are, over the rows of a window."""

    def __init__(self, device: torch.device, *, corrects: bool) -> None:
        """Starts without rows; yields no metric if the run has no correction."""
        # Of |difference|, its count, of ratios, their count, of those that were bounded.
        self._sums = torch.zeros(5, device=device)
        self._extremes = torch.full((3,), -torch.inf, device=device)  # |difference|, -ratio, ratio
        self._weights = torch.zeros(3, device=device)  # w, w^2, their count
        self._ages = torch.zeros(2, device=device)  # of ages, their count
        self._oldest = torch.full((1,), -torch.inf, device=device)
        self._corrects = corrects

    @torch.no_grad()
    def add(self, old_NT: torch.Tensor, sampling_NT: torch.Tensor, ratio: torch.Tensor, mask_NT: torch.Tensor) -> None:
        """Adds rows: (N, T) log-probabilities of old and sampling policy, (N, T) or (N, 1) ratio, (N, T) mask."""
        signed_NT = ((old_NT - sampling_NT) * mask_NT).nan_to_num(nan=0.0)
        difference = signed_NT.abs()[mask_NT.bool() & ~sampling_NT.isnan()]
        of_rows = ratio.size(1) == 1
        unbounded = signed_NT.sum(dim=1, keepdim=True).exp() if of_rows else signed_NT.exp()
        bounded = ratio != unbounded
        ratios, bounded = (x.flatten() if of_rows else x[mask_NT.bool()] for x in (ratio, bounded))
        if not len(difference) or not len(ratios):
            return
        counts = [difference.new_tensor(float(len(values))) for values in (difference, ratios)]
        self._sums += torch.stack([difference.sum(), counts[0], ratios.sum(), counts[1], bounded.float().sum()])
        extremes = torch.stack([difference.max(), -ratios.min(), ratios.max()])
        self._extremes = torch.maximum(self._extremes, extremes)

    @torch.no_grad()
    def add_ages(
        self, policy_NT: torch.Tensor, sampling_NT: torch.Tensor, age_NT: torch.Tensor | None, mask_NT: torch.Tensor
    ) -> None:
        """Adds rows, as they are for the update that trains on them.

        Args:
            policy_NT: (N, T) log-probabilities of the policy that the update begins with.
            sampling_NT: (N, T) of the one that sampled; NaN: none is known.
            age_NT: (N, T) int64, optimizer steps between the two; None: it is not known.
            mask_NT: (N, T) 1 where the policy wrote a token.
        """
        log_weights = (policy_NT - sampling_NT)[mask_NT.bool() & ~sampling_NT.isnan()].float()
        weights = log_weights.clamp(max=_LARGEST_LOG_WEIGHT).exp()
        self._weights += torch.stack([weights.sum(), (weights**2).sum(), weights.new_tensor(float(len(weights)))])
        ages = mask_NT.new_empty(0) if age_NT is None else age_NT[mask_NT.bool()].float()
        if len(ages):
            self._ages += torch.stack([ages.sum(), ages.new_tensor(float(len(ages)))])
            self._oldest = torch.maximum(self._oldest, ages.max())

    def mean_difference(self, accelerator: Accelerator) -> float | None:
        """Of the log-probabilities, over all processes, in nats; None if there is no correction or no row."""
        if not self._corrects:
            return None
        total, count = accelerator.reduce(self._sums[:2], reduction="sum").tolist()
        return total / count if count else None

    def values(self, accelerator: Accelerator) -> Iterator[tuple[str, float]]:
        """A value for each metric, over all processes, if there is a correction at all."""
        if not self._corrects:
            return
        total, count, ratios, ratio_count, bounded = accelerator.reduce(self._sums, reduction="sum").tolist()
        widest, lowest, highest = accelerator.gather(self._extremes.unsqueeze(0)).amax(dim=0).tolist()
        if count and ratio_count:
            yield "sampling/sampling_logp_difference/mean", total / count
            yield "sampling/sampling_logp_difference/max", widest
            yield "sampling/importance_sampling_ratio/min", -lowest
            yield "sampling/importance_sampling_ratio/mean", ratios / ratio_count
            yield "sampling/importance_sampling_ratio/max", highest
            yield CORRECTED, bounded / ratio_count
        weight, squares, count = accelerator.reduce(self._weights, reduction="sum").tolist()
        if squares:
            # (sum w)^2 / (n sum w^2): 1 where all weigh alike, 1/n where one weighs all
            yield "sampling/effective_sample_size", weight**2 / (count * squares)
        ages, count = accelerator.reduce(self._ages, reduction="sum").tolist()
        oldest = float(accelerator.gather(self._oldest).max())
        if count:
            yield "sampling/staleness/mean", ages / count
            yield "sampling/staleness/max", oldest
