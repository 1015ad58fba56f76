"""AdaLoRA's ranks move to where they matter in trainings of any length, and end at the rank that was asked for."""

import copy
import functools
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from peft.tuners.adalora.layer import AdaLoraLayer
from transformers import AutoModelForCausalLM

from perl.errors import RecipeError
from perl.methods import adalora
from perl.methods.hooks import hooks_of
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter, continue_adapter
from perl.policy.checkpoint import load_policy, save_policy
from perl.policy.fingerprint import base_fingerprint
from perl.policy.reference import token_log_probs
from perl.policy.save_adapter import write_adapter
from perl.policy.saved.adapter import find_adapter
from perl.recipe.sections import PeftSection
from perl.sandbox import BASE_FOLDER

PROBE = torch.tensor([[6, 7, 78, 8, 9, 96, 10, 1], [12, 13, 14, 77, 96, 5, 78, 1]])
RANK = 4
LAYERS = 4 * 7


@functools.cache
def published():
    return AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32).eval()


def base():
    return copy.deepcopy(published())


def policy_of(rank=RANK, steps=None, **settings) -> PeftModel:
    torch.manual_seed(0)
    policy = attach_adapter(base(), adaptation(PeftSection(method="adalora", rank=rank, **settings))).eval()
    if steps:
        hooks_of(policy).before_training(policy, steps)
    return policy


def small(rank, steps) -> PeftModel:
    """Few layers, for many steps."""
    return policy_of(rank, steps, target_modules=["q_proj", "down_proj"], kwargs={"layers_to_transform": [0, 1]})


def adapted(policy) -> dict[str, AdaLoraLayer]:
    return {name: m for name, m in policy.named_modules() if isinstance(m, AdaLoraLayer)}


def trained(policy):
    return [p for p in policy.parameters() if p.requires_grad]


def optimizer_of(policy):
    return torch.optim.SGD(trained(policy), lr=0.05)


def train(policy, optimizer, steps) -> list[int]:
    """Steps on random gradients, the same ones for the same step; the total rank after each."""
    totals = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in trained(policy):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        hooks_of(policy).after_step(policy, step)
        optimizer.zero_grad()
        totals.append(sum(adalora.ranks(policy)))
    return totals


def log_probs(model):
    with torch.no_grad():
        return token_log_probs(model, PROBE, torch.ones_like(PROBE))


def kept(policy) -> list[int]:
    """Ranks as the weights have them: singular values that are not zero."""
    return [int((layer.lora_E["default"] != 0).sum()) for layer in adapted(policy).values()]


@pytest.mark.parametrize(("steps", "rank"), [(2, 3), (3, 8), (5, 1), (10, 8), (50, 1), (300, 3)])
def test_ranks_move_and_their_mean_ends_at_the_rank_asked_for(steps, rank):
    policy = small(rank, steps)
    layers, config = adapted(policy), policy.peft_config["default"]
    totals = train(policy, optimizer_of(policy), range(1, steps + 1))
    assert len(layers) == 4
    assert totals[-1] == rank * 4
    assert totals == sorted(totals, reverse=True)
    assert sum(kept(policy)) == rank * 4
    assert max(totals) <= config.init_r * 4 > rank * 4
    assert totals[steps - config.tfinal - 1 :] == [rank * 4] * (config.tfinal + 1)


