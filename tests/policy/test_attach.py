"""Adapters are put on a base that nobody writes to, continued where they were, and switched off without a trace."""

import dataclasses
import re
from pathlib import Path

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from perl.errors import BrokenPromiseError, PerlError, RecipeError
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation, continued_adaptation
from perl.policy.attach import (
    adapter_tensors,
    attach_adapter,
    check_trainable,
    check_untouched_base,
    continue_adapter,
    load_adapter_tensors,
    shaped_saved_adapter,
)
from perl.policy.fingerprint import base_fingerprint
from perl.policy.model import load_base, load_empty_base
from perl.policy.reference import base_only
from perl.policy.save_adapter import write_adapter
from perl.policy.saved.adapter import SavedAdapter, find_adapter
from perl.policy.targets import check_targets
from perl.recipe.sections import ModelSection, PeftSection
from perl.training.inputs import policy_without_weights
from tests.a_few_methods import each, few_layers
from tests.packing.families import make
from tests.rollouts.policies import PROBE, base, fresh
from tests.rollouts.policies import perturbed as move

pytestmark = [
    # PyTorch's own, once a process, about how PEFT makes SHiRA's sparse matrix.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    # PEFT's advice about training one of two tied weights.
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]

CPU = torch.device("cpu")
ADAPTERS = [name for name, method in METHODS.items() if method.config]


def narrow():
    """A base of another shape."""
    model = load_empty_base(ModelSection())
    model.config.intermediate_size, model.config.num_attention_heads = 256, 2
    return type(model)(model.config).eval()


def policy_of(name, **settings) -> PeftModel:
    return fresh(name, **{**few_layers(name), **settings})


def logits(model):
    with torch.no_grad():
        return model(input_ids=PROBE).logits


def same(one, other):
    torch.testing.assert_close(logits(one), logits(other), rtol=0, atol=1e-4)


def trained(policy) -> list[str]:
    return [name for name, p in policy.named_parameters() if p.requires_grad]


def saved_by_peft(config) -> Path:
    """An adapter that never saw this package."""
    policy = move(get_peft_model(base(), config))
    assert (logits(policy) - logits(base())).abs().max() > 0.1
    policy.save_pretrained("adapter")
    return Path("adapter")


def saved_by_us(policy) -> Path:
    write_adapter(policy, Path("adapter"), "sandbox:base", None, base_fingerprint(policy))
    return Path("adapter")


def refusal(call, *arguments) -> str:
    with pytest.raises(PerlError) as caught:
        call(*arguments)
    (said,) = str(caught.value).splitlines()
    return said


LINEAR = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "k_proj", "down_proj"]}
BY_PEFT = {
    "lora": lambda: LoraConfig(r=3, lora_alpha=7, **LINEAR),
    "lora with patterns": lambda: LoraConfig(r=3, rank_pattern={"k_proj": 5}, alpha_pattern={"q_proj": 2}, **LINEAR),
    "lora and tokens": lambda: LoraConfig(r=3, trainable_token_indices=[6, 9], **LINEAR),
    "lora on embeddings": lambda: LoraConfig(r=3, task_type="CAUSAL_LM", target_modules=["embed_tokens", "q_proj"]),
    "vera": lambda: peft.VeraConfig(r=16, **LINEAR),
    "ia3": lambda: peft.IA3Config(feedforward_modules=["down_proj"], **LINEAR),
    "pissa of another scale": lambda: LoraConfig(
        r=3, lora_alpha=7, use_rslora=True, init_lora_weights="pissa", **LINEAR
    ),
    "places beside numbers": lambda: peft.SupertuningConfig(**LINEAR),
    "another type": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["q_norm", "norm"]),
}


@pytest.mark.filterwarnings("ignore:Specified to not (save|load) vera_A")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.filterwarnings("ignore:Unsupported layer type")
@pytest.mark.parametrize("kind", BY_PEFT)
def test_an_adapter_of_plain_peft_is_continued_where_it_was(kind):
    folder = saved_by_peft(BY_PEFT[kind]())
    loaded = PeftModel.from_pretrained(base(), folder, is_trainable=True).eval()
    model = base()
    before = base_fingerprint(model)
    policy = continue_adapter(model, find_adapter(str(folder), "sandbox:base")).eval()
    same(policy, loaded)
    assert trained(policy) == trained(loaded) != []
    assert base_fingerprint(policy) == before
    with base_only(policy):
        assert torch.equal(logits(policy), logits(base()))


