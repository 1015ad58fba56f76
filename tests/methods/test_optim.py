"""LoRA+ has two learning rates, LoRA-FA the gradient of the full weight, whatever optimizer follows."""

import peft.optimizers.lorafa
import pytest
import torch
from peft import PeftModel
from peft.optimizers import create_lorafa_optimizer
from peft.tuners.lora.layer import LoraLayer
from transformers import AutoModelForCausalLM

from perl.methods.optim import lora_plus_optimizer, precondition_lora_fa
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.recipe.sections import PeftSection
from perl.sandbox import BASE_FOLDER

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0}


def policy_of(method: str, **settings) -> PeftModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
    return attach_adapter(model, adaptation(PeftSection(method=method, rank=4, **settings)))


def trained(policy) -> dict[str, torch.Tensor]:
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}


def give_gradients(policy, seed) -> None:
    """The same gradients whatever the parameters are."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained(policy).values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def take_steps(policy, optimizer, seeds) -> None:
    for seed in seeds:
        give_gradients(policy, seed)
        optimizer.step()


def adamw(policy, **changes) -> torch.optim.Optimizer:
    """AdamW on B, with LoRA-FA's gradient."""
    optimizer = torch.optim.AdamW(trained(policy).values(), **{**ADAMW, **changes})
    precondition_lora_fa(policy, optimizer)
    return optimizer


@pytest.mark.parametrize("ratio", [16.0, 4])
def test_b_has_the_ratio_times_the_learning_rate_of_a_and_everything_is_there_once(ratio):
    policy = policy_of("lora_plus", kwargs={"modules_to_save": ["norm"]})
    optimizer = lora_plus_optimizer(policy, torch.optim.AdamW, ADAMW, ratio)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(rates) > 2 * 4 * 7
    assert rates.keys() == {id(p) for p in trained(policy).values()}
    for name, parameter in trained(policy).items():
        assert rates[id(parameter)] == pytest.approx(1e-3 if "lora_A" in name else ratio * 1e-3)


@pytest.mark.parametrize("settings", [{}, {"alpha": 10.0}, {"kwargs": {"use_rslora": True}}], ids=str)
def test_the_steps_of_lora_fa_are_those_of_pefts_optimizer(monkeypatch, settings):
    monkeypatch.setattr(peft.optimizers.lorafa, "is_bf16_available", lambda: False)  # its float32 branch
    ours, theirs = policy_of("lora_fa", **settings), policy_of("lora_fa", **settings)
    alpha = theirs.peft_config["default"].lora_alpha
    expected = create_lorafa_optimizer(theirs, r=4, lora_alpha=alpha, lr=1e-3)
    expected.param_groups[0]["eps"] = 1e-12  # small enough for its place beside torch's bias correction not to matter
    take_steps(ours, adamw(ours, eps=1e-12), range(5))
    take_steps(theirs, expected, range(5))
    for name, parameter in trained(ours).items():
        assert parameter.abs().max() > 5e-4
        torch.testing.assert_close(parameter, trained(theirs)[name], rtol=1e-4, atol=1e-7)


def test_the_gradient_makes_the_update_the_projection_of_the_full_one():
    policy = policy_of("lora_fa", alpha=10.0)
    optimizer = torch.optim.SGD(trained(policy).values(), lr=1.0)
    precondition_lora_fa(policy, optimizer)
    layer = next(m for m in policy.modules() if isinstance(m, LoraLayer))
    A, B, s = layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.scaling["default"]
    full = torch.randn(B.shape[0], A.shape[1])  # gradient of the weight itself
    B.grad = s * full @ A.T
    optimizer.step()
    _, _, V = torch.linalg.svd(A, full_matrices=False)
    torch.testing.assert_close(s * B @ A, -full @ V.T @ V, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fresh", [True, False])
def test_the_state_survives_and_the_gradient_is_still_replaced(fresh):
    uninterrupted, resumed = policy_of("lora_fa"), policy_of("lora_fa")
    take_steps(uninterrupted, adamw(uninterrupted), range(6))
    optimizer = adamw(resumed)
    take_steps(resumed, optimizer, range(3))
    state = optimizer.state_dict()
    optimizer = adamw(resumed) if fresh else optimizer
    optimizer.load_state_dict(state)
    take_steps(resumed, optimizer, range(3, 6))
    assert all(torch.equal(p, trained(uninterrupted)[name]) for name, p in trained(resumed).items())
