"""Merged weights are all that an engine needs: complete layers, biases, modules that are trained whole."""

import copy

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from perl.errors import ModelError
from perl.methods.registry import METHODS
from perl.policy.model import base_fingerprint
from perl.rollouts.sync import base_update, choose_form, merged_update
from tests.rollouts.served_updates import distance, engine_of, fresh, perturbed, policy_of

# PEFT's advice about training one of two tied weights, which is what some tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")


def with_biases(tied=False):
    """A small model with biases in attention, all its numbers random."""
    config = Qwen2Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=128, tie_word_embeddings=tied,
    )  # fmt: skip
    return perturbed(Qwen2ForCausalLM(config))


def experts():
    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, vocab_size=128, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("eager")  # the default has no float64
    return perturbed(model)


@pytest.mark.parametrize(
    ("method", "kwargs"),
    [
        ("lora", {"lora_bias": True}),
        ("lora", {"modules_to_save": ["model.norm"]}),
        ("miss", {"init_weights": "bat"}),
        ("miss", {"init_weights": "mini", "mini_r": 2}),
    ],
    ids=str,
)
def test_variants_that_are_no_lora_are_merged(method, kwargs):
    model = with_biases()
    policy = policy_of(method, copy.deepcopy(model), kwargs=kwargs, target_modules=["q_proj", "k_proj"])
    assert METHODS[method].update_rank(policy.peft_config["default"]) is None
    plan = choose_form(policy)
    assert plan.form == "merged"
    assert distance(engine_of(merged_update(policy, "v1"), copy.deepcopy(model)), policy) <= 1e-5
    assert distance(model, policy) > 0.02


@pytest.mark.parametrize(
    ("targets", "changed", "sent"),
    [
        (["q_proj"], ["self_attn.q_proj"], ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        (["up_proj"], ["mlp.up_proj"], ["mlp.up_proj", "mlp.gate_proj"]),
        (["down_proj"], ["mlp.down_proj"], ["mlp.down_proj"]),
    ],
)  # fmt: skip
def test_merged_layers_that_vllm_loads_together_are_complete(targets, changed, sent):
    model = with_biases()
    policy = policy_of("dora", copy.deepcopy(model), target_modules=targets)
    update = merged_update(policy, "v1")
    parts = [f"{layer}.weight" for layer in sent]
    parts += [f"{layer}.bias" for layer in sent if layer[-6:] in ("q_proj", "k_proj", "v_proj")]
    assert set(update.tensors) == {f"model.layers.{i}.{part}" for i in (0, 1) for part in parts}
    before = dict(model.named_parameters())
    moved = {name for name, tensor in update.tensors.items() if not torch.equal(tensor, before[name])}
    assert moved == {f"model.layers.{i}.{layer}.weight" for i in (0, 1) for layer in changed}
    assert distance(engine_of(update, model), policy) <= 1e-5


@pytest.mark.parametrize("method", ["ia3", "road", "oft"])
def test_changed_biases_are_sent(method):
    model = with_biases()
    policy = policy_of(method, copy.deepcopy(model))
    update = merged_update(policy, "v1")
    before = dict(model.named_parameters())
    assert any(n.endswith("bias") and not torch.equal(t, before[n]) for n, t in update.tensors.items()) == (
        method != "oft"
    )
    assert distance(engine_of(update, model), policy) <= 1e-5


def test_two_parameters_of_one_module():
    model = experts()
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    policy = policy_of("lora", copy.deepcopy(model), kwargs={"target_parameters": targets}, target_modules=["q_proj"])
    assert METHODS["lora"].update_rank(policy.peft_config["default"]) is None
    update = merged_update(policy, "v1")
    assert choose_form(policy).form == "merged"
    assert {f"model.layers.0.{name}" for name in targets} <= set(update.tensors)
    assert distance(engine_of(update, copy.deepcopy(model)), policy) <= 1e-5
    assert distance(model, policy) > 0.02


@pytest.mark.parametrize("whole", [["embed_tokens"], ["lm_head"]])
def test_embeddings_trained_apart_from_the_head_they_are_tied_to_are_refused(whole):
    policy = policy_of("lora", kwargs={"modules_to_save": whole})
    for asked in (lambda: choose_form(policy), lambda: merged_update(policy, "v1")):
        with pytest.raises(ModelError, match="trained apart from what it is tied to") as caught:
            asked()
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("whole", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head", "model.norm"]])
def test_modules_trained_whole_are_sent(whole):
    model = with_biases()
    policy = policy_of("lora", copy.deepcopy(model), kwargs={"modules_to_save": whole}, target_modules=["o_proj"])
    before = base_fingerprint(policy)
    update = merged_update(policy, "v1")
    assert len(update.tensors) == 2 + len(whole)
    assert distance(engine_of(update, model), policy) <= 1e-5
    assert base_fingerprint(policy) == before


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_of_single_tokens_are_sent_also_where_the_head_shares_them(tied):
    model = with_biases(tied)
    policy = fresh("lora", copy.deepcopy(model), kwargs={"trainable_token_indices": [6, 78]}, target_modules=["o_proj"])
    perturbed(policy)
    before = base_fingerprint(policy)
    update = merged_update(policy, "v1")
    assert set(update.tensors) == {f"model.layers.{i}.self_attn.o_proj.weight" for i in (0, 1)} | {
        "model.embed_tokens.weight"
    }
    assert distance(engine_of(update, copy.deepcopy(model)), policy) <= 1e-5
    assert distance(model, policy) > 0.02
    assert base_fingerprint(policy) == before


def test_embeddings_and_head_that_are_trained_as_one_are_sent_once():
    model = with_biases(tied=True)
    kwargs = {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
    policy = policy_of("lora", copy.deepcopy(model), kwargs=kwargs, target_modules=["o_proj"])
    update = merged_update(policy, "v1")
    assert len(update.tensors) == 2 + 1
    assert distance(engine_of(update, copy.deepcopy(model)), policy) <= 1e-5
    assert distance(model, policy) > 0.02


@pytest.mark.parametrize("tied", [False, True])
def test_the_whole_base_for_a_server_that_holds_other_weights(tied):
    model = with_biases(tied)
    update = base_update(policy_of("dora", copy.deepcopy(model)), "v1")
    assert update.tensors.keys() == dict(model.named_parameters()).keys()
    other = with_biases(tied)
    assert distance(other, model) > 0.02
    assert distance(engine_of(update, other), model) == 0
