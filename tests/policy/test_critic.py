"""A critic on the policy's base against a model of its own with merged weights; what is frozen stays frozen."""

import copy
import json

import pytest
import torch
from peft import get_peft_model
from torch import nn

from perl.errors import ModelError
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.packing.forward import choose_passes, score
from perl.packing.fused_lora import fuse_lora
from perl.packing.head import add_scored_forward, logit_settings
from perl.packing.memory import measure
from perl.packing.rows import Row
from perl.policy.attach import attach_adapter, without_harmless_warnings
from perl.policy.critic import Critic, critic_parameters, critic_shapes, facts_of_base, find_critic
from perl.policy.fingerprint import base_fingerprint
from perl.policy.model import base_of
from perl.recipe.sections import PeftSection
from tests.a_few_methods import A_FEW
from tests.oracles.ppo import MergedCritic
from tests.oracles.two_trainers import ADAPTERS, OFFSET, base, displace, relative_difference

PROMPTS = [[5, 9, 12], [5, 9, 12], [7, 3, 4, 8, 21]]
COMPLETIONS = [[6, 2, 17, 1], [11, 1], [14, 15, 30]]


def policy_of(adapter: str = "lora", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Off its base, prepared as a trainer does."""
    with without_harmless_warnings():
        policy = get_peft_model(copy.deepcopy(base(dtype)), copy.deepcopy(ADAPTERS[adapter]))
    displace({name: p for name, p in policy.named_parameters() if p.requires_grad}, OFFSET)
    fuse_lora(policy)
    model = base_of(policy)
    add_scored_forward(model, logit_settings(model.config, temperature=1.0, float32=False))
    return policy


def critic_of(policy: nn.Module, rank: int = 3) -> Critic:
    critic = Critic(policy, rank=rank, seed=5)
    displace(critic.tensors, 0.1)
    return critic


def rows() -> list[Row]:
    every = [torch.ones(len(completion), dtype=torch.bool) for completion in COMPLETIONS]
    triples = zip(PROMPTS, COMPLETIONS, every, strict=True)
    return [Row(torch.tensor(prompt), torch.tensor(completion), scored) for prompt, completion, scored in triples]


def values(policy: nn.Module, critic: Critic, *, packed: bool = False, groups=((0,), (1,), (2,))) -> torch.Tensor:
    return score(policy, rows(), groups, packed=packed, columns=4, entropy="none", read=critic.values)[0]


def gradient(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: t.grad.clone() for name, t in tensors.items()}
    for tensor in tensors.values():
        tensor.grad = None
    return found


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_values_and_gradients_are_those_of_merged_weights_packed_or_padded(adapter, dtype):
    policy = policy_of(adapter, dtype)
    critic = critic_of(policy)
    plain = MergedCritic(base(dtype), critic.state())
    wanted = torch.stack([nn.functional.pad(row, (0, 4 - len(row))) for row in plain.values(PROMPTS, COMPLETIONS)])
    weights = torch.sin(torch.arange(12.0, dtype=dtype)).view(3, 4)
    (wanted.tanh() * weights).sum().backward()
    slopes = gradient(plain.tensors)
    assert wanted.abs().min() < 0.01 < wanted.abs().max()  # padding, and values that differ
    close = 1e-5 if dtype == torch.float32 else 1e-7  # transformers' norms are in float32
    assert choose_passes(policy, padding_free=True, share=True).packed
    for packed, groups in ((False, ((0,), (1,), (2,))), (True, ((0,), (1,), (2,))), (True, ((0, 1), (2,)))):
        with critic.in_place_of(policy):
            found = values(policy, critic, packed=packed, groups=groups)
            (found.tanh() * weights).sum().backward()
        torch.testing.assert_close(found, wanted, rtol=close, atol=close)
        assert relative_difference(gradient(critic.tensors), slopes) <= close
        assert all(p.grad is None for p in policy.parameters())


@pytest.mark.parametrize("method", A_FEW)
def test_it_stands_on_the_base_of_every_method(method):
    given = {"rank": 4} if "rank" in METHODS[method].settings else {}
    policy = attach_adapter(copy.deepcopy(base(torch.float32)), adaptation(PeftSection(method=method, **given)))
    displace({name: p for name, p in policy.named_parameters() if p.requires_grad}, OFFSET)
    model = base_of(policy)
    add_scored_forward(model, logit_settings(model.config, temperature=1.0, float32=False))
    critic = critic_of(policy)
    wanted = MergedCritic(base(torch.float32), critic.state()).values(PROMPTS, COMPLETIONS)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    with critic.in_place_of(policy):
        found = values(policy, critic)
        found.sum().backward()
    for row, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(row[: len(expected)], expected, rtol=1e-5, atol=1e-5)
    assert all(tensor.grad is not None for tensor in critic.parameters)
    assert all(p.grad is None for p in policy.parameters())
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == trained


def test_the_policy_is_itself_again_and_the_critic_no_part_of_it():
    policy = policy_of()
    before = score(policy, rows(), ((0,), (1,), (2,)), packed=False, columns=4)[0]
    names, trained = set(dict(policy.named_modules())), [n for n, p in policy.named_parameters() if p.requires_grad]
    critic = critic_of(policy)
    with critic.in_place_of(policy):
        assert any(module._forward_hooks for module in policy.modules())
        values(policy, critic)
    assert torch.equal(score(policy, rows(), ((0,), (1,), (2,)), packed=False, columns=4)[0], before)
    assert not any(module._forward_hooks for module in policy.modules())
    assert set(dict(policy.named_modules())) == names
    assert [name for name, p in policy.named_parameters() if p.requires_grad] == trained
    with pytest.raises(ZeroDivisionError), critic.in_place_of(policy):
        _ = 1 / 0
    assert not any(module._forward_hooks for module in policy.modules())


def test_it_starts_at_zero_in_float32_and_is_drawn_from_its_seed_alone():
    policy = policy_of("lora", torch.bfloat16)
    before = torch.random.get_rng_state()
    critic = Critic(policy, rank=4, seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {tensor.dtype for tensor in critic.tensors.values()} == {torch.float32}
    with critic.in_place_of(policy):
        assert torch.equal(values(policy, critic), torch.zeros(3, 4))
    again, other = (Critic(policy, rank=4, seed=seed).state() for seed in (5, 6))
    assert all(torch.equal(again[name], tensor) for name, tensor in critic.state().items())
    assert relative_difference(other, again) > 0.1


def test_it_comes_back_from_a_file_and_one_of_another_shape_is_refused(tmp_path):
    policy = policy_of()
    critic, other = critic_of(policy), Critic(policy, rank=3, seed=9)
    critic.export(tmp_path / "critic", facts_of_base(policy, None), {"gamma": 1.0})
    about = json.loads((tmp_path / "critic" / "critic.json").read_text())
    assert (about["rank"], about["gamma"], about["base_dtype"]) == (3, 1.0, "float32")
    assert about["base_fingerprint"] == base_fingerprint(base(torch.float32))
    assert sorted(path.name for path in (tmp_path / "critic").iterdir()) == ["critic.json", "critic.safetensors"]
    other.load(tmp_path / "critic" / "critic.safetensors")
    assert all(torch.equal(other.state()[name], tensor) for name, tensor in critic.state().items())
    with pytest.raises(ModelError, match=r"^train.critic_rank: [^\n]* rank 3[^\n]* rank 4[^\n]*$"):
        Critic(policy, rank=4, seed=9).load(tmp_path / "critic" / "critic.safetensors")
    critic.tensors["value_head.weight"] = nn.Parameter(torch.zeros(1, 7))
    critic.save(tmp_path / "narrow.safetensors")
    with pytest.raises(ModelError, match=r"^model.name: [^\n]*value_head.weight is 1 x 7 there, 1 x 32 here[^\n]*$"):
        other.load(tmp_path / "narrow.safetensors")


def test_one_that_was_trained_on_other_weights_of_its_base_is_refused_in_whatever_type_they_are_loaded(tmp_path):
    policy = policy_of()
    critic_of(policy).export(tmp_path / "critic", facts_of_base(policy, None), {})
    file = tmp_path / "critic" / "critic.safetensors"
    Critic(policy_of(dtype=torch.float64), rank=3, seed=0).check(file)  # of the same shape
    other = copy.deepcopy(base(torch.float32))
    with torch.no_grad():
        other.get_input_embeddings().weight[0, 0] += 1e-3
    changed = Critic(get_peft_model(other, copy.deepcopy(ADAPTERS["lora"])), rank=3, seed=0)
    before = changed.state()
    with pytest.raises(ModelError, match=r"^train.critic_adapter: [^\n]*other weights[^\n]* then, [^\n]*$"):
        changed.load(file)
    assert all(torch.equal(tensor, before[name]) for name, tensor in changed.state().items())
    halved = policy_of(dtype=torch.bfloat16)
    critic_of(halved).export(tmp_path / "half", facts_of_base(halved, None), {})
    widened = get_peft_model(copy.deepcopy(base(torch.bfloat16)).float(), copy.deepcopy(ADAPTERS["lora"]))
    Critic(widened, rank=3, seed=0).load(tmp_path / "half" / "critic.safetensors")


def test_an_exported_critic_is_looked_at_by_its_header_alone(tmp_path):
    policy = policy_of()
    shapes = critic_shapes(base(torch.float32), 3)
    assert critic_parameters(base(torch.float32), 3) == sum(t.numel() for t in critic_of(policy).parameters)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in critic_of(policy).tensors.items()}
    facts = {"base": "somebody/model", "base_fingerprint": "0" * 64}
    critic_of(policy).export(tmp_path / "run" / "critic", facts, {})
    for name in (tmp_path / "run", tmp_path / "run" / "critic"):  # a run is named where its critic is meant
        saved = find_critic(str(name), "somebody/model")
        saved.check_shapes(3, shapes)
    with pytest.raises(ModelError, match=r"^train.critic_rank: [^\n]* rank 3[^\n]* rank 8[^\n]*$"):
        saved.check_shapes(8, critic_shapes(base(torch.float32), 8))
    with pytest.raises(ModelError, match=r"^model.name: [^\n]*another base[^\n]*$"):
        saved.check_shapes(3, {**shapes, "value_head.weight": (1, 7)})
    with pytest.raises(ModelError, match=r"^train.critic_adapter: [^\n]*made for somebody/model, not for other/model"):
        find_critic(str(tmp_path / "run"), "other/model")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "critic.safetensors").write_bytes(b"x" * 100)
    for name, words in {"absent": "no such folder", "empty": "is absent", "broken": "cannot be read"}.items():
        with pytest.raises(ModelError, match=rf"^train.critic_adapter: [^\n]*{name}[^\n]*{words}[^\n]*$"):
            find_critic(str(tmp_path / name))


def test_without_an_adapter_there_is_no_base_for_it():
    with pytest.raises(ModelError, match=r"^peft.method: [^\n]*frozen base[^\n]*$"):
        Critic(base(torch.float32), rank=4, seed=0)


def test_a_pass_of_the_critic_is_measured_by_itself_and_keeps_more_than_a_small_adapter():
    policy = policy_of("ia3", torch.bfloat16)
    critic = critic_of(policy)
    alone = measure(policy, packed=False)
    with critic.in_place_of(policy):
        beside = measure(policy, packed=False, read=critic.values)
    assert beside.kept > 1.5 * alone.kept
    larger = alone.at_least(beside)
    assert (larger.kept, larger.fixed) == (beside.kept, max(alone.fixed, beside.fixed))
