"""Each guard lets a good run pass and stops a broken one with a message that says what broke."""

import copy
import logging
import math
import re
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from perl.errors import EXIT_FAILED, BrokenPromiseError
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter
from perl.policy.fingerprint import base_fingerprint
from perl.policy.guards import (
    PATIENCE,
    RELOAD_TOLERANCE,
    START_TOLERANCE,
    Movement,
    check_base_unchanged,
    check_optimizer,
    check_saved_adapter,
    check_saved_model,
    check_start,
)
from perl.policy.model import load_base
from perl.policy.precision import compute_dtype
from perl.policy.reference import Reference
from perl.policy.save_adapter import write_adapter
from perl.recipe.sections import ModelSection, PeftSection
from tests.a_few_methods import each

PROBE = torch.tensor([[6, 7, 78, 8, 9, 96, 10, 1], [12, 13, 14, 77, 96, 5, 78, 1]])


ADAPTERS = [name for name, method in METHODS.items() if method.config]


@pytest.fixture
def policy():
    return moved("lora")


@pytest.fixture(autouse=True)
def _no_accelerator():
    """Each test has an accelerator of its own, if any."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def new(method: str, dtype: str = "float32"):
    """A policy with a small new adapter."""
    rank = {"rank": 2} if "rank" in METHODS[method].settings else {}
    base = load_base(ModelSection(dtype=dtype), torch.device("cpu"))
    return attach_adapter(base, adaptation(PeftSection(method=method, **rank))).eval()


def moved(method: str, dtype: str = "float32"):
    """A policy whose adapter is no longer the identity."""
    policy = new(method, dtype)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape)
    return policy


def log_probs(policy: torch.nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    """(B, T-1), by one forward pass and a softmax."""
    with torch.no_grad():
        log_probs_BTV = policy(input_ids=ids_BT).logits[:, :-1].log_softmax(-1)
    return log_probs_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]


def test_an_optimizer_without_some_trainable_parameters_is_stopped(policy):
    assert BrokenPromiseError.exit_code == EXIT_FAILED  # it is not the user's mistake
    named = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    check_optimizer(policy, torch.optim.SGD([{"params": parameters[:5]}, {"params": parameters[5:]}]))
    message = f"1 trainable parameters are not in the optimizer and would not move: {named[3][0]}"
    with pytest.raises(BrokenPromiseError, match=message.replace(".", r"\.")):
        check_optimizer(policy, torch.optim.SGD([p for name, p in named if name != named[3][0]]))
    copies = [p.detach().clone().requires_grad_() for p in parameters]
    with pytest.raises(BrokenPromiseError, match=f"{len(copies)} trainable parameters are not in the optimizer"):
        check_optimizer(policy, torch.optim.SGD(copies))


def test_a_base_that_changed_is_stopped(policy):
    fingerprint = base_fingerprint(load_base(ModelSection(), torch.device("cpu")))
    check_base_unchanged(policy, fingerprint)
    weight = next(p for p in policy.parameters() if not p.requires_grad)
    before = weight.data[0, 0].clone()
    weight.data[0, 0] += 1e-3
    with pytest.raises(BrokenPromiseError, match=f"{fingerprint[:12]} before, {base_fingerprint(policy)[:12]} now"):
        check_base_unchanged(policy, fingerprint)
    weight.data[0, 0] = before
    check_base_unchanged(policy, fingerprint)
    policy.merge_adapter()
    with pytest.raises(BrokenPromiseError, match="the base's weights changed"):
        check_base_unchanged(policy, fingerprint)


@pytest.mark.parametrize("method", each(ADAPTERS))
def test_a_policy_that_starts_at_its_reference_and_is_saved_as_it_was_trained_passes(method):
    policy = new(method).train()
    before = [(p.clone(), p.requires_grad) for p in policy.parameters()]
    assert check_start(policy, Reference(policy), must=True) <= START_TOLERANCE
    assert policy.training
    assert all(
        torch.equal(p, q) and p.requires_grad == g for p, (q, g) in zip(policy.parameters(), before, strict=True)
    )
    policy = moved(method)
    write_adapter(policy, Path("adapter"), "sandbox:base", None)
    found = check_saved_adapter(policy, Path("adapter"), PROBE)
    assert found <= RELOAD_TOLERANCE
    if method == "lora":  # one that recomputes activations is compared like any other
        policy.enable_input_require_grads()  # a hook on the embeddings, to which the head is tied
        policy.activation_checkpointing_enable()
        assert check_saved_adapter(policy, Path("adapter"), PROBE) <= RELOAD_TOLERANCE


@pytest.mark.parametrize(
    ("method", "dtype", "autocast"),
    [("lora", "bfloat16", True), ("dora", "float32", True), ("pissa", "bfloat16", False), ("vera", "bfloat16", False)],
)
def test_half_precision_hides_no_difference_and_makes_none(method, dtype, autocast):
    policy = moved(method, dtype)
    write_adapter(policy, Path("adapter"), "sandbox:base", None)
    exact = copy.deepcopy(policy).float()
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(policy) if autocast else policy
    assert (compute_dtype(prepared) == torch.bfloat16) is (autocast or dtype == "bfloat16")
    assert check_saved_adapter(prepared, Path("adapter"), PROBE) <= RELOAD_TOLERANCE
    started = new(method, dtype)
    assert check_start(started, Reference(started), must=True) <= START_TOLERANCE
    expected = log_probs(exact, PROBE)
    with torch.no_grad():
        for model in (policy, exact):
            max((p for p in model.parameters() if p.requires_grad), key=torch.numel).add_(2**-6)
    with pytest.raises(BrokenPromiseError, match="is not the one that was trained") as caught:
        check_saved_adapter(prepared, Path("adapter"), PROBE)
    found = float(re.search(r"differ by (\S+)", str(caught.value)).group(1))
    assert found == pytest.approx((log_probs(exact, PROBE) - expected).abs().max().item(), rel=0.02, abs=2e-4)


def test_a_saved_adapter_from_before_the_last_steps_or_tampered_with_is_stopped_with_how_far_it_is(policy):
    write_adapter(policy, Path("adapter"), "sandbox:base", None)
    file = Path("adapter/adapter_model.safetensors")
    whole = load_file(file)
    then = log_probs(policy, PROBE)
    said = r"adapter is not the one that was trained: log-probabilities differ by (\S+) \(at most 1e-04\)"
    for value in (float("nan"), 1.0):
        tensors = {name: tensor.clone() for name, tensor in whole.items()}
        tensors[max(tensors)][0, 0] = value
        save_file(tensors, file)
        with pytest.raises(BrokenPromiseError, match=said) as caught:
            check_saved_adapter(policy, Path("adapter"), PROBE)
        there = PeftModel.from_pretrained(load_base(ModelSection(), torch.device("cpu")), "adapter").eval()
        expected = (log_probs(there, PROBE) - then).abs().max().nan_to_num(math.inf).item()
        assert float(re.search(said, str(caught.value)).group(1)) == pytest.approx(expected, rel=0.01)
    save_file(whole, file)
    assert check_saved_adapter(policy, Path("adapter"), PROBE) <= RELOAD_TOLERANCE
    with torch.no_grad():
        next(p for n, p in policy.named_parameters() if "layers.3.mlp.down_proj.lora_B" in n).add_(0.05)
    expected = (log_probs(policy, PROBE) - then).abs().max().item()
    with pytest.raises(BrokenPromiseError, match=said) as caught:
        check_saved_adapter(policy, Path("adapter"), PROBE)
    assert float(re.search(said, str(caught.value)).group(1)) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("dtype", "autocast"), [("float32", False), ("bfloat16", True)])
def test_a_policy_that_starts_elsewhere_is_stopped_or_only_said_with_how_far(dtype, autocast, caplog):
    """In float32, whatever the policy computes in; by random tokens, the same at each start."""
    policy = new("lora", dtype)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter += 0.002 * torch.randn(parameter.shape)
    exact = copy.deepcopy(policy).float()
    ids = torch.randint(exact.config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    with exact.disable_adapter():
        of_the_base = log_probs(exact, ids)
    expected = (log_probs(exact, ids) - of_the_base).abs().max().item()
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(policy) if autocast else policy
    with pytest.raises(BrokenPromiseError, match=r"differs from its reference by .* nats \(at most 1e-04\)") as caught:
        check_start(prepared, Reference(prepared), must=True)
    assert float(re.search(r"by (\S+) nats", str(caught.value)).group(1)) == pytest.approx(expected, rel=0.02)
    with caplog.at_level(logging.WARNING, logger="perl"):
        assert check_start(prepared, Reference(prepared), must=False) == pytest.approx(expected, rel=0.01)
    assert "this adapter does not start as the base" in caplog.text
    assert check_start(prepared, Reference(prepared, "initial"), must=True) == 0.0


def a_step(movement: Movement, optimizer: torch.optim.Optimizer, gradients: dict) -> None:
    """An optimizer step with these gradients."""
    for parameter, gradient in gradients.items():
        parameter.grad = torch.full_like(parameter, gradient)
    movement.before_step(optimizer)
    optimizer.step()
    movement.after_step(skipped=False)
    optimizer.zero_grad()


@pytest.fixture
def pair():
    """Two trained tensors."""
    return torch.nn.ParameterDict({"one": torch.ones(3), "other": torch.ones(3)})


def test_tensors_that_moved_once_are_proven_and_may_have_waited(pair):
    movement = Movement(pair)
    for learning_rate, gradient in ((0.0, 1.0), (0.1, 0.0)):  # a warm-up's first step, groups whose rewards agree
        optimizer = torch.optim.SGD(pair.parameters(), lr=learning_rate)
        for _ in range(2 * PATIENCE):
            a_step(movement, optimizer, {pair["one"]: gradient, pair["other"]: gradient})
    assert not movement.proven  # what could move nothing proves nothing
    optimizer, movement = torch.optim.SGD(pair.parameters(), lr=0.1), Movement(pair)
    pair["one"].grad = torch.ones(3)
    movement.before_step(optimizer)
    movement.after_step(skipped=True)  # by mixed precision, which is no failure
    assert not movement.proven
    optimizer.zero_grad()
    movement = Movement(pair)
    for _ in range(PATIENCE - 1):
        a_step(movement, optimizer, {pair["one"]: 1.0})
        assert not movement.proven
    a_step(movement, optimizer, {pair["other"]: 1.0})
    assert movement.proven


class Forgetful(torch.optim.SGD):
    """Takes no step, as one does whose tensors were replaced after it was made."""

    def step(self, *_):
        pass


def test_a_tensor_that_does_not_move_or_gets_no_gradient_is_stopped_unless_it_is_an_expert(pair, caplog):
    optimizer, movement = Forgetful(pair.parameters(), lr=0.1), Movement(pair)
    with pytest.raises(BrokenPromiseError, match=r"2 trained tensors have a gradient and did not move .*: one, other "):
        a_step(movement, optimizer, {pair["one"]: 1.0, pair["other"]: 1.0})
    pair = torch.nn.ParameterDict({"one": torch.ones(3), "other": torch.ones(3)})
    optimizer, movement = torch.optim.SGD(pair.parameters(), lr=0.1), Movement(pair)
    for _ in range(PATIENCE - 1):
        a_step(movement, optimizer, {pair["one"]: 1.0})
    with pytest.raises(BrokenPromiseError, match=f"1 trained tensors got no gradient in {PATIENCE} updates: other"):
        a_step(movement, optimizer, {pair["one"]: 1.0})
    pair = torch.nn.ParameterDict({"one": torch.ones(3), "expert": torch.ones(3)})
    optimizer, movement = torch.optim.SGD(pair.parameters(), lr=0.1), Movement(pair)
    with caplog.at_level(logging.WARNING, logger="perl"):
        for _ in range(PATIENCE):
            a_step(movement, optimizer, {pair["one"]: 1.0})
    assert "experts may not have been chosen yet" in caplog.text
    assert movement.proven


@pytest.mark.parametrize(("optimizer", "lr", "gradient"), [("SGD", 0.1, 1e-8), ("AdamW", 1e-9, 1.0)])
def test_a_step_below_the_spacing_of_the_numbers_is_said_and_stops_the_run_only_if_nothing_moves(
    pair, caplog, optimizer, lr, gradient
):
    held = getattr(torch.optim, optimizer)(pair.parameters(), lr=lr)  # 1 - 1e-9 is 1 in float32
    movement = Movement(pair)
    with caplog.at_level(logging.WARNING, logger="perl"):
        for _ in range(PATIENCE - 1):
            a_step(movement, held, {pair["one"]: gradient})
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "1 trained tensors did not move" in said[0]
    assert "float32 (one)" in said[0]
    with pytest.raises(BrokenPromiseError, match=f"nothing that is trained has moved in {PATIENCE - 1} updates"):
        movement.at_end()
    with pytest.raises(BrokenPromiseError, match=f"nothing that is trained has moved in {PATIENCE} updates"):
        a_step(movement, held, {pair["one"]: gradient})


def test_a_model_that_was_saved_whole_is_compared_bit_for_bit():
    """Also one whose experts are stored one by one."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 8, "head_dim": 8, "vocab_size": 32}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 2}
    experts = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **counts, num_experts_per_tok=1))
    for folder, model, changed, said in (
        (
            "model",
            load_base(ModelSection(), torch.device("cpu")),
            "model.norm.weight",
            r"^the model in model is not the one .*: model\.norm\.weight has other numbers$",
        ),
        (
            "experts",
            experts,
            "model.layers.0.mlp.experts.1.down_proj.weight",
            r"model\.layers\.0\.mlp\.experts\.1\.down_proj\.weight has other numbers$",
        ),
    ):
        model.save_pretrained(folder)
        check_saved_model(model, Path(folder))
        file = Path(folder) / "model.safetensors"
        tensors = load_file(file)
        assert folder == "model" or tensors.keys() - model.state_dict().keys()
        tensors[changed].view(torch.int32)[-1] ^= 1
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(BrokenPromiseError, match=said):
            check_saved_model(model, Path(folder))
