"""Every PEFT method builds the config that its paper asks for and starts as the base itself."""

import math

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from perl.methods.registry import METHODS
from perl.methods.settings import adaptation, resolved_settings
from perl.policy.attach import attach_adapter
from perl.policy.model import trainable_parameters
from perl.recipe.sections import PeftSection
from perl.sandbox import BASE_FOLDER

LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "use_rslora": False, "use_dora": False}

# Name -> PEFT's class, and what its arguments are where nothing is asked for.
EXPECTED = {
    "lora": ("LoraConfig", LORA),
    "rslora": ("LoraConfig", {**LORA, "lora_alpha": 8, "use_rslora": True}),
    "dora": ("LoraConfig", {**LORA, "use_dora": True}),
    "lora_plus": ("LoraConfig", LORA),
    "lora_fa": ("LoraConfig", LORA),
    "adalora": (
        "AdaLoraConfig",
        {"target_r": 16, "init_r": 24, "lora_alpha": 32, "beta1": 0.85, "orth_reg_weight": 0.5},
    ),
    "pissa": ("LoraConfig", {**LORA, "lora_alpha": 16, "init_lora_weights": "pissa"}),
    "milora": ("LoraConfig", {**LORA, "lora_alpha": 16}),
    "milora_plus": ("LoraConfig", LORA),
    "rlpo": ("LoraConfig", LORA),
    "olora": ("LoraConfig", {**LORA, "lora_alpha": 16, "init_lora_weights": "olora"}),
    "vera": ("VeraConfig", {"r": 256, "vera_dropout": 0.0, "d_initial": 0.1, "save_projection": True}),
    "miss": ("MissConfig", {"r": 64, "miss_dropout": 0.0}),
    "ln_tuning": ("LNTuningConfig", {}),
    "ia3": ("IA3Config", {"feedforward_modules": {"down_proj"}}),
    "hra": ("HRAConfig", {"r": 8}),
    "slicefine": ("LoraConfig", {**LORA, "lora_alpha": 16}),
    "tinylora": ("TinyLoraConfig", {"r": 2, "u": 64, "tinylora_dropout": 0.0}),
    "randlora": ("RandLoraConfig", {"r": 32, "randlora_alpha": 640, "randlora_dropout": 0.0}),
    "oft": ("OFTConfig", {"oft_block_size": 32, "module_dropout": 0.0}),
    "boft": ("BOFTConfig", {"boft_block_size": 4, "boft_n_butterfly_factor": 1, "boft_dropout": 0.0}),
    "loha": ("LoHaConfig", {"r": 8, "alpha": 8}),
    "lokr": ("LoKrConfig", {"r": 8, "alpha": 8}),
    "fourierft": ("FourierFTConfig", {"n_frequency": 1000, "scaling": 150.0, "init_weights": True}),
    "shira": ("ShiraConfig", {"r": 32, "mask_type": "random", "random_seed": 0}),
    "delora": ("DeloraConfig", {"r": 8, "delora_lambda": 1, "module_dropout": 0.0}),
    "gralora": ("GraloraConfig", {"r": 32, "alpha": 64, "gralora_k": 2, "gralora_dropout": 0.0}),
    "road": ("RoadConfig", {"variant": "road_1", "group_size": 64}),
}

TARGETS = {"ln_tuning": r".*(norm|ln_\w+|layer_norm\w*)", "ia3": {"k_proj", "v_proj", "down_proj"}}

LORA_FAMILY = [name for name, (config, _) in EXPECTED.items() if config == "LoraConfig"]


@pytest.fixture
def base():
    return AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32).eval()


def small(name: str) -> PeftSection:
    """A small adapter of the method."""
    return PeftSection(method=name, **({"rank": 4} if "rank" in METHODS[name].settings else {}))


def test_every_method_has_a_name_a_sentence_and_a_source():
    assert list(METHODS) == [*EXPECTED, "full"]
    assert all(method.name == name and method.summary and method.source for name, method in METHODS.items())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_method_without_settings_has_its_documented_defaults(name):
    config_class, arguments = EXPECTED[name]
    how = adaptation(PeftSection(method=name))
    assert how.method is METHODS[name]
    assert type(how.config) is getattr(peft, config_class)
    assert how.config.task_type == "CAUSAL_LM"
    assert how.config.target_modules == TARGETS.get(name, "all-linear")
    assert {argument: getattr(how.config, argument) for argument in arguments} == arguments
    resolved = resolved_settings(PeftSection(method=name))
    assert resolved.keys() == METHODS[name].settings.keys()
    assert resolved.get("alpha") == next((v for k, v in arguments.items() if k.endswith("alpha")), None)
    assert resolved.get("rank") == arguments.get("target_r", arguments.get("r"))


