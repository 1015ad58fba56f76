"""Corrections for an engine's numbers against a loop over tokens and against TRL's own functions."""

import math
from typing import get_args

import pytest
import torch
from trl import GRPOTrainer

from perl.algorithms.importance import CorrectionMode, SamplingCorrection, on_policy_rows, sampling_ratio

NAN = math.nan
BOUNDS = [(None, None), (None, 1.2), (0.8, None), (0.8, 1.2), (0.0, 3.0)]
# A tool's token, padding, tokens the engine has no number for, a row without tokens.
MASK = [[1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
OLD = [
    [-1.0, -0.2, -3.0, -0.5, -2.0],
    [-0.1, -0.2, -0.3, 0.0, 0.0],
    [0.0] * 5,
    [-1.0, -2.0, -0.5, -0.4, -0.3],
    [-0.7] + [0.0] * 4,
]
SAMPLED = [
    [-1.5, NAN, -9.0, -0.4, -1.9],
    [-0.1, -0.25, -0.05, NAN, -5.0],
    [NAN, -1.0, 0.0, 0.0, 0.0],
    [-1.1, -1.9, -0.55, -0.4, -0.31],
    [NAN] + [0.0] * 4,
]


def by_hand(mode: str, low: float | None, high: float | None) -> list[list[float]]:
    """Token by token."""
    rows = []
    for old, sampled, mask in zip(OLD, SAMPLED, MASK, strict=True):
        differences = [o - s if m and not math.isnan(s) else 0.0 for o, s, m in zip(old, sampled, mask, strict=True)]
        if mode.startswith("sequence"):
            differences = [math.fsum(differences)]
        ratios = [math.exp(difference) for difference in differences]
        below, above = (-math.inf if low is None else low), (math.inf if high is None else high)
        if mode.endswith("truncate"):
            rows.append([min(max(ratio, below), above) for ratio in ratios])
        else:
            rows.append([ratio if below <= ratio <= above else 0.0 for ratio in ratios])
    return rows


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("mode", get_args(CorrectionMode))
def test_ratios_are_those_of_a_loop_over_tokens(mode, bounds):
    old, sampled = torch.tensor(OLD, dtype=torch.float64), torch.tensor(SAMPLED, dtype=torch.float64)
    old.requires_grad_()
    ratio = sampling_ratio(old, sampled, torch.tensor(MASK), SamplingCorrection(mode, *bounds))
    assert not ratio.requires_grad
    expected = by_hand(mode, *bounds)
    assert ratio.shape == (5, 1 if mode.startswith("sequence") else 5)
    for found, wanted in zip(ratio.tolist(), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-12)
    if bounds == (0.8, 1.2):  # else the example shows nothing
        moved = {0.8, 1.2, 0.0} & {value for row in expected for value in row}
        assert moved == {"token_truncate": {0.8, 1.2}, "sequence_truncate": {1.2}}.get(mode, {0.0})


def test_numbers_that_agree_or_are_absent_need_no_correction():
    numbers, mask = torch.tensor(OLD), torch.tensor(MASK)
    for mode in get_args(CorrectionMode):
        for of_engine in (numbers, torch.full((5, 5), NAN)):
            ratio = sampling_ratio(numbers, of_engine, mask, SamplingCorrection(mode, 0.9, 1.1))
            assert torch.equal(ratio, torch.ones_like(ratio))


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.3, 2.0])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("dtype", [torch.long, torch.float32], ids=str)
def test_rows_to_keep_are_trls(threshold, per_token, dtype):
    generator = torch.Generator().manual_seed(2)
    policy = -torch.rand(40, 6, generator=generator, requires_grad=True)
    sampled = policy.detach() + 0.8 * torch.randn(40, 6, generator=generator)
    sampled[::3, 1] = NAN
    sampled[5] = NAN
    mask = (torch.rand(40, 6, generator=generator) < 0.7).to(dtype)
    mask[7] = 0
    advantages = torch.randn(40, 6 if per_token else 1, generator=generator)
    advantages[9] = 0.0
    keep = on_policy_rows(policy, sampled, advantages, mask, threshold)
    expected = GRPOTrainer.get_off_policy_mask(advantages, policy, sampled, mask, threshold)
    assert torch.equal(keep, expected)
    assert keep.dtype == dtype
    assert keep.shape == advantages.shape
    assert not keep.requires_grad
    assert 0 < keep.float().mean() < 1 or threshold == 2.0


def test_a_row_is_left_out_if_it_is_bad_and_the_policy_has_moved_away_from_it():
    policy = torch.tensor([[-3.0, -3.0, -9.0]] * 4)
    sampled = torch.tensor([[-1.0, -2.0, -1.0]] * 4)
    mask = torch.tensor([[1, 1, 0]] * 4)  # 2 and 1 nats: 1.5 a token
    advantages = torch.tensor([[-1.0], [0.0], [1.0], [-1e-9]])
    assert on_policy_rows(policy, sampled, advantages, mask, 1.5).flatten().tolist() == [1, 1, 1, 1]
    assert on_policy_rows(policy, sampled, advantages, mask, 1.49).flatten().tolist() == [0, 1, 1, 0]
    nearer = on_policy_rows(sampled, policy, advantages, mask, 0.0)
    assert nearer.flatten().tolist() == [1] * 4  # than it was
