"""Each loss type's value, gradient and token weights against token-by-token loops."""

import dataclasses
import itertools
import math

import pytest
import torch

from perl.algorithms.losses import (
    LossInputs,
    LossSettings,
    binary_divergence,
    objective,
    ratio_at,
    token_weights,
)
from perl.algorithms.registry import LOSSES
from tests.oracles import losses as oracle
from tests.oracles.covering import most_pairs

LOSS_TYPES = tuple(LOSSES)
LEVELS = ("token", "sequence")
LONGEST = 7  # Dr. GRPO's constant

# Padding at the end, a tool's answer in the middle, and a row that is all there.
MASK = [[1, 1, 0, 1, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
ADVANTAGES = [1.3, -0.9, -1.7, 0.6]
SELECTED = [[0, 1, 0, 0, 0], [1, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]  # by Clip-Cov and KL-Cov
# log(policy / old): below, within and above each bound for either sign of the advantage, token by token and row by row.
LOG_RATIOS = [
    [-0.5, 0.06, 2.0, 0.8, 2.0],
    [1.2, -0.05, 0.33, 0.9, 0.6],
    [-0.6, -0.5, 0.1, 2.0, 2.0],
    [0.31] + [2.0] * 4,
]


def log_probs(seed: int, spread: float = 0.5, rows: int = 4, tokens: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return -1.5 + spread * torch.randn(rows, tokens, generator=generator, dtype=torch.float64)


def some_inputs(sampling: str = "none", off_policy: bool = True, mask: list[list[int]] = MASK) -> LossInputs:
    """A micro-batch, off policy or on."""
    policy = log_probs(1)
    ratios = {
        "none": None,
        "token": log_probs(4, 0.3).add(1.5).exp(),
        "row": torch.tensor([[0.8], [1.1], [1.4], [0.9]]),
    }
    return LossInputs(
        policy_log_probs=policy.requires_grad_(),
        old_log_probs=policy.detach() - torch.tensor(LOG_RATIOS, dtype=torch.float64) * off_policy,
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64).unsqueeze(1),
        mask=torch.tensor(mask),
        reference_log_probs=log_probs(3),
        sampling_ratio=ratios[sampling],
        selected=torch.tensor(SELECTED).bool(),
    )


def oracle_batch(inputs: LossInputs, off_policy: bool = True) -> oracle.Batch:
    sampling = inputs.sampling_ratio
    return oracle.Batch(
        advantages=inputs.advantages.squeeze(1).tolist(),
        mask=inputs.mask.tolist(),
        old=inputs.old_log_probs.tolist() if off_policy else None,
        reference=inputs.reference_log_probs.tolist(),
        sampling=None if sampling is None else sampling.tolist(),
        engine=None if inputs.sampling_log_probs is None else inputs.sampling_log_probs.tolist(),
        entropies=None if inputs.entropies is None else inputs.entropies.tolist(),
        selected=None if inputs.selected is None else inputs.selected.tolist(),
    )


def settings_of(loss_type: str, level: str = "token", **others: float | None) -> LossSettings:
    """Settings that the examples reach: CISPO bounds the ratio itself, and torch.where rounds what is not dyadic."""
    bound = {"epsilon_high": 1.3} if loss_type == "cispo" else {}
    bound |= {"dppo_threshold": 0.05} if loss_type == "dppo" else {}
    return LossSettings(loss_type, level, **{"sapo_temperature_neg": 1.0625, **bound, **others})


def our_loss(inputs: LossInputs, settings: LossSettings, micro_batches: int = 2, window_tokens: float = 17.0):
    weights = token_weights(
        inputs.mask,
        settings.loss_type,
        micro_batches=micro_batches,
        window_tokens=window_tokens,
        max_completion_length=LONGEST,
    )
    return (objective(inputs, settings).per_token * weights).sum()


def oracle_loss(policy: list[list[float]], held: list[list[float]], batch: oracle.Batch, setting: oracle.Setting):
    values = oracle.objectives(policy, batch, setting, held)
    return oracle.micro_batch_loss(values, batch.mask, setting.loss_type, 2, 17.0, LONGEST)


def oracle_gradient(policy: list[list[float]], batch: oracle.Batch, setting: oracle.Setting) -> list[list[float]]:
    """Central differences; what the papers hold constant keeps the policy's own numbers."""
    gradient = []
    for n, row in enumerate(policy):
        gradient.append([])
        for t in range(len(row)):
            sides = []
            for step in (1e-6, -1e-6):
                moved = [list(r) for r in policy]
                moved[n][t] += step
                sides.append(oracle_loss(moved, policy, batch, setting))
            gradient[n].append((sides[0] - sides[1]) / 2e-6)
    return gradient


def assert_like_the_oracle(inputs: LossInputs, settings: LossSettings, off_policy: bool = True) -> None:
    batch, policy = oracle_batch(inputs, off_policy), inputs.policy_log_probs.tolist()
    setting = oracle.Setting(
        settings.loss_type,
        settings.ratio_level,
        settings.beta,
        settings.delta,
        settings.epsilon_low,
        settings.epsilon_high,
        settings.correct_kl,
        (settings.sapo_temperature_pos, settings.sapo_temperature_neg),
        ((settings.vespo_k_pos, settings.vespo_lambda_pos), (settings.vespo_k_neg, settings.vespo_lambda_neg)),
        settings.kl_estimator,
        settings.entropy_weight,
        (settings.dppo_divergence, settings.dppo_threshold),
        settings.cov_kl_weight,
    )
    loss = our_loss(inputs, settings)
    (gradient,) = torch.autograd.grad(loss, inputs.policy_log_probs)
    assert loss.item() == pytest.approx(oracle_loss(policy, policy, batch, setting), rel=1e-6)
    expected = torch.tensor(oracle_gradient(policy, batch, setting), dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)
    assert gradient[inputs.mask == 1].abs().max() > 1e-3


@pytest.mark.parametrize("loss_type", [name for name, row in LOSSES.items() if "delta" in row.settings])
def test_delta_is_the_bound_of_dual_clip(loss_type):
    """Ye et al. 2020, arXiv:1912.09729, equation 5, with its own case for A < 0."""
    inputs, c, low, high = dataclasses.replace(some_inputs(), selected=None), 1.5, 0.8, 1.2
    found = objective(inputs, settings_of(loss_type, delta=c)).per_token
    reached = 0
    for n, advantage in enumerate(ADVANTAGES):
        for t, gap in enumerate(LOG_RATIOS[n]):
            ratio = math.exp(gap)
            plain = min(ratio * advantage, min(max(ratio, low), high) * advantage)
            dual = max(plain, c * advantage) if advantage < 0 else plain
            assert found[n, t].item() == pytest.approx(-dual, rel=1e-12)
            reached += dual != plain
    assert reached >= 3


def test_the_examples_reach_every_bound_with_either_sign_of_the_advantage():
    inputs = some_inputs()
    gaps = (inputs.policy_log_probs - inputs.old_log_probs).detach()
    tokens, rows = ratio_at("token", gaps, inputs.mask), ratio_at("sequence", gaps, inputs.mask)
    raised = inputs.advantages > 0
    for side in (raised, ~raised):
        for low, high in ((0.0, 0.8), (0.8, 1.2), (1.2, 1.5), (1.5, 9.0)):
            assert ((tokens > low) & (tokens < high) & side & (inputs.mask == 1)).any()
    assert (rows[raised] > 1.2).any()
    assert (rows[~raised] < 0.8).any()
    assert (rows[~raised] > 1.5).any()


# Level of the ratio, beta, delta, the engine's correction, and whether old log-probs are others: every pair of values.
COVERED = most_pairs(
    list(itertools.product(LEVELS, (0.0, 0.04), (None, 1.5), ("none", "token", "row"), (True, False))), 8
)


@pytest.mark.parametrize(("level", "beta", "delta", "sampling", "off_policy"), COVERED)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradient_are_those_of_the_papers(loss_type, level, beta, delta, sampling, off_policy):
    inputs, settings = some_inputs(sampling, off_policy), settings_of(loss_type, level, beta=beta, delta=delta)
    assert_like_the_oracle(inputs, settings, off_policy)
    if not off_policy:
        assert objective(inputs, settings).ratio.unique().tolist() == [1.0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_rows_without_any_token_are_finite_and_have_no_gradient(loss_type, level):
    settings = settings_of(loss_type, level, beta=0.04, delta=1.5)
    inputs, empty = some_inputs(mask=[[0] * 5, *MASK[1:]]), some_inputs(mask=[[0] * 5] * 4)
    assert_like_the_oracle(inputs, settings)
    (gradient,) = torch.autograd.grad(our_loss(inputs, settings), inputs.policy_log_probs)
    assert torch.equal(gradient[0], torch.zeros(5, dtype=torch.float64))
    loss = our_loss(empty, settings, window_tokens=1.0)  # a micro-batch of nothing else
    (gradient,) = torch.autograd.grad(loss, empty.policy_log_probs)
    assert loss.item() == 0
    assert torch.equal(gradient, torch.zeros(4, 5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("off_policy", "divergence", "threshold", "engine"),
    most_pairs(list(itertools.product((False, True), ("tv", "kl"), (0.0, 0.02, 0.1, 0.3), (False, True))), 8),
)
def test_a_token_that_has_moved_too_far_and_would_move_on_is_masked(off_policy, divergence, threshold, engine):
    inputs = some_inputs("token" if engine else "none", off_policy)
    if engine:
        sampled = inputs.old_log_probs - 0.4 * torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
        sampled[::2, ::2] = math.nan
        inputs = dataclasses.replace(inputs, sampling_log_probs=sampled.double())
    settings = settings_of("dppo", dppo_divergence=divergence, dppo_threshold=threshold, beta=0.04)
    assert_like_the_oracle(inputs, settings, off_policy)
    masked = objective(inputs, settings).logged["dppo_masked"][inputs.mask == 1].mean()
    if off_policy and threshold <= 0.02:
        assert 0 < masked < 1
    if not off_policy and not engine:
        assert masked == 0


def test_the_divergence_of_two_events_is_below_that_of_all():
    policy = torch.randn(50, 7, generator=torch.Generator().manual_seed(4), dtype=torch.float64).log_softmax(dim=1)
    sampled = torch.randn(50, 7, generator=torch.Generator().manual_seed(5), dtype=torch.float64).log_softmax(dim=1)
    variation = 0.5 * (policy.exp() - sampled.exp()).abs().sum(dim=1, keepdim=True)
    divergence = (sampled.exp() * (sampled - policy)).sum(dim=1, keepdim=True)
    assert (binary_divergence(sampled, policy, "tv") <= variation).all()
    found = binary_divergence(sampled, policy, "kl")
    assert ((found >= 0) & (found <= divergence)).all()
    assert binary_divergence(torch.zeros(1, 1), torch.full((1, 1), -1e-9), "kl").isfinite().all()


@pytest.mark.parametrize(
    ("loss_type", "estimator", "off_policy", "correct_kl"),
    most_pairs(
        list(
            itertools.product(("grpo", "cispo", "reinforce", "gmpo"), ("k1", "k2", "k3"), (False, True), (False, True))
        ),
        12,
    ),
)
def test_each_estimator_of_the_divergence_has_its_value_and_gradient(loss_type, estimator, off_policy, correct_kl):
    settings = settings_of(loss_type, beta=0.3, kl_estimator=estimator, correct_kl=correct_kl)
    assert_like_the_oracle(some_inputs("token", off_policy), settings, off_policy)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_entropy_is_taken_off_each_token(loss_type):
    entropies = log_probs(6, 0.2).abs().requires_grad_()
    inputs = dataclasses.replace(some_inputs("row"), entropies=entropies)
    settings = settings_of(loss_type, entropy_weight=0.7)
    assert_like_the_oracle(inputs, settings)
    (gradient,) = torch.autograd.grad(our_loss(inputs, settings), entropies)
    arguments = {"micro_batches": 2, "window_tokens": 17.0, "max_completion_length": LONGEST}
    weights = token_weights(inputs.mask, loss_type, **arguments)
    torch.testing.assert_close(gradient, -0.7 * weights.double())
    with pytest.raises(ValueError, match="entropies are needed"):
        objective(some_inputs(), settings)


@pytest.mark.parametrize("bounds", [(0.4, 0.4), (0.1, 0.7), (0.0, 0.0)])
def test_the_geometric_mean_bounds_each_token_in_log_space(bounds):
    settings = settings_of("gmpo", epsilon_low=bounds[0], epsilon_high=bounds[1])
    inputs = some_inputs()
    assert our_loss(inputs, settings).item() == pytest.approx(
        oracle_loss(inputs.policy_log_probs.tolist(), inputs.policy_log_probs.tolist(), oracle_batch(inputs),
                    oracle.Setting("gmpo", epsilon_low=bounds[0], epsilon_high=bounds[1]))
    )  # fmt: skip
    if all(bounds):
        assert_like_the_oracle(inputs, settings)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_bounds_of_the_ratio_may_differ_and_the_kl_go_uncorrected(loss_type):
    settings = settings_of(loss_type, epsilon_low=0.1, epsilon_high=0.45, beta=0.1, correct_kl=False)
    assert_like_the_oracle(some_inputs("token"), settings)


def test_vespo_stays_finite_however_far_the_policy_has_moved():
    inputs = some_inputs()
    for shift in (-1000.0, 1000.0):
        moved = LossInputs(**{**vars(inputs), "old_log_probs": inputs.policy_log_probs.detach() + shift})
        weight = objective(moved, LossSettings("vespo")).logged["vespo/phi_seq"]
        assert weight.isfinite().all()
        assert (weight >= 0).all()
        assert weight.max() < 1e-3


def test_a_kl_term_without_reference_is_refused():
    inputs = LossInputs(**{**vars(some_inputs()), "reference_log_probs": None})
    with pytest.raises(ValueError, match="the reference's log-probabilities are needed"):
        objective(inputs, LossSettings(beta=0.04))
    assert objective(inputs, LossSettings(beta=0.0)).kl is None


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_token_weights_are_the_papers_normalisers(loss_type):
    values = log_probs(9)
    mask = torch.tensor(MASK)
    weights = token_weights(mask, loss_type, micro_batches=3, window_tokens=31.0, max_completion_length=LONGEST)
    expected = oracle.micro_batch_loss(values.tolist(), MASK, loss_type, 3, 31.0, LONGEST)
    assert (weights * values).sum().item() == pytest.approx(expected, rel=1e-6)
    assert weights.shape == mask.shape
    assert weights.dtype == torch.float32
    assert torch.equal(weights == 0, mask == 0)