@pytest.mark.parametrize("steps", [10, 1000])
def test_the_schedule_leaves_time_before_and_after_and_what_the_user_set_stays(steps):
    config = policy_of(steps=steps).peft_config["default"]
    assert (config.total_step, config.tinit, config.tfinal) == (steps, round(0.1 * steps), round(0.3 * steps))
    assert config.deltaT == max(1, steps // 100)
    policy = policy_of(kwargs={"tinit": 3, "tfinal": 5, "deltaT": 2})
    adalora.set_schedule(policy, 2 * steps)
    config = policy.peft_config["default"]
    assert (config.tinit, config.tfinal, config.deltaT, config.total_step) == (3, 5, 2, 2 * steps)
    if steps == 10:
        assert train(policy, optimizer_of(policy), range(1, 21))[-1] == RANK * LAYERS


@pytest.mark.parametrize(
    ("steps", "kwargs", "line"),
    [
        (1, {}, "train.max_steps: adalora needs 2 optimizer steps to move ranks in"),
        *(
            (10, kwargs, "leave none to move ranks in")
            for kwargs in ({"tinit": 9}, {"tfinal": 9}, {"tfinal": 10}, {"tinit": 5, "tfinal": 4})
        ),
    ],
    ids=str,
)
def test_a_schedule_without_a_step_to_move_ranks_in_is_refused(steps, kwargs, line):
    with pytest.raises(RecipeError) as caught:
        adalora.set_schedule(policy_of(kwargs=kwargs), steps)
    assert line in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("at", [1, 7])
def test_an_interrupted_allocation_ends_with_the_same_ranks(at):
    steps = 10
    uninterrupted, before = policy_of(steps=steps), policy_of(steps=steps)
    totals = train(uninterrupted, optimizer_of(uninterrupted), range(1, steps + 1))
    assert train(before, optimizer_of(before), range(1, at + 1)) == totals[:at]
    save_policy(Path(), before, {})
    after = policy_of(steps=steps)
    load_policy(Path(), after)
    assert train(after, optimizer_of(after), range(at + 1, steps + 1)) == totals[at:]
    assert kept(after) == kept(uninterrupted)
    assert after.peft_config["default"].rank_pattern == uninterrupted.peft_config["default"].rank_pattern
    assert all(torch.equal(p, q) for p, q in zip(trained(after), trained(uninterrupted), strict=True))


def finished(empty_layer=False) -> PeftModel:
    """A policy whose ranks are allocated; nothing in its first layer may have mattered."""
    policy = policy_of(steps=10)
    optimizer, first = optimizer_of(policy), next(iter(adapted(policy).values()))
    for step in range(1, 11):
        for parameter in trained(policy):
            parameter.grad = torch.randn(parameter.shape)
        for part in (first.lora_A, first.lora_B, first.lora_E):
            part["default"].grad.mul_(0 if empty_layer else 1)
        optimizer.step()
        hooks_of(policy).after_step(policy, step)
    return policy


def plain(folder) -> PeftModel:
    """The adapter as others load it; PEFT takes AdaLoRA's pattern of ranks for LoRA's, and says so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following rank_pattern keys")
        return PeftModel.from_pretrained(base(), folder).eval()


@pytest.mark.parametrize("empty_layer", [False, True])
def test_plain_peft_loads_the_finished_adapter_with_its_ranks_pruned(empty_layer):
    policy = finished(empty_layer)
    ranks = adalora.ranks(policy)
    assert sum(ranks) == RANK * LAYERS
    assert (ranks[0] == 0) is empty_layer
    write_adapter(policy, Path("adapter"), "sandbox:base", None)
    loaded = plain("adapter")
    for layer, rank in zip(adapted(loaded).values(), ranks, strict=True):
        assert (len(layer.lora_E["default"]), len(layer.lora_A["default"])) == (rank, rank)
        assert layer.lora_B["default"].shape[1] == rank
    torch.testing.assert_close(log_probs(loaded), log_probs(policy), rtol=0, atol=1e-5)
    assert (log_probs(policy) - log_probs(base())).abs().max() > 0.1


@pytest.mark.parametrize("empty_layer", [False, True])
def test_a_finished_adapter_is_continued_without_moving_ranks(empty_layer):
    policy = finished(empty_layer)
    write_adapter(policy, Path("adapter"), "sandbox:base", None, base_fingerprint(policy))
    again = continue_adapter(base(), find_adapter("adapter")).eval()
    assert not adalora.allocates(again)
    assert adalora.allocates(policy)
    torch.testing.assert_close(log_probs(again), log_probs(policy), rtol=0, atol=1e-5)
    assert [p for p in trained(again) if p.numel()]
    assert not any(p.requires_grad for name, p in again.named_parameters() if "ranknum" in name)
    write_adapter(again, Path("second"), "sandbox:base", None)
    second = plain("second")
    torch.testing.assert_close(log_probs(second), log_probs(policy), rtol=0, atol=1e-5)
