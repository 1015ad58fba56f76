"""Each named row as a whole: value and gradient are its paper's, on policy and off, from rewards to the mean."""

import dataclasses
import itertools
from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOConfig

from perl.algorithms.gae import value_loss
from perl.algorithms.importance import SamplingCorrection, sampling_ratio
from perl.algorithms.losses import LossInputs, LossSettings, objective, token_weights
from perl.algorithms.named import ALGORITHMS
from perl.algorithms.train_fields import train_fields
from perl.packing.divergence import reverse_kl
from perl.packing.micro_batches import SELECTED
from perl.trainer import group_rewards
from perl.trainer.sampling.rollout_check import TokenGaps
from perl.trainer.step.critic_training import CriticTraining
from tests.oracles.named_objectives import NAMED, Batch

DEFAULTS = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
DEFAULTS |= {name: field.default for name, field in train_fields().items()}
P, G, T, V = 3, 4, 6, 5
MASK = torch.tensor(
    [
        *([1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]),  # the last: masked out
        *([1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]),
        *([1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]),
    ]
)
TRUNCATED = torch.tensor([1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]).bool()
# The first reward's last group agrees; sums are of 0, quarters and 1.
REWARDS = torch.tensor(
    [
        [[1.0, 0.0], [0.0, 0.5], [0.0, 0.0], [1.0, 1.0]],
        [[0.0, 1.0], [0.0, 0.0], [1.0, 0.5], [0.0, 0.25]],
        [[1.0, 0.5], [1.0, 0.5], [1.0, 0.5], [1.0, 0.5]],
    ]
)
GREEDY = torch.tensor([[1.0, 0.5], [0.0, 0.0], [0.0, 0.5]]).unsqueeze(1).expand(P, G, 2)
WEIGHTS = torch.tensor([1.0, 0.5])