def test_the_method_full_has_no_adapter_and_no_settings():
    how = adaptation(PeftSection(method="full"))
    assert (how.method.name, how.config, dict(how.options)) == ("full", None, {})
    assert resolved_settings(PeftSection(method="full")) == {}


def kronecker(rank: int, inputs: int, outputs: int) -> int:
    """LoKr: a matrix of the smaller divisors, and one of the larger ones, in factors where that is smaller."""
    small = {64: 8, 128: 8, 384: 16}  # the divisor next to the square root
    large_in, large_out = inputs // small[inputs], outputs // small[outputs]
    in_factors = rank < max(large_in, large_out) / 2
    large = rank * (large_in + large_out) if in_factors else large_in * large_out
    return small[inputs] * small[outputs] + large


# Trained numbers of a layer by rank, inputs and outputs.
TRAINED = {
    **dict.fromkeys(
        ("lora", "rslora", "lora_plus", "pissa", "milora", "milora_plus", "rlpo", "olora", "gralora", "shira"),
        lambda r, i, o: r * (i + o),
    ),
    "dora": lambda r, i, o: r * (i + o) + o,
    "lora_fa": lambda r, _, o: r * o,
    "slicefine": lambda r, _, o: r * o,
    "miss": lambda r, _, o: r * o,
    "adalora": lambda r, i, o: math.ceil(1.5 * r) * (i + o + 1),  # before ranks are taken away
    "vera": lambda r, _, o: r + o,
    "hra": lambda r, i, _: r * i,
    "tinylora": lambda *_: 64,
    "randlora": lambda r, i, o: -(-min(i, o) // r) * (r + min(i, o)),
    "oft": lambda _, i, __: i // 32 * 32 * 31 // 2,
    "boft": lambda _, i, o: i * 4 + o,
    "loha": lambda r, i, o: 2 * r * (i + o),
    "lokr": kronecker,
    "fourierft": lambda *_: 1000,
    "delora": lambda r, i, o: r * (i + o) + 1,
    "road": lambda _, __, o: o,
}


@pytest.mark.parametrize("name", TRAINED)
def test_the_number_of_trained_parameters_is_that_of_the_paper(base, name):
    rank = 8
    linear = [m for key, m in base.named_modules() if isinstance(m, nn.Linear) and key != "lm_head"]
    assert len(linear) == 4 * 7
    expected = sum(TRAINED[name](rank, m.in_features, m.out_features) for m in linear)
    section = small(name).model_copy(update={"rank": rank} if "rank" in METHODS[name].settings else {})
    assert trainable_parameters(attach_adapter(base, adaptation(section))) == expected


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - set(TRAINED)))
def test_methods_with_targets_of_their_own_train_what_the_paper_says(base, name):
    norms = sum(value.numel() for key, value in base.named_parameters() if "norm" in key)
    layers = [m for key, m in base.named_modules() if key.endswith(("k_proj", "v_proj"))]
    inner = sum(m.in_features for key, m in base.named_modules() if key.endswith("down_proj"))
    trained = trainable_parameters(attach_adapter(base, adaptation(PeftSection(method=name))))
    if name == "ln_tuning":
        assert trained == norms
    else:  # a factor for each key, value and inner activation
        assert trained == sum(m.out_features for m in layers) + inner
        config = adaptation(PeftSection(method="ia3", target_modules=["q_proj", "k_proj"])).config
        assert (config.target_modules, config.feedforward_modules) == ({"q_proj", "k_proj"}, set())


@pytest.mark.parametrize(
    ("name", "scale"), [(name, 12 / (math.sqrt(9) if name == "rslora" else 9)) for name in LORA_FAMILY]
)
def test_the_update_is_scaled_as_the_paper_says(base, name, scale):
    targets = ["q_proj"]
    policy = attach_adapter(base, adaptation(PeftSection(method=name, rank=9, alpha=12.0, target_modules=targets)))
    scales = [m.scaling["default"] for m in policy.modules() if hasattr(m, "lora_A")]
    assert scales == pytest.approx([scale] * 4)
