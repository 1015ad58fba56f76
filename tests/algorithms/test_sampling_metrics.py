"""How far the engine is from the trainer, and how much the importance correction has bounded, against loops."""

import itertools
import math
from typing import get_args

import pytest
import torch
from accelerate import Accelerator

from perl.algorithms.importance import CorrectionMode, SamplingCorrection, sampling_ratio
from perl.algorithms.metrics import CORRECTED, SamplingMetrics

OLD = torch.tensor([[-1.0, -1.0, -1.0, 0.0], [-1.0, -1.0, 0.0, 0.0]])
SAMPLING = torch.tensor([[-1.0, -2.5, -0.9, 0.0], [-1.0, float("nan"), 5.0, 0.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


def logged(mode, low=None, high=3.0):
    correction = SamplingCorrection(mode, low, high)
    metrics = SamplingMetrics(torch.device("cpu"), corrects=True)
    metrics.add(OLD, SAMPLING, sampling_ratio(OLD, SAMPLING, MASK, correction), MASK)
    return dict(metrics.values(Accelerator(cpu=True)))


@pytest.mark.parametrize("mode", get_args(CorrectionMode))
def test_all_that_is_logged_of_the_engine_is_that_of_a_loop(mode):
    differences, of_tokens, of_rows = [], [], []
    for old, sampling, mask in zip(OLD.tolist(), SAMPLING.tolist(), MASK.tolist(), strict=True):
        gaps = [o - s if not math.isnan(s) else None for o, s, m in zip(old, sampling, mask, strict=True) if m]
        differences += [abs(gap) for gap in gaps if gap is not None]
        of_tokens += [math.exp(gap or 0.0) for gap in gaps]
        of_rows.append(math.exp(sum(gap or 0.0 for gap in gaps)))
    exact = of_rows if mode.startswith("sequence") else of_tokens
    low, high = 0.95, 2.0
    clamped = [min(max(ratio, low), high) for ratio in exact]
    kept = [ratio if low <= ratio <= high else 0.0 for ratio in exact]
    ratios = clamped if mode.endswith("truncate") else kept
    expected = {
        "sampling/sampling_logp_difference/mean": sum(differences) / len(differences),
        "sampling/sampling_logp_difference/max": max(differences),
        "sampling/importance_sampling_ratio/min": min(ratios),
        "sampling/importance_sampling_ratio/mean": sum(ratios) / len(ratios),
        "sampling/importance_sampling_ratio/max": max(ratios),
        CORRECTED: sum(a != b for a, b in zip(ratios, exact, strict=True)) / len(exact),
    }
    assert logged(mode, low, high) == pytest.approx(expected, rel=1e-6)
    assert SamplingMetrics(torch.device("cpu"), corrects=False).mean_difference(Accelerator(cpu=True)) is None


def test_the_mean_difference_is_over_the_tokens_of_all_rows_that_were_added():
    """Added at once or one by one; a token without a number of the engine's is left out."""
    metrics = SamplingMetrics(torch.device("cpu"), corrects=True)
    assert metrics.mean_difference(Accelerator(cpu=True)) is None
    for n in range(2):
        metrics.add(OLD[n : n + 1], SAMPLING[n : n + 1], torch.ones(1, 4), MASK[n : n + 1])
    assert metrics.mean_difference(Accelerator(cpu=True)) == pytest.approx((0.0 + 1.5 + 0.1 + 0.0) / 4, rel=1e-6)


POLICY = torch.tensor([[-1.2, -2.0, -0.9, 7.0], [-0.5, -1.0, 0.0, 0.0]])
AGE = torch.tensor([[0, 1, 1, 9], [3, 2, 9, 9]])


@pytest.mark.parametrize("parts", [[0, 2], [0, 1, 2]], ids=["at once", "row by row"])
def test_the_effective_sample_size_and_the_ages_are_those_of_a_loop(parts):
    """Over the tokens that the policy wrote; one without a number of the engine's has an age and no weight."""
    metrics = SamplingMetrics(torch.device("cpu"), corrects=True)
    for first, last in itertools.pairwise(parts):
        metrics.add_ages(*(x[first:last] for x in (POLICY, SAMPLING, AGE, MASK)))
    weights, ages = [], []
    for policy, sampling, age, mask in zip(*(x.tolist() for x in (POLICY, SAMPLING, AGE, MASK)), strict=True):
        ages += [a for a, m in zip(age, mask, strict=True) if m]
        known = [(p, s) for p, s, m in zip(policy, sampling, mask, strict=True) if m and not math.isnan(s)]
        weights += [math.exp(p - s) for p, s in known]
    found = dict(metrics.values(Accelerator(cpu=True)))
    assert found == pytest.approx(
        {
            "sampling/effective_sample_size": sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights)),
            "sampling/staleness/mean": sum(ages) / len(ages),
            "sampling/staleness/max": max(ages),
        },
        rel=1e-6,
    )
    assert (len(weights), ages) == (4, [0, 1, 1, 3, 2])
