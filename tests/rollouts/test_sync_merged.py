"""Merged weights are all that an engine needs: complete layers, biases, modules that are trained whole."""

import copy

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from perl.errors import ModelError
from perl.methods.registry import METHODS
from perl.policy.fingerprint import base_fingerprint
from perl.rollouts.sync import base_update, choose_form, merged_update
from tests.packing.families import make
from tests.rollouts.policies import RANK, engine_of, log_prob_difference, perturbed, policy_of

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


def tied():
    return with_biases(tied=True)


O_PROJ = {f"model.layers.{i}.self_attn.o_proj.weight" for i in (0, 1)}
QKV = {f"model.layers.{i}.self_attn.{n}_proj.{part}" for i in (0, 1) for n in "qkv" for part in ("weight", "bias")}
EMBEDDINGS, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# The model, the method with its arguments and targets, and what is sent where that is written down here.
CHANGED = (
    (with_biases, "lora", {"lora_bias": True}, ["q_proj", "k_proj"], QKV),
    (with_biases, "lora", {"modules_to_save": ["model.norm"]}, ["q_proj", "k_proj"], QKV | {NORM}),
    (with_biases, "miss", {"init_weights": "bat"}, ["q_proj", "k_proj"], QKV),
    *((with_biases, method, {}, None, None) for method in ("ia3", "oft")),
    (with_biases, "lora", {"modules_to_save": ["embed_tokens"]}, ["o_proj"], O_PROJ | {EMBEDDINGS}),
    (with_biases, "lora", {"modules_to_save": ["embed_tokens", "lm_head", "model.norm"]}, ["o_proj"],
     O_PROJ | {EMBEDDINGS, HEAD, NORM}),
    # Embeddings of single tokens, also where the head shares them; both trained as one are sent once.
    (with_biases, "lora", {"trainable_token_indices": [6, 78]}, ["o_proj"], O_PROJ | {EMBEDDINGS}),
    (tied, "lora", {"trainable_token_indices": [6, 78]}, ["o_proj"], O_PROJ | {EMBEDDINGS}),
    (tied, "lora", {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}, ["o_proj"],
     O_PROJ | {EMBEDDINGS}),
    (experts, "lora", {"target_parameters": EXPERTS}, ["q_proj"], None),
)  # fmt: skip


@pytest.mark.parametrize(("make", "method", "kwargs", "targets", "sent"), CHANGED)
def test_what_is_no_lora_is_merged_and_all_that_changes_is_sent(make, method, kwargs, targets, sent):
    model = make()
    policy = policy_of(method, copy.deepcopy(model), kwargs=kwargs, **({"target_modules": targets} if targets else {}))
    before = base_fingerprint(policy)
    if method == "lora" or "init_weights" in kwargs:
        assert METHODS[method].update_rank(policy.peft_config["default"]) is None
    assert choose_form(policy).form == "merged"
    update = merged_update(policy, "v1")
    assert sent is None or set(update.tensors) == sent
    if make is experts:  # two parameters of one module, in the names of published checkpoints
        parts = {
            f"model.layers.0.mlp.experts.{i}.{part}_proj.weight" for i in (0, 1) for part in ("gate", "up", "down")
        }
        assert parts <= set(update.tensors)
    old = dict(model.named_parameters())
    biases = [
        name for name in update.tensors if name.endswith("bias") and not torch.equal(update.tensors[name], old[name])
    ]
    assert bool(biases) == (method == "ia3" or "lora_bias" in kwargs)
    assert log_prob_difference(model, policy) > 0.02
    assert log_prob_difference(engine_of(update, model), policy) <= 1e-5
    assert base_fingerprint(policy) == before


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
    assert log_prob_difference(engine_of(update, model), policy) <= 1e-5


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Qwen3Moe", ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]),
        ("GptOss", ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"]),
    ],
)
def test_experts_are_sent_one_by_one_with_all_their_parts_where_one_is_changed(name, parts):
    base = make(name)
    kwargs = {"target_parameters": ["layers.0.mlp.experts.down_proj"]}
    policy = policy_of("lora", copy.deepcopy(base), kwargs=kwargs, target_modules=["o_proj"])
    sent = merged_update(policy, "v1").tensors
    prefix = "model.layers.0.mlp.experts."
    assert {key for key in sent if ".experts." in key} == {f"{prefix}{i}.{part}" for i in range(4) for part in parts}
    down, up = (torch.stack([sent[f"{prefix}{i}.{part}"] for i in range(4)]) for part in (parts[2], parts[0]))
    before = dict(base.named_parameters())
    assert torch.equal(up, before[f"{prefix}gate_up_proj"][:, : up.size(1)])  # of Qwen3Moe the first half
    moved = (down - before[f"{prefix}down_proj"]).flatten(1)
    assert torch.linalg.matrix_rank(moved.view_as(down), rtol=1e-3).tolist() == [RANK] * 4
    assert choose_form(policy).tensors == len(sent)


@pytest.mark.parametrize("whole", [["embed_tokens"], ["lm_head"]])
def test_embeddings_trained_apart_from_the_head_they_are_tied_to_are_refused(whole):
    policy = policy_of("lora", kwargs={"modules_to_save": whole})
    for asked in (lambda: choose_form(policy), lambda: merged_update(policy, "v1")):
        with pytest.raises(ModelError, match="trained apart from what it is tied to") as caught:
            asked()
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_the_whole_base_for_a_server_that_holds_other_weights(tied):
    model = with_biases(tied)
    update = base_update(policy_of("dora", copy.deepcopy(model)), "v1")
    assert update.tensors.keys() == dict(model.named_parameters()).keys()
    other = with_biases(tied)
    assert log_prob_difference(other, model) > 0.02
    assert log_prob_difference(engine_of(update, other), model) == 0
