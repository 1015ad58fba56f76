"""Advantages, returns and the loss of values against plain loops in double precision."""

import math

import pytest
import torch

from perl.algorithms.gae import explained_variance, generalised_advantages, moments, token_rewards, value_loss
from tests.oracles import ppo as oracle

NAN = math.nan


def some(rows: int = 7, columns: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards and values of tokens, and a mask: unequal lengths, holes as of tools, a row without a token."""
    generator = torch.Generator().manual_seed(7)
    rewards, values = torch.randn(2, rows, columns, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, columns + 1, (rows, 1), generator=generator)
    mask = (torch.arange(columns) < lengths) & (torch.rand(rows, columns, generator=generator) < 0.8)
    mask[3] = False
    mask[5] = True
    return rewards, values, mask.long()


@pytest.mark.parametrize(("gamma", "lambda_"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.95), (0.99, 0.0), (0.0, 1.0)])
def test_advantages_are_sums_over_what_follows(gamma, lambda_):
    rewards, values, mask = some()
    found = generalised_advantages(rewards, values, mask, gamma=gamma, lambda_=lambda_)
    wanted = oracle.advantages(rewards.tolist(), values.tolist(), mask.tolist(), gamma, lambda_)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert torch.equal(found[mask == 0], torch.zeros(int((mask == 0).sum()), dtype=torch.float64))


def test_the_reward_is_on_the_last_token_that_counts_and_the_penalty_on_each():
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    found = token_rewards(torch.tensor([5.0, 6.0, NAN]), torch.full((3, 4), 0.25), mask)
    assert found[:2].tolist() == [[-0.25, 0, 4.75, 0], [0, 0, 0, 0]]
    assert found[2].isnan().all()


@pytest.mark.parametrize("lambda_", [0.0, 0.95])
def test_a_completion_without_a_reward_has_no_return_and_changes_no_other(lambda_):
    _, values, mask = some()
    known = torch.arange(7.0)
    some_missing = known.clone()
    some_missing[5] = NAN
    found, whole = (
        generalised_advantages(token_rewards(r, torch.tensor(0.0), mask), values, mask, gamma=1.0, lambda_=lambda_)
        for r in (some_missing, known)
    )
    assert found[5].isnan().all()
    others = [i for i in range(7) if i != 5]
    assert torch.equal(found[others], whole[others])


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_loss_of_values_and_its_gradient_are_those_of_a_loop(clip):
    returns, old, mask = some()
    generator = torch.Generator().manual_seed(8)
    values = (old + 0.3 * torch.randn(old.shape, generator=generator, dtype=torch.float64)).requires_grad_(True)
    returns[2] = NAN
    found = value_loss(values, old, returns, clip=clip)
    wanted, clipped = torch.zeros_like(old), 0
    slopes = torch.zeros_like(old)
    for i in range(7):
        for t in range(11):
            v, o, r = values[i, t].item(), old[i, t].item(), returns[i, t].item()
            if math.isnan(r):
                continue
            near = v if clip is None else min(max(v, o - clip), o + clip)
            far_is_worse = (near - r) ** 2 > (v - r) ** 2
            wanted[i, t] = max((v - r) ** 2, (near - r) ** 2) / 2
            slopes[i, t] = 0.0 if far_is_worse else v - r
            clipped += far_is_worse
    torch.testing.assert_close(found.per_token, wanted)
    found.per_token.sum().backward()
    torch.testing.assert_close(values.grad, slopes)
    assert int(found.clipped.sum()) == clipped
    assert (clipped > 0) == (clip is not None)
    assert mask.sum() > 0


def test_explained_variance_is_that_of_all_tokens_in_however_many_parts():
    returns, values, mask = some()
    returns[2] = NAN
    values = values + 0.7 * returns.nan_to_num()
    parts = sum(moments(values[rows], returns[rows], mask[rows]) for rows in (slice(3), slice(3, 7)))
    counts = mask.bool() & ~returns.isnan()
    r, v = returns[counts], values[counts]
    assert explained_variance(parts) == pytest.approx(1 - ((r - v).var() / r.var()).item())
    assert explained_variance(moments(returns, returns, mask)) == 1.0
    assert explained_variance(moments(torch.zeros_like(returns), returns, mask)) == pytest.approx(0.0)
    assert math.isnan(explained_variance(moments(values, torch.full_like(returns, 0.5), mask)))
    assert math.isnan(explained_variance(moments(values, returns, torch.zeros_like(mask))))
