"""What an engine is given makes the published base answer like the policy, and the base in memory stays as it is."""

import copy
import functools
import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from perl.adapter import attach_adapter
from perl.errors import BrokenPromiseError, ModelError
from perl.logprobs import token_log_probs
from perl.methods.adalora import set_schedule
from perl.methods.delta import adapted_layers, low_rank_update, update_of
from perl.methods.registry import METHODS, SERVED_RANKS, served_rank
from perl.methods.settings import adaptation
from perl.model import base_fingerprint, load_base
from perl.recipe.sections import ModelSection, PeftSection
from perl.rollouts.update import adapter_update, base_update, choose_form, make_update, merged_update
from perl.sandbox import BASE_FOLDER

pytestmark = [
    # PyTorch's own, once a process, about how PEFT makes SHiRA's sparse matrix.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    # PEFT's advice about training one of two tied weights, which is what some tests are about.
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]

PROBE = torch.tensor([[6, 7, 78, 8, 9, 96, 10, 1], [12, 13, 14, 77, 96, 5, 78, 1]])
RANK = 4
ADAPTERS = [name for name, method in METHODS.items() if method.config]
LOW = [name for name in ADAPTERS if METHODS[name].sync.startswith("adapter")]
MERGED = [name for name in ADAPTERS if name not in LOW]
# Tensors of an update of the sandbox base: 4 layers of 7 linear ones, with norms before and after attention and MLP, of
# queries and keys, and one at the end. IA3 changes 3 of the 7, which are completed to q, k, v and down.
TENSORS = dict.fromkeys(LOW, 4 * 7 * 2) | dict.fromkeys(MERGED, 4 * 7) | {"ln_tuning": 4 * 4 + 1, "ia3": 4 * 4}


@functools.cache
def published():
    return load_base(ModelSection(), torch.device("cpu"))


def base(dtype=torch.float32):
    return copy.deepcopy(published()).to(dtype)


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


def perturbed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape)
    return model.eval()


def fresh(method, model=None, **settings) -> PeftModel:
    chosen = {"rank": RANK} if "rank" in METHODS[method].settings else {}
    section = PeftSection(method=method, **{**chosen, **settings})
    return attach_adapter(base() if model is None else model, adaptation(section)).eval()


def policy_of(method, model=None, **settings) -> PeftModel:
    """A policy that is no longer the base."""
    return perturbed(fresh(method, model, **settings))


def log_probs(model):
    with torch.no_grad():
        return token_log_probs(model.eval(), PROBE, torch.ones_like(PROBE))


def engine_of(update, clean):
    """What answers an engine's requests: the clean base with the update, loaded by plain PEFT or torch."""
    if update.form == "merged":
        loaded = clean.load_state_dict(dict(update.tensors), strict=False)
        assert not loaded.unexpected_keys
        return clean
    folder = Path("served")
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(update.config))
    save_file(dict(update.tensors), folder / "adapter_model.safetensors")
    return PeftModel.from_pretrained(clean, str(folder))


def distance(one, other) -> float:
    """In nats; computed in float64, so that nothing but the numbers of the two models counts."""
    return (log_probs(copy.deepcopy(one).double()) - log_probs(copy.deepcopy(other).double())).abs().max().item()


@pytest.mark.parametrize("method", [*ADAPTERS, "full"])
def test_an_engine_with_the_update_answers_like_the_policy_and_the_base_is_not_written(method):
    policy = perturbed(base()) if method == "full" else policy_of(method)
    before, random_state = base_fingerprint(policy), torch.get_rng_state()
    plan = choose_form(policy)
    update = make_update(policy, plan.form, "v1")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert base_fingerprint(policy) == before
    assert (plan.form == "adapter") == METHODS[method].sync.startswith("adapter")
    assert (update.name, update.form) == ("v1", plan.form)
    assert (plan.nbytes, plan.tensors) == (update.nbytes, len(update.tensors))
    assert len(update.tensors) == TENSORS.get(method, len(list(published().parameters())))
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in update.tensors.values())
    assert distance(policy, base()) > 0.02
    assert distance(engine_of(update, base()), policy) <= 1e-5


