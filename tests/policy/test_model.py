"""What is said of the base and its adapter: fingerprint, identity, counts, targets and end tokens."""

import copy
import hashlib
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from perl.errors import ModelError
from perl.methods.registry import METHODS
from perl.methods.settings import adaptation
from perl.policy.attach import attach_adapter, check_trainable, shaped_adapter
from perl.policy.fingerprint import base_dtype, base_fingerprint, is_the_base, source_fingerprint
from perl.policy.model import (
    base_identity,
    eos_token_ids,
    load_base,
    load_empty_base,
    load_tokenizer,
    resolve_model,
    total_parameters,
    trainable_parameters,
)
from perl.policy.targets import check_targets
from perl.recipe.sections import ModelSection, PeftSection
from perl.sandbox import BASE_FOLDER
from tests.a_few_methods import A_FEW

CPU = torch.device("cpu")
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# From the sandbox's config: 4 layers of width 128, 4 query and 2 key heads of 32, 384 inside, 128 tokens, tied.
LINEAR_SHAPES = [(128, 128), (128, 64), (128, 64), (128, 128), (128, 384), (128, 384), (384, 128)]
LAYERS = 4


def base():
    return load_base(ModelSection(), CPU)


def adapted(method: str = "lora", rank: int = 4, model: torch.nn.Module | None = None, **kwargs):
    settings = {"rank": rank} if "rank" in METHODS[method].settings else {}
    return attach_adapter(model or base(), adaptation(PeftSection(method=method, **settings, kwargs=kwargs)))


def move_adapter(policy: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += torch.randn(parameter.shape)


@pytest.fixture(scope="module")
def pristine() -> str:
    return base_fingerprint(base())


def two_adapters() -> PeftModel:
    policy = adapted()
    policy.add_adapter("ref", policy.peft_config["default"])
    return policy


def with_experts() -> torch.nn.Module:
    torch.manual_seed(7)
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8, "head_dim": 4}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **counts, num_experts_per_tok=1))


def on_experts() -> PeftModel:
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=experts, task_type="CAUSAL_LM")
    return attach_adapter(with_experts(), config)


POLICIES = {
    **{name: partial(adapted, name) for name in A_FEW},
    **{f"{name} with norms": partial(adapted, name, modules_to_save=["q_norm", "norm"]) for name in ("lora", "pissa")},
    "ln_tuning": partial(adapted, "ln_tuning", modules_to_save=["o_proj"]),
    **{"two": two_adapters, "tokens": partial(adapted, trainable_token_indices=[3, 4]), "experts": on_experts},
}


@pytest.mark.parametrize("kind", POLICIES)
def test_the_fingerprint_is_the_bases_with_any_adapter_moved_or_not(pristine, kind):
    policy = POLICIES[kind]()
    expected = base_fingerprint(with_experts()) if kind == "experts" else pristine
    assert base_fingerprint(policy) == expected
    move_adapter(policy)
    assert base_fingerprint(policy) == expected


@pytest.mark.parametrize("method", [None, "lora", "pissa"])
def test_the_fingerprint_notices_a_single_bit_of_any_weight_of_the_base(pristine, method):
    model = base()
    weights = list(model.parameters())
    assert len(weights) == 46
    if method is not None:
        model = adapted(method, model=model, modules_to_save=["norm"])
    for weight in weights:
        bits = weight.data.view(torch.int32).flatten()
        bits[-1] ^= 1
        assert base_fingerprint(model) != pristine
        bits[-1] ^= 1
    assert base_fingerprint(model) == pristine


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_base_is_counted_as_it_was_loaded_which_is_what_rounding_gives(pristine, dtype):
    loaded = load_base(ModelSection(dtype=dtype), CPU)
    assert base_dtype(loaded) == dtype
    assert (base_fingerprint(loaded) == pristine) is (dtype == "float32")
    assert base_fingerprint(loaded) == counted_as_it_is(loaded) == source_fingerprint(loaded)
    assert base_fingerprint(base(), getattr(torch, dtype)) == base_fingerprint(loaded)
    for model in (base(), adapted("pissa")):
        assert is_the_base(model, base_fingerprint(loaded))
        assert is_the_base(model, base_fingerprint(loaded), dtype)
        assert not is_the_base(model, base_fingerprint(loaded), "no type") or dtype == "float32"