def rollouts(*, off_policy: bool) -> Batch:
    """Ratios on either side of every bound with either sign of the advantage."""

    def numbers(seed: int, scale: float, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = numbers(1, 1.5, P * G, T, V).requires_grad_()
    policy = logits.log_softmax(dim=-1)[..., 2]
    policy.retain_grad()
    held, values = policy.detach(), numbers(2, 0.5, P * G, T)
    gaps = numbers(3, 0.5, P * G, T)
    gaps[::2, 0], gaps[1::2, 1] = 1.9, -1.2  # beyond the widest bounds
    return Batch(
        policy=policy,
        old=held - gaps if off_policy else held,
        reference=held - numbers(4, 0.4, P * G, T),
        engine=held - numbers(5, 1.2, P * G, T),
        mask=MASK,
        truncated=TRUNCATED,
        rewards=REWARDS,
        weights=WEIGHTS,
        greedy=GREEDY,
        values=(values + numbers(6, 0.3, P * G, T) * off_policy).requires_grad_(),
        old_values=values,
        logits=logits,
        teacher=numbers(7, 1.5, P * G, T, V),
        longest=9,
        micro_batches=2,
        seed=7,
        step=3,
    )


def a_trainer(x: Batch, settings: dict) -> SimpleNamespace:
    """What makes advantages of rewards and selects tokens, without a model."""
    one = {"process_index": 0, "is_main_process": False}
    alone = SimpleNamespace(gather=lambda t: t, reduce=lambda t, reduction: t, **one)  # noqa: ARG005
    model = SimpleNamespace(training=True)
    critic = SimpleNamespace(
        _passes=SimpleNamespace(values=lambda *_: x.old_values),
        critic=None,
        _decay={"gamma": settings["gae_gamma"], "lambda_": settings["gae_lambda"]},
        _total=lambda sums: sums,
        _live=SimpleNamespace(model=model, _metrics={"train": defaultdict(list)}),
    )
    once = {"steps_per_generation": 1, "gradient_accumulation_steps": 1}
    return SimpleNamespace(
        args=SimpleNamespace(**{**settings, **once, "seed": x.seed}),
        accelerator=alone,
        model=model,
        num_generations=G,
        beta=settings["beta"],
        reward_weights=x.weights,
        reward_func_names=["one", "other"],
        scale_rewards=settings["scale_rewards"],
        multi_objective_aggregation=settings["multi_objective_aggregation"],
        step_is_ours=True,
        state=SimpleNamespace(global_step=x.step),
        correction=None,
        rollout_source=SimpleNamespace(inputs=()),
        optimizer_step=SimpleNamespace(gaps=TokenGaps(main=True)),
        critic_training=SimpleNamespace(complete=lambda *given: CriticTraining.complete(critic, *given)),
        add_log_probs=lambda output: output.update(old_per_token_logps=x.old, ref_per_token_logps=x.reference),
        _metrics={"train": defaultdict(lambda: [0.0])},
        _logs={"advantages": deque()},
    )


def objective_of(settings: dict, x: Batch, *, taught: bool, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The loss of an optimizer step, by the functions that the trainer calls."""
    monkeypatch.setattr(group_rewards, "greedy_rewards", lambda *_: x.greedy.reshape(-1, 2))
    monkeypatch.setattr(group_rewards, "is_replaced", lambda *_: False)
    trainer = a_trainer(x, settings)
    mask = x.mask * ~x.truncated.unsqueeze(1) if settings["mask_truncated_completions"] else x.mask
    output = {"completion_mask": mask}
    trainer._group_rewards = group_rewards.GroupRewards(trainer)
    trainer._group_rewards.complete(output, x.rewards.view(-1, 2), P * G)
    advantages = output["advantages"]
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    ratio = None
    if "vllm_importance_sampling_mode" in settings["of the row"]:
        mode, low, high = (settings[f"vllm_importance_sampling_{name}"] for name in ("mode", "clip_min", "clip_max"))
        ratio = sampling_ratio(x.old, x.engine, mask, SamplingCorrection(mode, low, high))
    loss = LossSettings.of(SimpleNamespace(**{**settings, "max_completion_length": x.longest}))
    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(P * G).chunk(x.micro_batches):
        inputs = LossInputs(
            x.policy[rows],
            x.old[rows],
            advantages[rows],
            mask[rows],
            reference_log_probs=x.reference[rows],
            sampling_ratio=None if ratio is None else ratio[rows],
            selected=output[SELECTED][rows] if SELECTED in output else None,
        )
        window = {"micro_batches": x.micro_batches, "window_tokens": mask.sum(), "max_completion_length": x.longest}
        weights = token_weights(mask[rows], loss.loss_type, **window)
        total = total + (objective(inputs, loss).per_token * weights).sum()
        if taught:
            found = reverse_kl(x.logits[rows].detach().flatten(0, 1), x.teacher[rows].flatten(0, 1))
            slope = (found.slope_SV.view(-1, T, V) * x.logits[rows]).sum(-1)  # has the derivative, not the value
            divergence = found.per_token_S.view(-1, T) + slope - slope.detach()
            total = total + (divergence * weights).sum()
    if "returns" in output:
        errors = value_loss(x.values, x.old_values, output["returns"], clip=settings["value_clip"]).per_token
        total = total + (errors * mask).sum() / mask.sum()
    return total


def gradients(loss: torch.Tensor, x: Batch) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, (x.policy, x.logits, x.values), allow_unused=True, retain_graph=True)
    return [torch.zeros(()) if gradient is None else gradient for gradient in found]


def named(name: str, **changes) -> dict:
    row = ALGORITHMS[name]
    return {**DEFAULTS, **row.sets, **changes, "of the row": row.settings}


@pytest.mark.parametrize("off_policy", [False, True], ids=["on", "off"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_has_the_value_and_the_gradient_of_its_paper(name, off_policy, monkeypatch):
    x = rollouts(off_policy=off_policy)
    taught = ALGORITHMS[name].needs_teacher
    loss = objective_of(named(name), x, taught=taught, monkeypatch=monkeypatch)
    expected = NAMED[name](x)
    assert abs(loss.item() - expected.item()) <= 1e-6 * max(1.0, abs(expected.item()))
    for ours, papers in zip(gradients(loss, x), gradients(expected, x), strict=True):
        assert (ours - papers).abs().max() <= 1e-6 * max(1.0, papers.abs().max())
    assert gradients(expected, x)[0].abs().max() > 1e-3


# No token of so few can show them: the ratio is never below 0; a share of a token is one; the draw is of a few tokens.
UNSEEN = {("clip_cov", "epsilon"), ("clip_cov", "cov_fraction"), ("kl_cov", "cov_fraction")}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_constant_of_a_row_makes_a_difference_to_these_rollouts(name, monkeypatch):
    x = rollouts(off_policy=True)

    def numbers(**changes) -> list[torch.Tensor]:
        loss = objective_of(named(name, **changes), x, taught=False, monkeypatch=monkeypatch)
        return [loss.detach(), *gradients(loss, x)]

    as_it_is = numbers()
    for field, value in ALGORITHMS[name].settings.items():
        if not isinstance(value, float) or (name, field) in UNSEEN:
            continue
        pairs = [zip(numbers(**{field: other}), as_it_is, strict=True) for other in (value / 3, value * 3)]
        assert max(float((one - other).abs().max()) for one, other in itertools.chain(*pairs)) > 1e-7, field


@pytest.mark.parametrize("off_policy", [False, True], ids=["on", "off"])
def test_remax_takes_a_penalty_off_token_by_token_without_whitening(off_policy, monkeypatch):
    x, beta = rollouts(off_policy=off_policy), 0.2
    settings = named("remax", beta=beta, kl_in_reward=True, kl_estimator="k1")
    loss = objective_of(settings, x, taught=False, monkeypatch=monkeypatch)
    divergence = (x.old - x.reference) * x.mask
    to_go = torch.stack([divergence[:, t:].sum(1) for t in range(T)], dim=1)
    advantages = ((x.rewards - x.greedy) * x.weights).sum(2).view(-1, 1) - beta * to_go
    expected = (-advantages * x.policy * x.mask).sum() / x.mask.sum()
    assert abs(loss.item() - expected.item()) <= 1e-6
    assert (gradients(loss, x)[0] - gradients(expected, x)[0]).abs().max() <= 1e-6


def test_a_completion_without_a_reward_or_a_baseline_is_left_out_of_the_penalty_too(monkeypatch):
    x, missing = rollouts(off_policy=True), float("nan")
    rewards, greedy = x.rewards.clone(), x.greedy.clone()
    rewards[0, 1], greedy[1] = missing, missing
    x = dataclasses.replace(x, rewards=rewards, greedy=greedy)
    for name in ("remax", "rloo"):
        settings = named(name, beta=0.2, kl_in_reward=True, kl_estimator="k1")
        found = gradients(objective_of(settings, x, taught=False, monkeypatch=monkeypatch), x)[0].abs().sum(1)
        assert found.isfinite().all()
        gone = {1, 3, *(range(4, 8) if name == "remax" else ())}  # the fourth has no token
        assert {row for row in range(P * G) if found[row] == 0} == gone