@pytest.mark.parametrize("method", LOW)
def test_what_can_be_served_as_an_adapter_can_also_be_merged(method):
    policy = policy_of(method)
    before = base_fingerprint(policy)
    plan = choose_form(policy, "merged")
    update = make_update(policy, plan.form, "v1")
    assert (plan.form, plan.largest_rank) == ("merged", None)
    assert (plan.nbytes, plan.tensors) == (update.nbytes, len(update.tensors))
    assert distance(engine_of(update, base()), policy) <= 1e-5
    assert base_fingerprint(policy) == before


@pytest.mark.parametrize("method", ADAPTERS)
def test_the_start_of_training_loads_and_has_the_shapes_of_every_later_update(method):
    policy = fresh(method)
    plan = choose_form(policy)
    update = make_update(policy, plan.form, "v0")
    assert distance(engine_of(update, base()), base()) <= 1e-5
    assert choose_form(perturbed(policy)) == plan
    later = make_update(policy, plan.form, "v1")
    assert {n: t.shape for n, t in later.tensors.items()} == {n: t.shape for n, t in update.tensors.items()}
    assert later.config == update.config


@pytest.mark.parametrize("method", ADAPTERS)
def test_the_rank_is_known_without_weights(method):
    policy = policy_of(method)
    known = METHODS[method].update_rank(policy.peft_config["default"])
    assert known == choose_form(policy).largest_rank
    if known is not None:
        assert known == max(low_rank_update(layer, "default").rank for _, layer in adapted_layers(policy))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("lora", {"kwargs": {"rank_pattern": {"down_proj": 7, "layers.1.self_attn.q_proj": 2}}}),
        ("pissa", {"kwargs": {"rank_pattern": {"down_proj": 7}}}),
        ("loha", {"kwargs": {"rank_pattern": {"o_proj": 5}}}),
        ("gralora", {"kwargs": {"hybrid_r": 3}}),
        ("gralora", {"rank": 8, "kwargs": {"gralora_k": 4}}),
        ("hra", {"kwargs": {"apply_GS": True}}),
        ("adalora", {"kwargs": {"init_r": 9}}),
        ("vera", {"rank": 300}),
    ],
    ids=str,
)
def test_what_is_set_beside_the_rank(method, settings):
    policy = policy_of(method, **settings)
    plan = choose_form(policy)
    assert plan.largest_rank == METHODS[method].update_rank(policy.peft_config["default"])
    update = adapter_update(policy, "v1")
    ranks = {len(tensor) for name, tensor in update.tensors.items() if "lora_A" in name}
    assert max(ranks) == plan.largest_rank
    assert len(ranks) == {("lora"): 3, "pissa": 2, "loha": 2}.get(method, 1)
    assert distance(engine_of(update, base()), policy) <= 1e-5


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


def test_the_rank_that_a_server_is_started_for():
    assert [served_rank(rank) for rank in (1, 2, 8, 9, 300, 320, 321, 512)] == [1, 8, 8, 16, 320, 320, 512, 512]
    assert served_rank(513) is None
    assert max(SERVED_RANKS) == 512


@pytest.mark.parametrize("method", ["lora", "pissa", "hra"])
def test_the_config_is_the_one_that_peft_writes_and_names_no_path(method):
    update = adapter_update(policy_of(method, kwargs={}), "v1")
    LoraConfig(**update.config).save_pretrained("written")
    written = json.loads(Path("written/adapter_config.json").read_text())
    written["target_modules"].sort()
    assert update.config == written
    assert json.loads(json.dumps(update.config)) == update.config
    assert str(BASE_FOLDER.parent) not in json.dumps(update.config)
    assert (update.config["init_lora_weights"], update.config["use_dora"]) == (True, False)
    assert (
        update.config["lora_alpha"]
        == update.config["r"]
        == METHODS[method].update_rank(policy_of(method).peft_config["default"])
    )
    assert update.config["base_model_name_or_path"] == "sandbox:base"
    assert all(re.fullmatch(r"base_model\.model\.\S+_proj\.lora_[AB]\.weight", name) for name in update.tensors)


def test_what_is_sent_does_not_change_with_the_next_step():
    policy = policy_of("lora")
    sent = adapter_update(policy, "v1")
    before = {name: tensor.clone() for name, tensor in sent.tensors.items()}
    perturbed(policy)
    assert all(torch.equal(sent.tensors[name], tensor) for name, tensor in before.items())
    assert not torch.equal(*(next(iter(u.tensors.values())) for u in (sent, adapter_update(policy, "v2"))))