def counted_as_it_is(model: torch.nn.Module) -> str:
    """A fingerprint of each parameter in the type that it has in memory."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        numbers = parameter.detach().view(torch.uint8).numpy().tobytes()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode() + numbers)
    return digest.hexdigest()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_base_of_two_types_is_counted_in_those_that_it_was_loaded_in(dtype):
    before = base_fingerprint(load_base(ModelSection(dtype=dtype), CPU))
    policy = adapted(model=load_base(ModelSection(dtype=dtype), CPU))
    norms = [module.float() for name, module in policy.named_modules() if name.endswith("layernorm")]
    assert base_fingerprint(policy) == source_fingerprint(policy) == before  # made float32 without a loss
    norms[0].weight.data[0] *= 1 + 2**-20
    assert norms[0].weight[0] != norms[0].weight[0].to(getattr(torch, dtype))
    assert base_fingerprint(policy) != before
    model = base()
    model.model.norm.to(getattr(torch, dtype))
    assert base_fingerprint(model) == counted_as_it_is(model) != base_fingerprint(base())


def test_the_fingerprint_notices_the_same_bytes_under_another_name_shape_or_type():
    plain = torch.nn.ParameterDict({"weight": torch.zeros(8)})
    for other in (
        {"weight": torch.zeros(2, 4)},
        {"weight": torch.zeros(4, dtype=torch.float64)},
        {"scale": torch.zeros(8)},
        {"weight": torch.zeros(9)},
        {"weight": torch.zeros(8), "zero": torch.zeros(0)},
    ):
        assert base_fingerprint(torch.nn.ParameterDict(other)) != base_fingerprint(plain), other
    assert base_fingerprint(torch.nn.ParameterDict({"weight": torch.zeros(8)})) == base_fingerprint(plain)


def test_what_trains_is_counted_and_tied_weights_once():
    norms = LAYERS * (128 + 128 + 32 + 32) + 128
    matrices = LAYERS * sum(inputs * outputs for inputs, outputs in LINEAR_SHAPES) + 128 * 128
    assert total_parameters(base()) == norms + matrices
    assert trainable_parameters(load_empty_base(ModelSection())) == norms + matrices  # method full
    policy = adapted()
    assert total_parameters(policy) == norms + matrices + trainable_parameters(policy)
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]  # a new adapter freezes the base
    assert len(trained) == 2 * len(LINEAR) * LAYERS
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    model = base().requires_grad_(False)
    with pytest.raises(ModelError, match="no trainable parameters"):
        check_trainable(model)
    next(model.parameters()).requires_grad_(True)
    check_trainable(model)


def test_bases_are_called_by_name_and_commit_or_by_their_path(tmp_path):
    assert base_identity(base()) == ("sandbox:base", None)
    assert base_identity(adapted()) == ("sandbox:base", None)
    shutil.copytree(BASE_FOLDER, tmp_path / "mine")
    section = ModelSection(name=str(tmp_path / "mine"))
    assert base_identity(load_base(section, CPU)) == (str(tmp_path / "mine"), None)
    model = base()
    model.config.name_or_path, model.config._commit_hash = "someone/model", "0123abc"
    assert base_identity(model) == ("someone/model", "0123abc")
    assert Path(resolve_model("sandbox:base")) == BASE_FOLDER
    assert resolve_model("someone/model") == "someone/model"
    with pytest.raises(ModelError, match="sandbox has no model 'sandbox:bas'"):
        resolve_model("sandbox:bas")


def test_every_end_token_counts_once_the_tokenizers_first():
    model, tokenizer = base(), load_tokenizer(ModelSection())
    policy = attach_adapter(model, LoraConfig(target_modules=["q_proj"]))
    for declared, expected in ((None, (1,)), (1, (1,)), (5, (1, 5)), ([5, 1, 7], (1, 5, 7)), ([], (1,))):
        model.generation_config.eos_token_id = declared
        assert eos_token_ids(model, tokenizer) == expected, declared
        assert eos_token_ids(policy, tokenizer), declared
    without = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    assert without.eos_token_id is None
    assert eos_token_ids(base(), without) == (1,)


def test_the_base_is_loaded_for_evaluation_and_the_empty_one_has_its_modules_and_counts():
    model = base()
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    half = load_base(ModelSection(dtype="bfloat16"), CPU)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    empty = load_empty_base(ModelSection())
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert {name: p.shape for name, p in empty.named_parameters()} == shapes
    check_targets(empty, LoraConfig(target_modules=LINEAR))
    with_weights = trainable_parameters(attach_adapter(model, adaptation(PeftSection())))
    assert trainable_parameters(shaped_adapter(empty, adaptation(PeftSection()).config)) == with_weights


def test_the_tokenizer_pads_on_the_left_with_its_end_token_if_it_has_no_other(tmp_path):
    assert load_tokenizer(ModelSection()).padding_side == "left"
    plain = copy.deepcopy(load_tokenizer(ModelSection()))
    plain.pad_token = None
    plain.save_pretrained(tmp_path)
    shutil.copy(BASE_FOLDER / "config.json", tmp_path)
    tokenizer = load_tokenizer(ModelSection(name=str(tmp_path)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
