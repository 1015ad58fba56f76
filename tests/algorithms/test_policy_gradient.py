"""What the losses estimate, taken over every completion that there is: no samples, no tolerance for chance.

A policy of independent tokens, V = 3 words, T = 3 tokens: 27 completions, each with its exact probability.
"""

import itertools

import pytest
import torch

from perl.algorithms.importance import SamplingCorrection, sampling_ratio
from perl.algorithms.losses import LossInputs, LossSettings, kl_estimate, objective

V, T = 3, 3
EVERY = torch.tensor(list(itertools.product(range(V), repeat=T)))  # (27, T)
MASK = torch.ones(len(EVERY), T, dtype=torch.float64)


def policy(seed: int) -> torch.Tensor:
    """(T, V) logits."""
    return torch.randn(T, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def log_probs_of(logits: torch.Tensor) -> torch.Tensor:
    """(27, T), of each token of every completion."""
    return logits.log_softmax(-1)[torch.arange(T), EVERY]


def chances_of(logits: torch.Tensor) -> torch.Tensor:
    """(27,), which add up to one."""
    return log_probs_of(logits).sum(dim=1).exp()


def rewards() -> torch.Tensor:
    """(27,): something that depends on all tokens and is no sum over them."""
    return (EVERY.float() @ torch.tensor([1.0, -2.0, 0.5])).sin().double() + (EVERY[:, 0] == EVERY[:, 2]).double()


def gradient(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logits)[0]


def kl(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """KL(policy || reference) of whole completions, by its definition."""
    chances = chances_of(logits)
    return (chances * (chances.log() - chances_of(reference).log())).sum()


@pytest.mark.parametrize(
    "loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "reinforce", "dppo"]
)
def test_on_policy_the_expected_gradient_of_a_loss_is_that_of_the_expected_reward(loss_type):
    logits = policy(1).requires_grad_()
    log_probs, settings = log_probs_of(logits), LossSettings(loss_type, epsilon_high=1.2)
    given = LossInputs(log_probs, log_probs.detach(), rewards()[:, None], MASK)
    expected_loss = (chances_of(logits).detach()[:, None] * objective(given, settings).per_token).sum()
    expected_reward = (chances_of(logits) * rewards()).sum()
    torch.testing.assert_close(gradient(expected_loss, logits), -gradient(expected_reward, logits))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_corrected_kl_term_has_value_and_gradient_of_the_divergence_off_policy_too(estimator):
    logits, old, reference = policy(3).requires_grad_(), policy(4), policy(5)
    given = LossInputs(log_probs_of(logits), log_probs_of(old), torch.zeros(27, 1), MASK, log_probs_of(reference))
    per_token = objective(given, LossSettings("dr_grpo", beta=1.0, kl_estimator=estimator)).per_token
    estimate = (chances_of(old)[:, None] * per_token).sum()
    torch.testing.assert_close(estimate, kl(logits, reference))
    torch.testing.assert_close(gradient(estimate, logits), gradient(kl(logits, reference), logits))


def test_on_policy_k2_has_the_gradient_of_the_divergence_and_k1_none():
    logits, reference = policy(3).requires_grad_(), log_probs_of(policy(5))
    chances = chances_of(logits).detach()[:, None]
    k1, k2 = ((chances * kl_estimate(log_probs_of(logits), reference, name)).sum() for name in ("k1", "k2"))
    # a token's estimate is weighted by all completions, so only terms of its own position stay
    torch.testing.assert_close(gradient(k2, logits), gradient(kl(logits, policy(5)), logits))
    torch.testing.assert_close(gradient(k1, logits), torch.zeros_like(logits))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_without_bounds_the_correction_makes_means_under_the_engine_means_under_the_policy(level):
    old, engine = policy(8), policy(9)
    correction = SamplingCorrection(f"{level}_truncate", None, None)
    ratio = sampling_ratio(log_probs_of(old), log_probs_of(engine), MASK, correction)
    if level == "sequence":
        corrected, expected = chances_of(engine) * ratio[:, 0] * rewards(), chances_of(old) * rewards()
        torch.testing.assert_close(corrected.sum(), expected.sum())
        return
    for place in range(T):  # of a function of the token at one place
        value = EVERY[:, place].double() ** 2
        corrected = (chances_of(engine) * ratio[:, place] * value).sum()
        torch.testing.assert_close(corrected, (chances_of(old) * value).sum())