@pytest.mark.parametrize("method", each(ADAPTERS))
def test_an_adapter_of_ours_is_continued_where_it_was(method):
    policy = move(policy_of(method))
    again = continue_adapter(base(), find_adapter(str(saved_by_us(policy)), "sandbox:base")).eval()
    same(again, policy)
    assert trained(again)
    assert base_fingerprint(again) == base_fingerprint(base())
    move(again)
    assert (logits(again) - logits(policy)).abs().max() > 0.01


@pytest.mark.parametrize("method", ["lora_plus", "lora_fa"])
def test_a_lora_may_go_on_as_another_kind_of_lora(method):
    saved = find_adapter(str(saved_by_us(move(policy_of("lora")))))
    policy = continue_adapter(base(), saved, continued_adaptation(PeftSection(method=method), saved.config))
    same(policy.eval(), PeftModel.from_pretrained(base(), "adapter").eval())
    assert any("lora_A" in name for name in trained(policy)) is (method == "lora_plus")
    assert any("lora_B" in name for name in trained(policy))


def test_adapters_that_cannot_be_continued_or_started_are_refused():
    for init in ("pissa_niter_4", "pissa_niter_16"):
        saved = find_adapter(str(saved_by_peft(LoraConfig(r=3, init_lora_weights=init, **LINEAR))))
        assert refusal(continue_adapter, base(), saved).startswith(
            f"peft.adapter: adapter started from a random decomposition ({init}) that cannot be made again"
        )
    saved = find_adapter(str(saved_by_peft(LoraConfig(r=3, bias="all", **LINEAR))))
    assert refusal(continue_adapter, base(), saved).startswith("peft.kwargs.bias: trains biases of the base itself")
    for init in ("eva", "corda", "loftq", "lora_ga"):  # a start that needs data
        config = LoraConfig(**LINEAR)
        config.init_lora_weights = init
        with pytest.raises(RecipeError, match=r"^peft_config\.init_lora_weights: "):
            attach_adapter(base(), config)
    policy = policy_of("lora")
    policy.requires_grad_(False)
    assert "no trainable parameters" in refusal(check_trainable, policy)
    policy.base_model.model.lm_head.weight.requires_grad_(True)
    assert "embed_tokens.weight of the base requires a gradient" in refusal(check_untouched_base, policy)
    policy.add_adapter("other", LoraConfig(**LINEAR))
    policy.base_model.set_adapter(["default", "other"])
    assert "active adapters are default, other, and default alone" in refusal(check_untouched_base, policy)


def test_an_adapter_of_a_base_of_another_shape_depth_or_weight_is_refused_with_what_differs():
    fits_not = r"peft\.adapter: adapter does not fit this base, it was made for sandbox:base: "
    for method in ("lora", "pissa", "vera"):
        write_adapter(move(policy_of(method)), Path("adapter"), "sandbox:base", None)
        said = refusal(shaped_saved_adapter, narrow(), find_adapter("adapter"))
        assert re.match(fits_not + r"\S+ is \d+", said), method
    saved = find_adapter(str(saved_by_peft(LoraConfig(r=3, **LINEAR))))
    model = base()
    model.model.layers = model.model.layers[:2]
    said = refusal(continue_adapter, model, saved)
    assert re.search(r"layers\.[23]\.\S+ is only there \(and 11 more\)", said)
    saved = find_adapter(str(saved_by_peft(LoraConfig(r=3, layers_to_transform=[0, 1], **LINEAR))))
    saved.config.layers_to_transform = None
    assert re.search(r"layers\.[23]\.\S+ is only here \(and 11 more\)", refusal(continue_adapter, base(), saved))
    saved = find_adapter(str(saved_by_us(policy_of("lora"))))
    model = base()
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[5, 5] += 1e-6
    then, now = base_fingerprint(base()), base_fingerprint(model)
    said = refusal(continue_adapter, model, saved)
    assert said.startswith(f"peft.adapter: adapter was trained on other weights of sandbox:base ({then[:12]} then, ")
    assert now[:12] in said


