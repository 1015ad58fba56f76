"""Advantages against plain loops, and exactly zero where a group agrees."""

import itertools
import math

import pytest
import torch

from perl.algorithms.advantages import (
    STD_EPSILON,
    agreeing_groups,
    group_advantages,
    normalized_sum_advantages,
    weighted_rewards,
)
from tests.oracles import advantages as oracle

SCALES = ("group", "batch", "none")
NAN = math.nan


def some_rewards(prompts: int = 5, group: int = 6) -> torch.Tensor:
    return torch.randn(prompts, group, generator=torch.Generator().manual_seed(3)) * 2 + 1


@pytest.mark.parametrize("scale", SCALES)
def test_advantages_are_those_of_the_papers(scale):
    rewards = some_rewards()
    expected = torch.tensor(oracle.group_advantages(rewards.tolist(), scale, STD_EPSILON))
    torch.testing.assert_close(group_advantages(rewards, scale=scale), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", SCALES)
def test_missing_rewards_count_neither_in_the_mean_nor_in_the_deviation(scale):
    rewards = some_rewards()
    rewards[0, 2] = rewards[1, :3] = rewards[2, 1:] = rewards[3] = NAN
    advantages = group_advantages(rewards, scale=scale)
    expected = torch.tensor(oracle.group_advantages(rewards.tolist(), scale, STD_EPSILON))
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(advantages[rewards.isnan()], torch.zeros(int(rewards.isnan().sum())))


@pytest.mark.parametrize("scale", SCALES)
def test_a_group_that_agrees_has_advantages_of_exactly_zero(scale):
    for value, group in itertools.product((0.0, 0.1, 1 / 3, -2.3, 1e-8, 12345.678), (2, 3, 7, 16)):
        rewards = some_rewards(3, group)
        rewards[1] = value
        advantages = group_advantages(rewards, scale=scale)
        assert torch.equal(advantages[1], torch.zeros(group))
        assert advantages[[0, 2]].abs().min() > 0
    assert torch.equal(group_advantages(torch.tensor([[0.7], [3.0]]), scale=scale), torch.zeros(2, 1))
    almost = torch.full((2, 2), 0.7)
    almost[1, 1] = torch.nextafter(almost[1, 0], torch.tensor(1.0))
    assert agreeing_groups(almost).tolist() == [True, False]


@pytest.mark.parametrize("scale", SCALES)
def test_a_group_that_agrees_but_for_missing_rewards_has_advantages_of_exactly_zero(scale):
    rewards = torch.tensor([[0.7, NAN, 0.7, 0.7], [NAN, NAN, 0.7, NAN], [NAN] * 4, [0.0, 1.0, 1.0, NAN]])
    advantages = group_advantages(rewards, scale=scale)
    assert torch.equal(advantages[:3], torch.zeros(3, 4))
    assert advantages[3, 0] < 0 < advantages[3, 1]


def test_an_unknown_scale_is_refused():
    with pytest.raises(ValueError, match="scale must be group, batch or none, not 'row'"):
        group_advantages(some_rewards(), scale="row")


def test_the_weighted_sum_leaves_out_a_function_that_does_not_apply_to_a_group():
    rewards = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[NAN, 2.0], [NAN, 4.0]], [[NAN, NAN], [NAN, NAN]]])
    total = weighted_rewards(rewards, torch.tensor([0.5, -1.0]))
    assert total[:2].tolist() == [[-1.5, -2.5], [-2.0, -4.0]]
    assert total[2].isnan().all()


def test_a_completion_that_a_function_could_not_score_has_no_say_beside_those_it_scored():
    """Summed as 0 it would be the best of a group in which that function punishes."""
    rewards = torch.tensor([[[-5.0, 1.0], [NAN, 1.0], [-5.0, 1.0], [-4.0, 1.0]]])
    total = weighted_rewards(rewards, torch.tensor([1.0, 1.0]))
    assert total[0, [0, 2, 3]].tolist() == [-4.0, -4.0, -3.0]
    assert total[0, 1].isnan()
    assert group_advantages(total)[0, 1] == 0
    assert normalized_sum_advantages(rewards, torch.tensor([1.0, 1.0]))[0, 1] == 0


def test_normalised_sums_are_those_of_the_paper():
    rewards = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(7)) * torch.tensor([1.0, 10.0, 0.1])
    rewards[0, 1] = NAN
    rewards[1, :, 2] = NAN
    rewards[2, 3, 0] = NAN
    weights = torch.tensor([1.0, 0.25, 2.0])
    advantages = normalized_sum_advantages(rewards, weights)
    expected = torch.tensor(oracle.normalized_sum_advantages(rewards.tolist(), weights.tolist(), STD_EPSILON))
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-5)
    assert advantages[0, 1] == 0


def test_normalised_sums_of_a_flat_group_are_exactly_zero_beside_another():
    rewards = torch.tensor([0.7, 0.1]).expand(2, 4, 2).clone()
    rewards[1] = torch.randn(4, 2, generator=torch.Generator().manual_seed(3))
    advantages = normalized_sum_advantages(rewards, torch.tensor([0.3, 0.9]))
    assert torch.equal(advantages[0], torch.zeros(4))
    assert advantages[1].abs().min() > 0
