"""Each estimator of the advantage against plain loops, and the table that names them."""

import itertools
import math

import pytest
import torch

from perl.algorithms.advantages import STD_EPSILON, group_advantages, penalised_returns, whitened
from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.registry import LOSSES, function_at
from tests.oracles import advantages as oracle

NAN = math.nan
# Those of the rewards and lengths alone; ``remax`` also has the greedy completions' rewards.
OTHERS = tuple(name for name in ADVANTAGES if name not in {"group", "remax"})
LENGTHS = torch.tensor([[3, 1, 7, 2, 5, 1], [1, 1, 1, 1, 1, 1], [9, 2, 4, 4, 1, 30], [2, 3, 4, 5, 6, 7], [8] * 6])


def estimate(name: str, rewards: torch.Tensor, lengths: torch.Tensor = LENGTHS) -> torch.Tensor:
    given = {"scale": "group", "lengths_PG": lengths}
    return function_at(ADVANTAGES[name].function)(rewards, **{key: given[key] for key in ADVANTAGES[name].reads})


def some_rewards() -> torch.Tensor:
    """Not negative; groups of all kinds: different, of 0 and 1, one success, a tie of the best, agreeing."""
    generator = torch.Generator().manual_seed(3)
    rewards = torch.rand(5, 6, generator=generator)
    rewards[1] = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    rewards[2] = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    rewards[4] = 0.7
    return rewards


def expected(name: str, rewards: torch.Tensor, lengths: torch.Tensor = LENGTHS) -> torch.Tensor:
    return torch.tensor(oracle.estimated(name, rewards.tolist(), lengths.tolist(), STD_EPSILON))


@pytest.mark.parametrize("name", OTHERS)
def test_advantages_are_those_of_the_papers(name):
    rewards = some_rewards()
    advantages = estimate(name, rewards)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, expected(name, rewards), rtol=1e-6, atol=1e-6)
    assert advantages.abs().max() > 0.1


@pytest.mark.parametrize("name", OTHERS)
def test_a_missing_reward_is_left_out_and_a_group_may_have_one_or_none(name):
    rewards = some_rewards()
    rewards[0, 2] = rewards[1, :3] = rewards[2, 1:] = rewards[3] = NAN
    advantages = estimate(name, rewards)
    torch.testing.assert_close(advantages, expected(name, rewards), rtol=1e-6, atol=1e-6)
    assert torch.equal(advantages[rewards.isnan()], torch.zeros(int(rewards.isnan().sum())))
    assert torch.equal(advantages[3], torch.zeros(6))
    assert advantages[0].abs().max() > 0


@pytest.mark.parametrize("name", OTHERS)
def test_a_group_or_a_batch_that_agrees_has_advantages_of_exactly_zero(name):
    for value in (0.0, 0.7, NAN):
        assert torch.equal(estimate(name, torch.full((5, 6), value)), torch.zeros(5, 6))
    if ADVANTAGES[name].alone:
        return
    for value, group in itertools.product((0.0, 0.1, 1 / 3, 1e-8, 12345.678), (2, 3, 7)):
        rewards = torch.rand(3, group, generator=torch.Generator().manual_seed(3))
        rewards[1] = value
        advantages = estimate(name, rewards, torch.arange(3 * group).view(3, group) + 1)
        assert torch.equal(advantages[1], torch.zeros(group))
        assert (advantages[[0, 2]].abs().amax(dim=1) > 0).all()


def test_the_baseline_may_be_the_greedy_completions_reward():
    rewards = torch.tensor([[1.0, 0.0, NAN], [1.0, 1.0, 1.0], [0.5, 0.5, 0.0], [NAN, NAN, NAN]])
    greedy = torch.tensor([[1.0], [0.25], [NAN], [1.0]]).expand(4, 3)
    found = function_at(ADVANTAGES["remax"].function)(rewards, greedy_PG=greedy)
    assert found.tolist() == [[0, -1, 0], [0.75, 0.75, 0.75], [0, 0, 0], [0, 0, 0]]
    assert found.dtype == torch.float32


def test_a_group_without_a_token_has_the_plain_mean_as_its_baseline():
    rewards, lengths = some_rewards(), LENGTHS.clone()
    lengths[0] = 0
    found = estimate("opo", rewards, lengths)
    torch.testing.assert_close(found[0], group_advantages(rewards, scale="none")[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1:], estimate("opo", rewards)[1:])


def test_the_likelihood_has_no_meaning_for_a_negative_reward():
    with pytest.raises(ValueError, match="one of them is negative"):
        estimate("maxrl", some_rewards() - 0.5)


def test_only_the_best_of_a_group_counts_and_only_without_an_equal():
    rewards = torch.tensor([[0.25, 1.0, 0.5], [1.0, 0.0, 1.0], [NAN, 0.5, NAN], [-1.0, -0.25, NAN]])
    found = estimate("pass_at_k", rewards)
    assert found.tolist() == [[0, 0.5, 0], [0, 0, 0], [0, 0, 0], [0, 0.75, 0]]


@pytest.mark.parametrize("name", ["rloo", "pass_at_k"])
def test_what_compares_with_other_completions_refuses_groups_of_one(name):
    with pytest.raises(ValueError, match="only"):
        estimate(name, torch.tensor([[0.7], [3.0]]))


def test_the_batch_is_a_baseline_for_groups_of_one():
    rewards = torch.tensor([[0.0], [1.0], [1.0], [NAN]])
    found = estimate("batch", rewards)
    torch.testing.assert_close(found, expected("batch", rewards, torch.ones(4, 1)), rtol=1e-6, atol=1e-6)
    assert (found[1] > 0).all()


@pytest.mark.parametrize("name", [name for name, row in ADVANTAGES.items() if row.before_kl])
def test_a_kl_penalty_is_taken_off_what_follows_each_token(name):
    rewards, generator = some_rewards(), torch.Generator().manual_seed(9)
    rewards[0, 2] = rewards[3] = NAN
    divergences = 0.3 * torch.randn(30, 4, generator=generator)
    mask = (torch.rand(30, 4, generator=generator) < 0.7).long()
    mask[7] = 0
    before = function_at(ADVANTAGES[name].before_kl)(rewards).flatten()
    found = whitened(penalised_returns(before, divergences, mask, 0.5), mask)
    given = rewards.tolist(), divergences.tolist(), mask.tolist()
    wanted = torch.tensor(oracle.penalised(name, *given, beta=0.5, epsilon=STD_EPSILON))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[mask == 0], torch.zeros(int((mask == 0).sum())))
    assert torch.equal(found[rewards.flatten().isnan()], torch.zeros(7, 4))


def test_a_batch_in_two_parts_is_whitened_as_one():
    generator = torch.Generator().manual_seed(9)
    values, mask = torch.randn(6, 5, generator=generator), torch.ones(6, 5)
    parts = [(values[:2], mask[:2]), (values[2:], mask[2:])]
    sums: list[torch.Tensor] = []
    whitened(values, mask, lambda own: sums.append(own) or own)
    found = []
    for part in parts:
        of_all = iter(sums)
        found.append(whitened(*part, lambda _, of_all=of_all: next(of_all)))
    torch.testing.assert_close(torch.cat(found), whitened(values, mask))


def test_a_paper_has_one_key():
    papers = [row.paper for row in (*ADVANTAGES.values(), *LOSSES.values()) if row.paper is not None]
    for column in ("key", "arxiv", "title"):
        assert len({getattr(paper, column) for paper in papers}) == len(set(papers))
