"""A method's hooks are found from its row, and what a method does not need changes nothing."""

import copy

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from perl.methods.hooks import Hooks, factors_of, hooks_of
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.recipe.sections import PeftSection
from perl.sandbox import BASE_FOLDER

BASE = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32).eval()


def policy_of(method: str, **settings) -> PeftModel:
    torch.manual_seed(0)
    return attach_adapter(copy.deepcopy(BASE), adaptation(PeftSection(method=method, **settings)))


def adapted(policy: PeftModel) -> list[torch.nn.Module]:
    return [layer for layer in policy.modules() if hasattr(layer, "lora_A") and layer.lora_A]


@pytest.mark.parametrize("method", ["lora", "vera", "ln_tuning", "full"])
def test_a_method_without_hooks_does_nothing_at_any_of_them(method):
    policy = copy.deepcopy(BASE) if method == "full" else policy_of(method)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    hooks, tensors = hooks_of(policy), {"a": torch.ones(2)}
    assert hooks == Hooks()
    hooks.before_training(policy, 1)
    hooks.after_step(policy, 1)
    hooks.load_state(policy, {})
    hooks.after_training(policy)
    assert hooks.regulariser is None
    assert hooks.log(policy) == hooks.state(policy) == {}
    assert hooks.as_loaded(policy, tensors) == tensors
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())


def test_hooks_are_those_of_the_rows_with_a_module():
    rows = [name for name, row in METHODS.items() if row.hooks]
    assert rows
    for name in rows:
        assert hooks_of(policy_of(name)).method == name


def test_ranks_are_logged_and_factors_drawn_towards_orthogonal_ones():
    """rank/* by counting, the regulariser as loops over entries (Zhang et al. 2023, eq. 4)."""
    policy = policy_of("adalora", rank=2, target_modules=["q_proj"])
    hooks = hooks_of(policy)
    assert hooks.log(policy) == {"rank/mean": 3.0, "rank/min": 3.0, "rank/max": 3.0}  # 1.5 times the rank
    distances = []
    for layer in adapted(policy):
        for rows in (layer.lora_A["default"].tolist(), layer.lora_B["default"].T.tolist()):
            squares = 0.0
            for i, row in enumerate(rows):
                for j, other in enumerate(rows):
                    squares += (sum(a * b for a, b in zip(row, other, strict=True)) - (i == j)) ** 2
            distances.append(squares**0.5)
    weight = policy.peft_config["default"].orth_reg_weight
    assert hooks.regulariser(policy).item() == pytest.approx(weight * sum(distances) / len(distances), rel=1e-5)
    pattern = {f"{i}.lora_E": [True] * rank + [False] * (3 - rank) for i, rank in enumerate((1, 3, 2, 3))}
    policy.peft_config["default"].rank_pattern = pattern
    assert hooks.log(policy) == {"rank/mean": 2.25, "rank/min": 1.0, "rank/max": 3.0}


def test_factors_leave_masked_triples_out_and_compute_what_the_layer_does():
    policy = policy_of("adalora", rank=4, target_modules=["q_proj"]).eval()
    layer = adapted(policy)[0]
    generator = torch.Generator().manual_seed(1)
    x_NI = torch.randn(5, layer.in_features, generator=generator)
    with torch.no_grad():
        layer.lora_E["default"].copy_(torch.randn(6, 1, generator=generator))
        layer.lora_E["default"][[1, 4]] = 0.0
        update_NO = layer(x_NI) - layer.get_base_layer()(x_NI)
    for masked, rank in ((True, 6), (False, 4)):
        A_RI, B_OR = factors_of(layer)(layer, "default", masked=masked)
        assert (len(A_RI), B_OR.shape[1]) == (rank, rank)
        torch.testing.assert_close(x_NI @ A_RI.T @ B_OR.T, update_NO, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        layer.lora_E["default"].zero_()
    A_RI, B_OR = factors_of(layer)(layer, "default", masked=False)
    assert (len(A_RI), B_OR.shape[1]) == (1, 1)
    assert not A_RI.any()
    assert not B_OR.any()
    assert factors_of(adapted(policy_of("lora"))[0]) is None
