"""Clip-Cov and KL-Cov: covariances, the choice of tokens, value and gradient against plain numbers in float64."""

import pytest
import torch

from perl.algorithms.covariance import CovarianceSettings, covariances, drawn, highest
from perl.algorithms.registry import LOSSES, function_at
from tests.oracles import covariance as oracle

# Groups of unequal length, a tool's token in the middle, a completion without any token.
LENGTHS = (6, 1, 4, 9, 0, 5, 3)
CASES = [
    {"loss_type": "clip_cov", "epsilon": 0.2, "cov_fraction": 0.2, "cov_low": 0.1, "cov_high": 1.5},
    {"loss_type": "clip_cov", "epsilon": 1.0, "cov_fraction": 1.0, "cov_low": -0.5, "cov_high": 9.0},
    {"loss_type": "clip_cov", "epsilon": 1.0, "cov_fraction": 0.001, "cov_low": 0.0, "cov_high": 9.0},
    {"loss_type": "clip_cov", "epsilon": 1.0, "cov_fraction": 0.5, "cov_low": 90.0, "cov_high": 99.0},
    {"loss_type": "kl_cov", "cov_fraction": 0.2, "cov_kl_weight": 1.0},
    {"loss_type": "kl_cov", "cov_fraction": 1.0, "cov_kl_weight": 0.3},
    {"loss_type": "kl_cov", "cov_fraction": 0.001, "cov_kl_weight": 2.0},
]


def batch(*, of_tokens: bool):
    generator = torch.Generator().manual_seed(5)
    mask = torch.tensor(
        [[int(t < length and (n != 3 or t != 4)) for t in range(9)] for n, length in enumerate(LENGTHS)]
    )
    old = -1.5 + torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    moved = 0.4 * torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    shape = mask.shape if of_tokens else (len(LENGTHS), 1)
    return mask, old, old + moved, torch.randn(shape, generator=generator, dtype=torch.float64)


def chosen(mask, old, advantages, case, step=3):
    selection = LOSSES[case["loss_type"]].selection
    settings = CovarianceSettings(*(case.get(f"cov_{name}", 1.0) for name in ("fraction", "low", "high")))
    found, tokens = covariances(old, advantages, mask)
    ranks = function_at(selection.ranks)(found, lambda: drawn(mask.shape, 0, 7, step), settings)
    return highest(ranks.masked_fill(mask == 0, -torch.inf), settings.count(tokens))


def test_clip_cov_draws_as_many_as_it_may_from_within_the_bounds_and_others_in_another_step():
    mask, old, _, advantages = batch(of_tokens=True)
    case = {"loss_type": "clip_cov", "cov_fraction": 0.2, "cov_low": -0.3, "cov_high": 0.6}
    found = oracle.covariances(old.tolist(), advantages.tolist(), mask.tolist())
    within = {token for token, value in found.items() if -0.3 < value < 0.6}
    count = int(0.2 * int(mask.sum()))
    assert count < len(within) < len(found)
    drawn_in = [{tuple(t) for t in chosen(mask, old, advantages, case, step).nonzero().tolist()} for step in range(200)]
    assert all(len(tokens) == count and tokens <= within for tokens in drawn_in)
    times = [sum(token in tokens for tokens in drawn_in) for token in within]
    usual = 200 * count / len(within)  # each as often as any other
    assert all(abs(number - usual) < 5 * usual**0.5 for number in times)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_processes_choose_what_one_chooses(case):
    mask, old, _, advantages = batch(of_tokens=False)
    alone = chosen(mask, old, advantages, case)
    settings = CovarianceSettings(*(case.get(f"cov_{name}", 1.0) for name in ("fraction", "low", "high")))
    parts = [(slice(0, 4), 9), (slice(4, 7), 5)]  # each padded to its own longest
    cut = [(mask[rows, :width], old[rows, :width], advantages[rows], rows.start) for rows, width in parts]
    sums = []
    for of_mask, of_old, of_advantages, _ in cut:
        covariances(of_old, of_advantages, of_mask, lambda x: sums.append(x) or x)
    ranks = []
    for of_mask, of_old, of_advantages, first in cut:
        found, tokens = covariances(of_old, of_advantages, of_mask, lambda _: sum(sums))
        rank = LOSSES[case["loss_type"]].selection.ranks
        shape = of_mask.shape
        made = function_at(rank)(found, lambda shape=shape, first=first: drawn(shape, first, 7, 3), settings)
        ranks.append(made.masked_fill(of_mask == 0, -torch.inf))
    count = settings.count(tokens)
    sent: list[list[torch.Tensor]] = []
    for made, (*_, first) in zip(ranks, cut, strict=True):
        own: list[torch.Tensor] = []
        highest(made, count, first, lambda values, own=own: own.append(values) or values)
        sent.append(own)
    for made, (rows, width), (*_, first) in zip(ranks, parts, cut, strict=True):
        received = iter(torch.cat(values) for values in zip(*sent, strict=True))
        assert torch.equal(highest(made, count, first, lambda _, r=received: next(r)), alone[rows, :width])


def test_of_equal_covariances_the_first_are_chosen_and_no_more_than_may_be():
    ranks = torch.tensor([[1.0, 2.0, -torch.inf], [2.0, 2.0, 0.0]], dtype=torch.float64)
    assert highest(ranks, 2).tolist() == [[False, True, False], [True, False, False]]
    assert int(highest(ranks, 99).sum()) == 5
    assert int(highest(torch.full((2, 3), -torch.inf), 4).sum()) == 0


def test_numbers_of_a_row_do_not_depend_on_the_rows_beside_it_or_on_padding():
    whole = drawn(torch.Size((4, 9)), 0, 7, 3)
    assert torch.equal(drawn(torch.Size((2, 5)), 2, 7, 3), whole[2:, :5])
    assert len(set(whole.flatten().tolist())) == 36
    assert not torch.equal(drawn(torch.Size((4, 9)), 0, 8, 3), whole)
    assert not torch.equal(drawn(torch.Size((4, 9)), 0, 7, 4), whole)