@pytest.mark.parametrize("masked", [2, 6])
def test_adalora_keeps_its_shapes_and_its_pattern_when_ranks_move(masked):
    policy = policy_of("adalora")
    set_schedule(policy, 10)
    shapes = {name: tensor.shape for name, tensor in adapter_update(policy, "v0").tensors.items()}
    pattern = {}
    for name, layer in adapted_layers(policy):
        with torch.no_grad():
            layer.lora_E["default"][:masked] = 0
        pattern[f"{name}.lora_E.default"] = [i >= masked for i in range(6)]
    policy.peft_config["default"].rank_pattern = dict(pattern)
    update = adapter_update(policy, "v1")
    assert {name: tensor.shape for name, tensor in update.tensors.items()} == shapes
    assert policy.peft_config["default"].rank_pattern == pattern
    assert choose_form(policy).largest_rank == METHODS["adalora"].update_rank(policy.peft_config["default"]) == 6
    assert distance(engine_of(update, base()), policy) <= 1e-5


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


@pytest.mark.parametrize(
    ("method", "settings", "reason"),
    [
        ("dora", {}, "the update of dora has no low rank"),
        ("ln_tuning", {}, r"ln_tuning changes model\.\S*norm, not linear"),
        ("ia3", {}, "the update of ia3 has no low rank"),
        ("vera", {"rank": 600}, r"the update of model\.\S+ has rank 600, and vLLM serves 512 at most"),
        ("lora", {"kwargs": {"modules_to_save": ["model.norm"]}}, r"model\.norm is trained itself"),
        ("lora", {"kwargs": {"trainable_token_indices": [5]}}, r"model\.embed_tokens is trained itself"),
    ],
    ids=str,
)
def test_an_adapter_that_cannot_be_exact_is_refused_in_a_line(method, settings, reason):
    policy = policy_of(method, **settings)
    with pytest.raises(ModelError) as caught:
        choose_form(policy, "adapter")
    said = rf"rollout\.sync: {reason}, so no LoRA can be served \(use rollout\.sync: merged\)"
    assert re.fullmatch(said, str(caught.value))
    plan = choose_form(policy)
    assert plan.form == "merged"
    assert re.match(reason, plan.why)


def test_a_model_that_is_trained_itself_has_no_adapter_to_serve():
    for asked in (lambda: choose_form(base(), "adapter"), lambda: make_update(base(), "adapter", "v1")):
        with pytest.raises(ModelError, match=r"rollout\.sync") as caught:
            asked()
        assert len(str(caught.value).splitlines()) == 1


def test_an_adapter_that_stops_being_a_lora_is_noticed():
    policy = policy_of("miss")
    assert choose_form(policy).form == "adapter"
    next(layer for _, layer in adapted_layers(policy)).miss_fn = "bat"
    with pytest.raises(BrokenPromiseError, match="no longer"):
        adapter_update(policy, "v1")


def test_a_plan_is_a_line():
    assert str(choose_form(policy_of("lora"))) == (
        "an update is a LoRA of rank 4, 0.156 MB in 56 tensors: every layer's update is an exact LoRA"
    )
    assert str(choose_form(policy_of("lora"), "merged")) == (
        "an update is merged weights, 3.15 MB in 28 tensors: rollout.sync asks for it"
    )


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


@pytest.mark.parametrize("method", ["lora", "dora", "ln_tuning"])
def test_an_update_is_of_the_bases_type_and_rounded_once(method):
    policy = policy_of(method, base(torch.bfloat16))
    plan = choose_form(policy)
    update = make_update(policy, plan.form, "v1")
    assert plan.nbytes == update.nbytes
    assert {tensor.dtype for tensor in update.tensors.values()} == {torch.bfloat16}
    exact = make_update(policy_in_float64(policy), plan.form, "v1").tensors
    assert all(t.dtype == torch.float64 for t in exact.values())
    for name, tensor in update.tensors.items():
        torch.testing.assert_close(tensor, exact[name].to(torch.bfloat16), rtol=0, atol=0)


def policy_in_float64(policy):
    return copy.deepcopy(policy).double()


