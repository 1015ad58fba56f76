"""What an engine is given makes the published base answer like the policy, and the base in memory stays as it is."""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from perl.errors import ModelError
from perl.methods.adalora import set_schedule
from perl.methods.delta import adapted_layers, low_rank_update
from perl.methods.registry import METHODS, SERVED_RANKS, served_rank
from perl.policy.fingerprint import base_fingerprint
from perl.rollouts.sync import adapter_update, choose_form, make_update, without_effect
from perl.sandbox import BASE_FOLDER
from tests.rollouts.policies import base, engine_of, fresh, log_prob_difference, perturbed, policy_of, published

# PyTorch's own, once a process, about how PEFT makes SHiRA's sparse matrix.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

ADAPTERS = [name for name, method in METHODS.items() if method.config]
LOW = [name for name in ADAPTERS if METHODS[name].sync.startswith("adapter")]
MERGED = [name for name in ADAPTERS if name not in LOW]
SIX = ("lora", "dora", "pissa", "adalora", "ia3", "full")
# Each method has an update of its own; the others are looked at nightly.
EVERY = [name if name in SIX else pytest.param(name, marks=pytest.mark.nightly) for name in [*ADAPTERS, "full"]]
# Tensors of an update of the sandbox base: 4 layers of 7 linear ones, with norms before and after attention and MLP, of
# queries and keys, and one at the end. IA3 changes 3 of the 7, which are completed to q, k, v and down.
TENSORS = dict.fromkeys(LOW, 4 * 7 * 2) | dict.fromkeys(MERGED, 4 * 7) | {"ln_tuning": 4 * 4 + 1, "ia3": 4 * 4}


@pytest.mark.parametrize("method", EVERY)
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
    assert log_prob_difference(policy, base()) > 0.02
    assert log_prob_difference(engine_of(update, base()), policy) <= 1e-5


def test_an_adapter_of_zeros_answers_like_the_base_in_the_shapes_of_the_policys():
    policy = policy_of("lora")
    update = make_update(policy, "adapter", "v1")
    nothing = without_effect(update)
    assert {n: t.shape for n, t in nothing.tensors.items()} == {n: t.shape for n, t in update.tensors.items()}
    assert log_prob_difference(engine_of(nothing, base()), base()) == pytest.approx(0.0, abs=0)
    assert log_prob_difference(engine_of(update, base()), base()) > 0.02  # which stays as it was


@pytest.mark.parametrize("method", SIX[:-1])
def test_the_start_of_training_loads_and_has_the_shapes_of_every_later_update(method):
    policy = fresh(method)
    plan = choose_form(policy)
    update = make_update(policy, plan.form, "v0")
    assert log_prob_difference(engine_of(update, base()), base()) <= 1e-5
    assert choose_form(perturbed(policy)) == plan
    later = make_update(policy, plan.form, "v1")
    assert {n: t.shape for n, t in later.tensors.items()} == {n: t.shape for n, t in update.tensors.items()}
    assert later.config == update.config


# Settings beside the rank; the number of different ranks that the update has then.
SET = [
    ("lora", {"kwargs": {"rank_pattern": {"down_proj": 7, "layers.1.self_attn.q_proj": 2}}}, 3),
    ("pissa", {"kwargs": {"rank_pattern": {"down_proj": 7}}}, 2),
    ("gralora", {"rank": 8, "kwargs": {"gralora_k": 4}}, 1),
    ("hra", {"kwargs": {"apply_GS": True}}, 1),
    ("adalora", {"kwargs": {"init_r": 9}}, 1),
    ("vera", {"rank": 300}, 1),
]


def ranks_of(policy):
    return [low_rank_update(layer, "default").rank for _, layer in adapted_layers(policy)]


@pytest.mark.parametrize(("method", "settings", "ranks"), [*((method, {}, 1) for method in SIX[:-1]), *SET], ids=str)
def test_the_rank_is_known_without_weights_whatever_is_set_beside_it(method, settings, ranks):
    policy = policy_of(method, **settings)
    known = METHODS[method].update_rank(policy.peft_config["default"])
    assert known == choose_form(policy).largest_rank
    if known is None:
        return
    update = adapter_update(policy, "v1")
    sent = {len(tensor) for name, tensor in update.tensors.items() if "lora_A" in name}
    # B @ A of a layer, at most of that rank in numbers too.
    products = [
        update.tensors[name.replace("lora_A", "lora_B")].double() @ tensor.double()
        for name, tensor in update.tensors.items()
        if "lora_A" in name
    ]
    found = max(int(torch.linalg.matrix_rank(product)) for product in products)
    assert found <= known == max(sent) == max(ranks_of(policy))
    assert len(sent) == ranks
    if settings:
        assert log_prob_difference(engine_of(update, base()), policy) <= 1e-5


def test_a_server_is_started_for_the_next_rank_that_vllm_has():
    of_vllm = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    assert tuple(SERVED_RANKS) == of_vllm
    found = [served_rank(rank) for rank in range(1, 520)]
    assert found == [min((r for r in of_vllm if r >= rank), default=None) for rank in range(1, 520)]


@pytest.mark.parametrize("method", ["lora", "pissa"])
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


def test_adalora_keeps_its_shapes_and_its_pattern_when_ranks_move():
    policy = policy_of("adalora")
    set_schedule(policy, 10)
    shapes = {name: tensor.shape for name, tensor in adapter_update(policy, "v0").tensors.items()}
    pattern = {}
    for name, layer in adapted_layers(policy):
        with torch.no_grad():
            layer.lora_E["default"][:2] = 0
        pattern[f"{name}.lora_E.default"] = [i >= 2 for i in range(6)]
    policy.peft_config["default"].rank_pattern = dict(pattern)
    update = adapter_update(policy, "v1")
    assert {name: tensor.shape for name, tensor in update.tensors.items()} == shapes
    assert policy.peft_config["default"].rank_pattern == pattern
    assert choose_form(policy).largest_rank == METHODS["adalora"].update_rank(policy.peft_config["default"]) == 6
    assert log_prob_difference(engine_of(update, base()), policy) <= 1e-5


@pytest.mark.parametrize(
    ("method", "settings", "reason"),
    [
        ("dora", {}, "the update of dora has no low rank"),
        ("ln_tuning", {}, r"ln_tuning changes model\.\S*norm, not linear"),
        ("ia3", {}, "the update of ia3 has no low rank"),
        ("vera", {"rank": 600}, r"the update of model\.\S+ has rank 600, and vLLM serves 512 at most"),
        ("lora", {"kwargs": {"modules_to_save": ["model.norm"]}}, r"model\.norm is trained itself"),
        ("lora", {"kwargs": {"trainable_token_indices": [5]}}, r"model\.embed_tokens is trained itself"),
        ("full", {}, "method full trains every weight"),
    ],
    ids=str,
)
def test_an_adapter_that_cannot_be_exact_is_refused_in_a_line(method, settings, reason):
    policy = base() if method == "full" else policy_of(method, **settings)
    with pytest.raises(ModelError) as caught:
        choose_form(policy, "adapter")
    said = rf"rollout\.sync: {reason}, so no LoRA can be served \(use rollout\.sync: merged\)"
    assert re.fullmatch(said, str(caught.value))
    if method == "full":
        with pytest.raises(ModelError, match=r"rollout\.sync.*has no adapter \(use rollout\.sync: merged\)$"):
            make_update(policy, "adapter", "v1")
    plan = choose_form(policy)
    assert plan.form == "merged"
    assert re.match(reason, plan.why)
