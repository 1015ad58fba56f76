"""What is logged of a loss, against loops over tokens: by micro-batch, whatever passes its rows went through."""

import dataclasses
import math

import pytest
import torch
from accelerate import Accelerator

from perl.algorithms.losses import LossInputs, LossSettings, objective
from perl.algorithms.metrics import LossMetrics
from perl.algorithms.registry import LOSSES

SEED = 5
ROWS, TOKENS, MICRO_BATCHES = 12, 6, 3
MICRO_BATCH = [0, 0, 1, 2, 1, 0, 2, 2, 1, 0, 0, 2]
LEVELS = ("token", "sequence")
WITH_CLIP = [name for name, row in LOSSES.items() if "clip_ratio/low" in row.logs]


def some_rows() -> tuple[LossInputs, torch.Tensor]:
    """Ratios from about 0.3 to 3 with advantages of either sign, masks with holes, one row without a token."""
    generator = torch.Generator().manual_seed(SEED)
    policy = -1.0 - torch.rand(ROWS, TOKENS, generator=generator)
    mask = (torch.rand(ROWS, TOKENS, generator=generator) < 0.7).long()
    mask[3] = 0
    return LossInputs(
        policy_log_probs=policy,
        old_log_probs=policy - 0.6 * torch.randn(ROWS, TOKENS, generator=generator),
        advantages=torch.randn(ROWS, 1, generator=generator),
        mask=mask,
        reference_log_probs=policy + 0.3 * torch.randn(ROWS, TOKENS, generator=generator),
    ), torch.rand(ROWS, TOKENS, generator=generator)


def chosen(inputs: LossInputs, rows: list[int]) -> LossInputs:
    values = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
    return LossInputs(**{name: None if value is None else value[rows] for name, value in values.items()})


def logged(settings: LossSettings, passes: list[list[int]]) -> dict[str, list[float]]:
    inputs, entropies = some_rows()
    metrics = LossMetrics(MICRO_BATCHES, settings, torch.device("cpu"))
    for rows in passes:
        part = chosen(inputs, rows)
        metrics.add(objective(part, settings), part, entropies[rows], torch.tensor(MICRO_BATCH)[rows])
    found: dict[str, list[float]] = {}
    for name, value in metrics.values(Accelerator(cpu=True)):
        found.setdefault(name, []).append(value)
    return found


def ratios_of(inputs: LossInputs, level: str) -> list[list[float]]:
    """One number a token, or one a row."""
    gaps = (inputs.policy_log_probs - inputs.old_log_probs).tolist()
    if level == "token":
        return [[math.exp(gap) for gap in row] for row in gaps]
    means = []
    for row, keep in zip(gaps, inputs.mask.tolist(), strict=True):
        kept = [gap for gap, m in zip(row, keep, strict=True) if m]
        means.append([math.exp(sum(kept) / max(len(kept), 1))])
    return means


def means_of(values: list[list[float]], inputs: LossInputs) -> list[float]:
    """The mean over each micro-batch's tokens, or over its rows where a row has one number."""
    found = []
    for number in range(MICRO_BATCHES):
        kept = [
            value
            for n, row in enumerate(values)
            for t, value in enumerate(row)
            if MICRO_BATCH[n] == number and (len(row) == 1 or inputs.mask[n, t])
        ]
        found.append(sum(kept) / len(kept))
    return found


def extremes_of(values: list[list[float]], inputs: LossInputs, extreme) -> list[float]:
    """The least or largest mean of a row, by micro-batch; a row of one number counts whatever its mask."""
    found = []
    for number in range(MICRO_BATCHES):
        means = []
        for n, row in enumerate(values):
            kept = row if len(row) == 1 else [v for v, m in zip(row, inputs.mask[n].tolist(), strict=True) if m]
            if MICRO_BATCH[n] == number and kept:
                means.append(sum(kept) / len(kept))
        found.append(extreme(means))
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", WITH_CLIP)
def test_shares_of_clipped_tokens_are_those_of_a_loop(name, level):
    inputs, entropies = some_rows()
    settings = LossSettings(name, level, epsilon_low=0.1, epsilon_high=0.3, beta=0.1, correct_kl=False)
    low, high = [], []
    # GMPO bounds the logarithm of each token's ratio, whatever the level.
    below, above, of = (math.exp(-0.1), math.exp(0.3), "token") if name == "gmpo" else (0.9, 1.3, level)
    for row, advantage in zip(ratios_of(inputs, of), inputs.advantages.flatten().tolist(), strict=True):
        low.append([float(ratio < below and advantage < 0) for ratio in row])
        high.append([float(ratio > above and advantage > 0) for ratio in row])
    either = [[max(pair) for pair in zip(*rows, strict=True)] for rows in zip(low, high, strict=True)]
    gaps = (inputs.reference_log_probs - inputs.policy_log_probs).tolist()
    expected = {
        "entropy": means_of(entropies.tolist(), inputs),
        "kl": means_of([[math.exp(gap) - gap - 1 for gap in row] for row in gaps], inputs),
        "clip_ratio/low_mean": means_of(low, inputs),
        "clip_ratio/high_mean": means_of(high, inputs),
        "clip_ratio/region_mean": means_of(either, inputs),
        "clip_ratio/low_min": extremes_of(low, inputs, min),
        "clip_ratio/high_max": extremes_of(high, inputs, max),
    }
    found = logged(settings, [list(range(ROWS))])
    assert found.keys() == expected.keys()
    for metric, values in expected.items():
        assert found[metric] == pytest.approx(values, rel=1e-5, abs=1e-7)
    assert 0 < sum(expected["clip_ratio/region_mean"]) < MICRO_BATCHES


def test_cispo_logs_the_share_of_weights_at_their_bound():
    inputs, _ = some_rows()
    rows = zip(ratios_of(inputs, "token"), inputs.advantages.flatten().tolist(), strict=True)
    bounded = [[float(ratio > 1.2 and advantage > 0) for ratio in row] for row, advantage in rows]
    found = logged(LossSettings("cispo", epsilon_high=1.2), [list(range(ROWS))])
    assert found["cispo_clip_ratio"] == pytest.approx(means_of(bounded, inputs), rel=1e-5)


def test_vespo_logs_its_mean_weight_of_a_completion():
    inputs, _ = some_rows()
    weights = []
    gaps = (inputs.policy_log_probs - inputs.old_log_probs).tolist()
    for row, keep, advantage in zip(gaps, inputs.mask.tolist(), inputs.advantages.flatten().tolist(), strict=True):
        w = math.exp(sum(gap for gap, m in zip(row, keep, strict=True) if m))
        k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        weights.append([w**k * math.exp(rate * (1 - w))])
    found = logged(LossSettings("vespo"), [list(range(ROWS))])
    assert found["vespo/phi_seq_mean"] == pytest.approx(means_of(weights, inputs), rel=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LOSSES)
def test_metrics_do_not_depend_on_the_passes_that_rows_went_through(name, level):
    settings = LossSettings(name, level, beta=0.1)
    whole = logged(settings, [list(range(ROWS))])
    assert whole.keys() == {"entropy", "kl", *LOSSES[name].metrics}
    parts = logged(settings, [[7, 2, 11], [0], [5, 1, 3, 10], [9, 8, 6, 4]])
    assert parts.keys() == whole.keys()
    for metric, values in whole.items():
        assert parts[metric] == pytest.approx(values, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_a_micro_batch_whose_rows_were_all_left_out_has_no_value(name):
    rows = [n for n, number in enumerate(MICRO_BATCH) if number != 1]
    assert {len(values) for values in logged(LossSettings(name), [rows]).values()} == {2}