@pytest.mark.parametrize("method", ["pissa", "milora", "olora", "hra"])
def test_in_half_precision_factors_do_not_cancel_each_other(method):
    policy = fresh(method, base(torch.bfloat16))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 1e-3 * parameter.abs().mean() * torch.randn(parameter.shape)
    update = adapter_update(policy, "v1")
    assert choose_form(policy).largest_rank == METHODS[method].update_rank(policy.peft_config["default"])
    for name, layer in adapted_layers(policy):
        A, B = (update.tensors[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
        as_it_is = low_rank_update(layer, "default")
        rounded = as_it_is.B_OR.bfloat16().double() @ as_it_is.A_RI.bfloat16().double()
        exact = update_of_float64(layer)
        assert (B @ A - exact).norm() < 0.01 * exact.norm()
        assert (rounded - exact).norm() > 0.1 * exact.norm()


def update_of_float64(layer):
    """(out, in) of the trained numbers as they are, none rounded on the way."""
    return update_of(copy.deepcopy(layer).double(), "default")


# Methods that PEFT runs on NF4; the others fail in PEFT itself, or start on weights that a quantised base has not.
ON_NF4 = [
    "lora", "rslora", "dora", "lora_plus", "lora_fa", "adalora", "vera", "miss", "ln_tuning", "ia3", "randlora", "oft",
    "boft", "fourierft", "shira", "gralora", "road",
]  # fmt: skip


def quantised(**how):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed, there is no quantised base")
    config = BitsAndBytesConfig(**how)
    return AutoModelForCausalLM.from_pretrained(
        BASE_FOLDER, quantization_config=config, dtype=torch.float32, device_map="cpu"
    ).eval()


def nf4():
    return quantised(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def int8():
    return quantised(load_in_8bit=True)


@pytest.mark.parametrize("method", ON_NF4)
def test_an_engine_with_the_numbers_of_a_quantised_base_answers_like_the_policy(method):
    policy = policy_of(method, nf4())
    expected, before = log_probs(policy), base_fingerprint(policy)
    dequantised = engine_of(base_update(policy, "v0"), base())
    assert distance(dequantised, base()) > 1e-3
    with policy.disable_adapter():
        torch.testing.assert_close(log_probs(dequantised), log_probs(policy), rtol=0, atol=5e-5)
    assert (log_probs(dequantised) - expected).abs().max() > 0.02
    plan = choose_form(policy)
    update = make_update(policy, plan.form, "v1")
    assert (plan.form == "adapter") == METHODS[method].sync.startswith("adapter")
    assert (plan.nbytes, plan.tensors) == (update.nbytes, len(update.tensors))
    assert {tensor.dtype for tensor in update.tensors.values()} == {torch.float32}
    torch.testing.assert_close(log_probs(engine_of(update, dequantised)), expected, rtol=0, atol=5e-5)
    assert base_fingerprint(policy) == before
    assert torch.equal(log_probs(policy), expected)


@pytest.mark.parametrize("quantise", [nf4, int8])
def test_a_lora_needs_nothing_of_a_quantised_base(quantise):
    policy = policy_of("lora", quantise())
    update = adapter_update(policy, "v1")
    trained = {name.replace(".default", ""): p for name, p in policy.named_parameters() if p.requires_grad}
    assert trained.keys() == update.tensors.keys()
    for name, parameter in trained.items():
        scale = 32 / RANK if "lora_B" in name else 1
        torch.testing.assert_close(update.tensors[name], parameter.detach() * scale, rtol=1e-6, atol=0)


def test_merged_weights_of_an_int8_base_are_those_its_numbers_stand_for_with_the_adapter_added():
    # LLM.int8 also rounds activations, so the policy's own log-probabilities are those of no weights.
    policy = policy_of("lora", int8())
    layers = dict(adapted_layers(policy))
    scales = {name: layer.get_base_layer().weight.SCB.clone() for name, layer in layers.items()}
    for _ in range(2):  # the first forward pass moves the scales
        update = merged_update(policy, "v1")
        assert len(update.tensors) == len(layers) == 28
        for name, layer in layers.items():
            A, B = (part["default"].weight.detach() for part in (layer.lora_A, layer.lora_B))
            expected = layer.get_base_layer().weight * scales[name][:, None] / 127 + 32 / RANK * B @ A
            torch.testing.assert_close(update.tensors[f"{name}.weight"], expected, rtol=0, atol=1e-6)
        log_probs(policy)
