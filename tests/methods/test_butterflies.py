"""BOFT without PEFT's CUDA extension: PEFT's own numbers, any number of butterflies, no build."""

import copy
import logging
from pathlib import Path

import pytest
import torch
from peft import BOFTConfig, PeftModel, get_peft_model
from peft.tuners.boft import layer as boft_layer
from transformers import AutoModelForCausalLM

from perl.policy.attach import attach_adapter, continue_adapter
from perl.policy.fingerprint import base_fingerprint
from perl.policy.save_adapter import reload_difference, write_adapter
from perl.policy.saved.adapter import find_adapter
from perl.sandbox import BASE_FOLDER

TARGETS = ["q_proj", "down_proj"]


@pytest.fixture(autouse=True)
def _as_imported(monkeypatch):
    monkeypatch.setattr(boft_layer, "_FBD_CUDA", None)


@pytest.fixture
def builds(monkeypatch):
    """How often PEFT has tried to build its extension, which fails."""
    tried = []

    def load(**_):
        tried.append(1)
        raise OSError("no compiler")

    monkeypatch.setattr("torch.utils.cpp_extension.load", load)
    return tried


@pytest.fixture(scope="module")
def published():
    return AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32).eval()


def config(butterflies=1):
    return BOFTConfig(boft_block_size=4, boft_n_butterfly_factor=butterflies, target_modules=TARGETS)


def moved(policy) -> PeftModel:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy.eval()


def gradients(policy):
    ids = torch.arange(8)[None]
    logits = policy(input_ids=ids).logits
    (logits**2).mean().backward()
    return logits.detach(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension", "ignore:Setting boft_n_butterfly")
def test_nothing_is_built_and_the_policy_is_that_of_plain_peft(published, builds):
    plain = moved(get_peft_model(copy.deepcopy(published), config()))
    assert len(builds) == len([m for m in plain.modules() if isinstance(m, boft_layer.BOFTLayer)])
    builds.clear()
    ours = moved(attach_adapter(copy.deepcopy(published), config()))
    (logits, grads), (expected, expected_grads) = gradients(ours), gradients(plain)
    assert torch.equal(logits, expected)
    assert grads.keys() == expected_grads.keys()
    assert all(torch.equal(grads[name], expected_grads[name]) for name in grads)
    write_adapter(ours, Path("adapter"), "sandbox:base", None, base_fingerprint(ours))
    assert reload_difference(ours, Path("adapter"), torch.arange(8)[None]) == 0.0
    continue_adapter(copy.deepcopy(published), find_adapter("adapter"))
    assert not builds


def test_as_many_butterflies_as_were_asked_for(published, builds, caplog):
    with caplog.at_level(logging.WARNING, logger="perl"):
        policy = moved(attach_adapter(copy.deepcopy(published), config(2)))
    assert "plain PEFT loads it only on a GPU" in caplog.text
    layers = [m for m in policy.modules() if isinstance(m, boft_layer.BOFTLayer)]
    assert {m.boft_R["default"].shape[0] for m in layers} == {2}
    for layer in layers:  # whose product rotates: R R^T = 1, and R is neither 1 nor block-diagonal
        R_II, _ = layer.get_delta_weight("default")
        torch.testing.assert_close(R_II @ R_II.T, torch.eye(len(R_II)), rtol=0, atol=1e-5)
        blocks = [R_II[i : i + 4, i : i + 4] for i in range(0, len(R_II), 4)]
        assert (R_II - torch.block_diag(*blocks)).abs().max() > 1e-3
    write_adapter(policy, Path("adapter"), "sandbox:base", None)
    assert reload_difference(policy, Path("adapter"), torch.arange(8)[None]) == 0.0
    assert not builds