def test_places_that_point_out_of_a_matrix_are_refused():
    for config in (
        peft.SupertuningConfig(**LINEAR),
        peft.VBLoRAConfig(**LINEAR, num_vectors=20, vector_length=32, save_only_topk_weights=True),
    ):
        weights = saved_by_peft(config) / "adapter_model.safetensors"
        saved = find_adapter("adapter")
        assert continue_adapter(base(), saved)
        tensors = load_file(weights)
        for name in [name for name in tensors if name.endswith("_indices")]:
            tensors[name].fill_(torch.iinfo(tensors[name].dtype).max)
        save_file(tensors, weights)
        assert "has positions outside of W" in refusal(continue_adapter, base(), saved)


def loaded_in(dtype, published_in="float32"):
    """A base as it is loaded in one type from files in another; float32 holds numbers that half precision does not."""
    if not Path(published_in).exists():
        model = base()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1e-3 * torch.randn(parameter.shape, generator=generator)
        model.to(getattr(torch, published_in)).save_pretrained(published_in)
    return load_base(ModelSection(name=published_in, dtype=dtype), CPU)


def saved_on(model, dtype_is_said=True) -> SavedAdapter:
    """An adapter trained on this base; older ones do not say in which type that was."""
    found = find_adapter(str(saved_by_us(attach_adapter(model, LoraConfig(r=3, init_lora_weights=False, **LINEAR)))))
    return found if dtype_is_said else dataclasses.replace(found, base_dtype=None)


@pytest.mark.parametrize(("dtype", "dtype_is_said"), [("bfloat16", True), ("float16", False)])
def test_an_adapter_is_continued_on_the_same_base_in_a_type_that_holds_its_numbers(dtype, dtype_is_said):
    saved = saved_on(loaded_in(dtype), dtype_is_said)
    assert saved.base_dtype == (dtype if dtype_is_said else None)
    continued = continue_adapter(loaded_in("float32"), saved).eval()
    assert trained(continued)
    same(continued, PeftModel.from_pretrained(loaded_in("float32"), "adapter").eval())
    other = loaded_in("float32")
    with torch.no_grad():
        other.model.layers[3].mlp.up_proj.weight[5, 5] += 0.1
    assert "was trained on other weights of sandbox:base" in refusal(continue_adapter, other, saved)
    # Trained in float32 on a base that is published in half precision.
    saved = saved_on(loaded_in("float32", dtype), dtype_is_said)
    assert trained(continue_adapter(loaded_in(dtype, dtype), saved))
    if dtype_is_said:
        saved = saved_on(loaded_in("float32").double())
        assert saved.base_dtype == "float64"
        assert trained(continue_adapter(loaded_in("float32"), saved))


def test_a_base_that_was_rounded_when_it_was_loaded_is_refused_with_the_type_to_load():
    for then, now in (("float32", "bfloat16"), ("float16", "bfloat16"), ("bfloat16", "float16")):
        saved = saved_on(loaded_in(then))
        said = refusal(continue_adapter, loaded_in(now), saved)
        assert f"it was trained on the base in {then}: set model.dtype: {then}" in said
        unsaid = dataclasses.replace(saved, base_dtype=None)
        assert "may have been trained on the base in float32" in refusal(continue_adapter, loaded_in(now), unsaid)


def test_a_config_of_pefts_starts_on_the_weights_without_writing_them():
    for init in ("pissa", "pissa_niter_4", "olora"):
        model = base()
        before = base_fingerprint(model)
        policy = attach_adapter(model, LoraConfig(r=3, lora_alpha=3, init_lora_weights=init, **LINEAR)).eval()
        expected = policy_of(init.partition("_")[0], rank=3, target_modules=LINEAR["target_modules"])
        assert base_fingerprint(policy) == before
        assert torch.equal(logits(policy), logits(base()))
        ours, theirs = adapter_tensors(policy), adapter_tensors(expected)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
        check_untouched_base(policy)
        policy = get_peft_model(base(), LoraConfig(r=3, init_lora_weights=init, **LINEAR))
        assert f"the initialisation '{init}' of this PeftModel has changed" in refusal(check_untouched_base, policy)


