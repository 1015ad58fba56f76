"""Each guard lets a good run pass and stops a broken one with a message that says what broke."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from perl.adapter import attach_adapter
from perl.checkpoint import write_adapter
from perl.errors import EXIT_FAILED, BrokenPromiseError
from perl.guards import RELOAD_TOLERANCE, check_base_unchanged, check_optimizer, check_saved_adapter
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.model import base_fingerprint, load_base
from perl.recipe.sections import ModelSection, PeftSection

PROBE = torch.tensor([[6, 7, 78, 8, 9, 96, 10, 1], [12, 13, 14, 77, 96, 5, 78, 1]])


@pytest.fixture
def policy():
    return moved("lora")


def moved(method: str):
    """A policy whose adapter is no longer the identity."""
    base = load_base(ModelSection(), torch.device("cpu"))
    policy = attach_adapter(base, adaptation(PeftSection(method=method, rank=2)))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape)
    return policy.eval()


def test_an_optimizer_with_every_trainable_parameter_passes(policy):
    trained = [p for p in policy.parameters() if p.requires_grad]
    check_optimizer(policy, torch.optim.SGD([{"params": trained[:5]}, {"params": trained[5:]}]))


def test_an_optimizer_without_some_trainable_parameters_is_stopped(policy):
    named = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
    message = f"1 trainable parameters are not in the optimizer and would not move: {named[3][0]}"
    with pytest.raises(BrokenPromiseError, match=message.replace(".", r"\.")):
        check_optimizer(policy, torch.optim.SGD([p for name, p in named if name != named[3][0]]))


def test_an_optimizer_of_copies_is_stopped(policy):
    copies = [p.detach().clone().requires_grad_() for p in policy.parameters() if p.requires_grad]
    with pytest.raises(BrokenPromiseError, match=f"{len(copies)} trainable parameters are not in the optimizer"):
        check_optimizer(policy, torch.optim.SGD(copies))


def test_a_base_that_is_what_was_loaded_passes(policy):
    fingerprint = base_fingerprint(load_base(ModelSection(), torch.device("cpu")))
    check_base_unchanged(policy, fingerprint)


def test_a_base_that_changed_is_stopped(policy):
    fingerprint = base_fingerprint(policy)
    next(p for p in policy.parameters() if not p.requires_grad).data[0, 0] += 1e-3
    with pytest.raises(BrokenPromiseError, match=f"{fingerprint[:12]} before, {base_fingerprint(policy)[:12]} now"):
        check_base_unchanged(policy, fingerprint)


def test_merging_the_adapter_into_the_base_is_stopped(policy):
    fingerprint = base_fingerprint(policy)
    policy.merge_adapter()
    with pytest.raises(BrokenPromiseError, match="the base's weights changed"):
        check_base_unchanged(policy, fingerprint)


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_adapter_that_is_the_trained_one_passes(method):
    policy = moved(method)
    write_adapter(policy, Path("adapter"), "sandbox:base", None)
    assert check_saved_adapter(policy, Path("adapter"), PROBE) <= RELOAD_TOLERANCE


def test_a_saved_adapter_from_before_the_last_steps_is_stopped(policy):
    write_adapter(policy, Path("adapter"), "sandbox:base", None)
    with torch.no_grad():
        next(p for n, p in policy.named_parameters() if "layers.3.mlp.down_proj.lora_B" in n).add_(0.05)
    with pytest.raises(
        BrokenPromiseError, match="adapter is not the one that was trained: log-probabilities differ by"
    ):
        check_saved_adapter(policy, Path("adapter"), PROBE)


@pytest.mark.parametrize("value", [float("nan"), 1.0])
def test_a_saved_adapter_that_was_tampered_with_is_stopped(policy, value):
    write_adapter(policy, Path("adapter"), "sandbox:base", None)
    file = Path("adapter/adapter_model.safetensors")
    tensors = load_file(file)
    tensors[max(tensors)][0, 0] = value
    save_file(tensors, file)
    with pytest.raises(BrokenPromiseError, match="at most 1e-04"):
        check_saved_adapter(policy, Path("adapter"), PROBE)


def test_a_broken_promise_is_not_the_users_mistake():
    assert BrokenPromiseError.exit_code == EXIT_FAILED