def test_without_weights_nothing_is_decomposed():
    for method in ("pissa", "milora", "rlpo", "slicefine"):
        section = PeftSection(method=method, rank=4)
        policy = policy_without_weights(ModelSection(), adaptation(section))
        assert trained(policy) == trained(attach_adapter(base(), adaptation(section))), method
        assert {p.device.type for p in policy.parameters()} == {"meta"}, method


def test_modules_that_do_not_exist_are_refused_with_those_that_do():
    """Before anything is attached, even beside one that exists."""
    for modules in (["nonsense"], ["norm", "nonsense"]):
        line = refusal(attach_adapter, base(), adaptation(PeftSection(kwargs={"modules_to_save": modules})))
        assert line.startswith("peft.kwargs.modules_to_save: nonsense match no module of Qwen3ForCausalLM")
        assert "embed_tokens" in line
        assert "norm" in line
    model = base()
    few = (["q_proj"], ["model.layers.0.mlp.up_proj"], r".*layers\.[01]\..*(q|v)_proj")
    for targets in ("all-linear", None, *few):
        check_targets(model, LoraConfig(target_modules=targets))
    how = adaptation(PeftSection(method="pissa", target_modules=["c_attn", "q_proj", "qkv"]))
    line = refusal(attach_adapter, model, how)
    assert line.startswith("peft.target_modules: c_attn, qkv match no module of Qwen3ForCausalLM")
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj; or all-linear" in line
    assert not any("lora" in name for name, _ in model.named_modules())


SELECTIONS = {
    r"rank_pattern: \^q_proj match": {"rank_pattern": {"q_proj": 2, "^q_proj": 2}},
    "alpha_pattern: up_proj": {"alpha_pattern": {"up_proj": 2}},  # is no target
    "peft.kwargs: '.q_proj' in its config is no pattern": {"rank_pattern": {"(q_proj": 2}},
    "layers_to_transform: 31 match no layer .* 0 to 3": {"layers_to_transform": [0, 31]},
    "layers_to_transform: 4": {"layers_to_transform": 4},
    "layers_pattern: layer match .*did you mean layers": {"layers_to_transform": [0], "layers_pattern": "layer"},
    "exclude_modules: k_prj match .*did you mean": {"exclude_modules": ["k_prj", "v_proj"]},
    "target_parameters: experts.up": {"target_parameters": ["experts.up"]},
    "trainable_token_indices: wte": {"trainable_token_indices": {"wte": [3]}},
    "trainable_token_indices: 128 .* 0 to 127": {"trainable_token_indices": [3, 128]},
    "layer_replication": {"layer_replication": [(0, 2), (1, 2)]},
    "megatron_core": {"megatron_config": {"a": 1}},
    "rank_pattern: .*layers.0.self_attn.q_proj has the value of .layers.0.* and of '.[*]proj'": {
        "rank_pattern": {"layers.0.self_attn.q_proj": 8, ".*proj": 2}
    },
    "alpha_pattern: keys before 'q_proj'": {"alpha_pattern": {".*_proj": 2, "q_proj": 2}},
    "rank_pattern: layers.1.self_attn.q_proj match no adapted": {
        "layers_to_transform": [0],
        "rank_pattern": {"layers.1.self_attn.q_proj": 2},
    },
    "exclude_modules: k_proj match no adapted": {"exclude_modules": ["k_proj"]},
    "target_modules: nothing is left of v_proj": {"exclude_modules": ["v_proj"]},
    "exclude_modules: does not choose among": {
        "exclude_modules": ["0.self_attn.v_proj"],
        "target_parameters": ["norm.weight"],
    },
    "use_qalora: .*does nothing": {"use_qalora": True},
    "lora_alpha: at 0 ": {"lora_alpha": 0},
    "alpha_pattern.v_proj: at 0 ": {"alpha_pattern": {"v_proj": 0}},
    "lora_dropout: drops all": {"lora_dropout": 1.0},
    "layers_to_transform: is empty": {"layers_to_transform": []},
    "trainable_token_indices: is empty": {"trainable_token_indices": []},
    "arrow_config: ": {"arrow_config": peft.ArrowConfig(top_k=2)},
    "task_type: SEQ_CLS": {"task_type": "SEQ_CLS"},
}


@pytest.mark.parametrize("said", SELECTIONS)
def test_what_a_config_selects_in_vain_or_nobody_could_read_again_is_named_before_it_is_attached(said):
    given = SELECTIONS[said]
    config = LoraConfig(**{"target_modules": ["q_proj", "v_proj"], **given})
    assert re.search(said, refusal(attach_adapter, base(), config))


def test_what_a_config_says_of_the_process_it_comes_from_counts_for_nothing():
    config = LoraConfig(r=2, target_modules=["q_proj"], inference_mode=True, base_model_name_or_path="another")
    policy = attach_adapter(base(), config)
    assert trained(policy)
    saved_by_us(policy)
    assert peft.PeftConfig.from_pretrained("adapter").task_type == "CAUSAL_LM"
    assert peft.PeftConfig.from_pretrained("adapter").base_model_name_or_path == "sandbox:base"


@pytest.mark.parametrize("method", each(ADAPTERS))
def test_base_only_is_the_base_and_leaves_no_trace(method):
    policy = move(policy_of(method, kwargs={"modules_to_save": ["model.norm"]} if method != "ln_tuning" else {}))
    before, names = logits(policy), trained(policy)
    with base_only(policy):
        assert torch.equal(logits(policy), logits(base()))
    assert torch.equal(logits(policy), before)
    assert trained(policy) == names
    of_base = {name for name, _ in base().named_parameters()}
    assert not of_base & {name.removeprefix("base_model.model.") for name in adapter_tensors(policy)}


def test_frozen_parts_of_the_active_adapter_stay_frozen_after_an_error_too():
    for method in ("lora_fa", "adalora", "slicefine", "lora"):
        policy = policy_of(method)
        names = trained(policy)
        with pytest.raises(ZeroDivisionError), base_only(policy):
            raise ZeroDivisionError
        assert trained(policy) == names
        frozen = METHODS[method].frozen
        assert not any(part in name for part in frozen for name in names), method


def test_tensors_are_those_in_memory_and_those_of_another_adapter_are_refused():
    policy = policy_of("pissa")
    tensors = adapter_tensors(policy)
    assert {name.partition("_proj.")[2] for name in tensors} == {
        "lora_A.default.weight", "lora_B.default.weight", "anchor_A.default", "anchor_B.default"
    }  # fmt: skip
    next(iter(tensors.values())).zero_()
    assert not torch.equal(logits(policy), logits(base()))
    policy = move(policy_of("lora"))
    before = logits(policy)
    for change in ("absent", "further", "shape"):
        tensors = {name: tensor.clone() for name, tensor in adapter_tensors(policy).items()}
        name = next(iter(tensors))
        if change == "further":
            tensors["another"] = torch.zeros(1)
        elif change == "absent":
            del tensors[name]
        else:
            tensors[name] = tensors[name][:-1]
        with pytest.raises(BrokenPromiseError, match=r"^the checkpoint holds another adapter: ") as caught:
            load_adapter_tensors(policy, tensors)
        assert ("another" if change == "further" else name) in str(caught.value).partition(": ")[2]
        assert torch.equal(logits(policy), before)


@pytest.mark.parametrize(("family", "left_out"), [("Gemma3nText", "correction_coefs"), ("Llama4Text", "router")])
def test_layers_whose_weights_are_read_elsewhere_or_that_return_more_are_left_out_of_all_linear(family, left_out):
    policy = attach_adapter(make(family), adaptation(PeftSection(rank=2)))
    assert not [name for name, p in policy.named_parameters() if p.requires_grad and left_out in name]
