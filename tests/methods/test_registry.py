"""Every PEFT method builds the config that its paper asks for and starts as the base itself."""

import math

import peft
import pytest
import torch
from peft import LoraConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn
from transformers import AutoModelForCausalLM

from perl.adapter import attach_adapter
from perl.errors import ModelError, RecipeError
from perl.methods.registry import METHODS, REFUSED_TYPES, Method
from perl.methods.settings import (
    adaptation,
    continued_adaptation,
    dropout_of,
    method_of,
    method_problems,
    rate_warning,
    resolved_settings,
)
from perl.model import trainable_parameters
from perl.policy import setting_warnings
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
FLAGS = ("use_rslora", "use_dora")
OTHER_VALUES = {"rank": 3, "alpha": 5.0, "dropout": 0.25, "target_modules": ["q_proj"]}


@pytest.fixture
def base():
    return AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32).eval()


def log_probs(model):
    """(2, 11) of fixed tokens, the second row padded on the left."""
    input_ids = torch.randint(8, 100, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(input_ids)
    mask[1, :3] = 0
    with torch.no_grad():
        logits = model(input_ids=input_ids, attention_mask=mask).logits[:, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)[:, 3:]


def small(name: str) -> PeftSection:
    """A small adapter of the method."""
    return PeftSection(method=name, **({"rank": 4} if "rank" in METHODS[name].settings else {}))


def move_adapter(policy) -> None:
    """Moves all that trains; VeRA's vectors, which scale small matrices, further."""
    size = 0.5 if isinstance(policy.active_peft_config, peft.VeraConfig) else 0.05
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape)


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


@pytest.mark.parametrize("name", LORA_FAMILY)
def test_settings_and_further_arguments_reach_the_config(name):
    section = PeftSection(method=name, **OTHER_VALUES, kwargs={"exclude_modules": ["a"], "rank_pattern": {"q_proj": 2}})
    config = adaptation(section).config
    assert (config.r, config.lora_alpha, config.lora_dropout) == (3, 5.0, 0.25)
    assert config.target_modules == {"q_proj"}
    assert (config.exclude_modules, config.rank_pattern) == ({"a"}, {"q_proj": 2})
    assert {flag: getattr(config, flag) for flag in FLAGS} == {flag: EXPECTED[name][1][flag] for flag in FLAGS}
    assert resolved_settings(section) == OTHER_VALUES


@pytest.mark.parametrize("name", EXPECTED)
def test_every_setting_of_a_method_reaches_its_config(name):
    asked = {setting: value for setting, value in OTHER_VALUES.items() if setting in METHODS[name].settings}
    asked |= {"rank": 6} if "rank" in asked else {}
    config = adaptation(PeftSection(method=name, **asked)).config
    names = {"rank": "target_r" if name == "adalora" else "r", "target_modules": "target_modules"}
    for setting, value in asked.items():
        found = [vars(config)[a] for a in vars(config) if a == names.get(setting) or a.endswith(setting)]
        assert found in ([value], [{*value}] if setting == "target_modules" else [value]), setting


@pytest.mark.parametrize("name", METHODS)
def test_a_method_refuses_exactly_the_settings_it_does_not_read(name):
    for setting, value in OTHER_VALUES.items():
        section = PeftSection(method=name, **{setting: value})
        problems = method_problems({"peft": section})
        if setting in METHODS[name].settings:
            assert problems == []
        else:
            ((path, problem),) = problems
            assert path == ("peft", setting)
            assert str(problem) == f"{name} has no {setting} (leave it out)"
            with pytest.raises(RecipeError, match=rf"^peft\.{setting}: {name} has no {setting} \(leave it out\)$"):
                adaptation(section)


def test_a_setting_that_a_method_would_ignore_is_refused(monkeypatch):
    fixed = Method("fixed", "none", "none", "LoraConfig", {"rank": 4}, {"rank": "r"})
    monkeypatch.setitem(METHODS, "fixed", fixed)
    section = PeftSection(method="fixed", rank=2, alpha=3.0, dropout=0.5)
    assert [(path, problem.message) for path, problem in method_problems({"peft": section})] == [
        (("peft", "alpha"), "fixed has no alpha"),
        (("peft", "dropout"), "fixed has no dropout"),
    ]
    with pytest.raises(RecipeError, match=r"^peft\.alpha: fixed has no alpha \(leave it out\)$"):
        resolved_settings(section)
    assert resolved_settings(PeftSection(method="fixed", rank=2)) == {"rank": 2}


@pytest.mark.parametrize(
    ("further", "path"), [({"kwargs": {"r": 4}}, "kwargs"), ({"adapter": "folder/adapter"}, "adapter")]
)
def test_the_method_full_refuses_what_an_adapter_would_need(further, path):
    ((found, problem),) = method_problems({"peft": PeftSection(method="full", **further)})
    assert found == ("peft", path)
    assert "without an adapter" in problem.message


@pytest.mark.parametrize("setting", OTHER_VALUES)
def test_an_adapter_that_is_continued_brings_its_settings(setting):
    section = PeftSection(adapter="folder", **{setting: OTHER_VALUES[setting]})
    ((path, problem),) = method_problems({"peft": section})
    assert path == ("peft", setting)
    assert problem.message == "comes from the adapter that is continued"


def test_an_adapter_is_continued_by_its_own_method_or_by_one_that_fits_it():
    config = LoraConfig(r=3, use_dora=True, task_type="CAUSAL_LM")
    assert continued_adaptation(PeftSection(adapter="x"), config).method.name == "dora"
    plus = PeftSection(adapter="x", method="lora_plus", kwargs={"loraplus_lr_ratio": 4.0})
    how = continued_adaptation(plus, LoraConfig(r=3))
    assert (how.method.name, dict(how.options)) == ("lora_plus", {"loraplus_lr_ratio": 4.0})
    for method in ("vera", "dora"):
        with pytest.raises(RecipeError, match=r"^peft\.method: the adapter is of the method lora "):
            continued_adaptation(PeftSection(adapter="x", method=method), LoraConfig(r=3))


def test_an_unknown_method_is_refused_with_the_nearest_name():
    section = PeftSection(method="rs-lora")
    ((path, problem),) = method_problems({"peft": section})
    assert path == ("peft", "method")
    assert str(problem) == "no method 'rs-lora' (did you mean rslora?)"
    with pytest.raises(RecipeError, match=r"^peft\.method: no method 'rs-lora' \(did you mean rslora\?\)$"):
        adaptation(section)
    assert "lora" in str(method_problems({"peft": PeftSection(method="zzzzzz")})[0][1])


def test_a_section_that_is_not_valid_is_not_looked_at():
    assert method_problems({}) == []


@pytest.mark.parametrize("name", LORA_FAMILY)
def test_an_unknown_further_argument_is_refused_with_the_nearest_name(name):
    with pytest.raises(RecipeError) as caught:
        adaptation(PeftSection(method=name, kwargs={"init_lora_weight": True}))
    assert str(caught.value) == (
        "peft.kwargs.init_lora_weight: LoraConfig has no such argument (did you mean init_lora_weights?)"
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_an_unknown_argument_of_any_method_is_refused(name):
    with pytest.raises(RecipeError, match=rf"^peft\.kwargs\.nonsense: {EXPECTED[name][0]} has no such argument"):
        adaptation(PeftSection(method=name, kwargs={"nonsense": 1}))


@pytest.mark.parametrize("argument", ["r", "lora_alpha", "lora_dropout", "target_modules"])
def test_a_further_argument_that_a_setting_holds_is_refused(argument):
    with pytest.raises(RecipeError, match=rf"^peft\.kwargs\.{argument}: "):
        adaptation(PeftSection(kwargs={argument: 1}))


def test_the_task_is_no_further_argument():
    with pytest.raises(RecipeError, match=r"^peft\.kwargs.*task_type"):
        adaptation(PeftSection(kwargs={"task_type": "SEQ_CLS"}))


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("rslora", "use_rslora"),
        ("dora", "use_dora"),
        ("pissa", "init_lora_weights"),
        ("olora", "init_lora_weights"),
        ("fourierft", "init_weights"),
    ],
)
def test_what_makes_a_method_cannot_be_changed(name, argument):
    with pytest.raises(RecipeError, match=rf"^peft\.kwargs\.{argument}: is what makes this method"):
        adaptation(PeftSection(method=name, kwargs={argument: False}))


@pytest.mark.parametrize("name", EXPECTED)
def test_an_adapter_is_all_that_trains_and_starts_as_the_base(base, name):
    before = log_probs(base)
    of_the_base = {id(parameter) for parameter in base.parameters()}
    weights = {key: value.clone() for key, value in base.state_dict().items()}
    policy = attach_adapter(base, adaptation(PeftSection(method=name))).eval()
    trained = {key: value for key, value in policy.named_parameters() if value.requires_grad}
    assert trained
    assert not [key for key, value in trained.items() if id(value) in of_the_base]
    assert not [key for key in trained if "lm_head" in key or "embed" in key]
    torch.testing.assert_close(log_probs(policy), before, rtol=0, atol=2e-5)
    move_adapter(policy)
    assert (log_probs(policy) - before).abs().max() > 1e-2
    kept = {
        key.removeprefix("base_model.model.").replace(".base_layer.", "."): v for key, v in policy.state_dict().items()
    }
    assert all(torch.equal(kept[key], value) for key, value in weights.items())


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


@pytest.mark.parametrize("rank", [4, 8])
@pytest.mark.parametrize("name", TRAINED)
def test_the_number_of_trained_parameters_is_that_of_the_paper(base, name, rank):
    linear = [m for key, m in base.named_modules() if isinstance(m, nn.Linear) and key != "lm_head"]
    assert len(linear) == 4 * 7
    expected = sum(TRAINED[name](rank, m.in_features, m.out_features) for m in linear)
    section = small(name).model_copy(update={"rank": rank} if "rank" in METHODS[name].settings else {})
    assert trainable_parameters(attach_adapter(base, adaptation(section))) == expected


def test_methods_with_targets_of_their_own_train_what_the_paper_says(base):
    assert set(EXPECTED) - set(TRAINED) == {"ln_tuning", "ia3"}
    norms = sum(value.numel() for key, value in base.named_parameters() if "norm" in key)
    assert norms == 4 * (128 + 128 + 32 + 32) + 128
    assert trainable_parameters(attach_adapter(base, adaptation(PeftSection(method="ln_tuning")))) == norms


def test_ia3_trains_a_factor_for_each_key_value_and_inner_activation(base):
    assert trainable_parameters(attach_adapter(base, adaptation(PeftSection(method="ia3")))) == 4 * (64 + 64 + 384)
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


def test_target_modules_choose_what_is_trained(base):
    policy = attach_adapter(base, adaptation(PeftSection(target_modules=["q_proj", "o_proj"])))
    trained = [key for key, value in policy.named_parameters() if value.requires_grad]
    assert len(trained) == 4 * 2 * 2
    assert all(".q_proj." in key or ".o_proj." in key for key in trained)


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({}, "lora"),
        ({"use_rslora": True}, "rslora"),
        ({"use_dora": True}, "dora"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"init_lora_weights": "gaussian"}, "lora"),
    ],
    ids=str,
)
def test_a_config_of_peft_belongs_to_the_method_that_builds_it(kwargs, name):
    assert method_of(LoraConfig(**kwargs)).name == name


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - set(LORA_FAMILY)))
def test_the_config_of_a_method_with_a_class_of_its_own_is_recognised(name):
    assert method_of(adaptation(PeftSection(method=name)).config) is METHODS[name]


@pytest.mark.filterwarnings("ignore:`init_lora_weights` is")  # PEFT misses the settings of CorDA and EVA
@pytest.mark.parametrize(
    ("kwargs", "where"),
    [
        ({"bias": "all"}, "peft.kwargs.bias"),
        ({"bias": "lora_only"}, "peft.kwargs.bias"),
        ({"init_lora_weights": "corda"}, "peft_config.init_lora_weights"),
        ({"init_lora_weights": "eva"}, "peft_config.init_lora_weights"),
        ({"init_lora_weights": "lora_ga"}, "peft_config.init_lora_weights"),
    ],
    ids=str,
)
def test_a_config_that_would_change_the_base_is_refused(kwargs, where):
    with pytest.raises(RecipeError) as caught:
        method_of(LoraConfig(**kwargs))
    assert caught.value.problems[0].where == where


@pytest.mark.parametrize(
    ("argument", "value", "name"),
    [
        ("init_lora_weights", "pissa", "pissa"),
        ("init_lora_weights", "pissa_niter_4", "pissa"),
        ("init_lora_weights", "olora", "olora"),
        ("use_dora", True, "dora"),
        ("use_rslora", True, "rslora"),
    ],
)
def test_an_argument_that_makes_another_method_is_refused_with_its_name(argument, value, name):
    with pytest.raises(RecipeError) as caught:
        adaptation(PeftSection(kwargs={argument: value}))
    (problem,) = caught.value.problems
    assert problem.where == f"peft.kwargs.{argument}"
    assert f"peft.method: {name}" in problem.hint


def test_flags_of_lora_may_go_with_methods_that_they_do_not_make():
    how = adaptation(PeftSection(method="lora_plus", kwargs={"use_rslora": True, "loraplus_lr_ratio": 8.0}))
    assert (how.method.name, how.config.use_rslora) == ("lora_plus", True)
    assert dict(how.options) == {"loraplus_lr_ratio": 8.0}


def test_a_type_of_peft_is_taken_verbatim(base):
    section = PeftSection.model_validate({"type": "C3A", "block_size": 32, "target_modules": ["q_proj", "v_proj"]})
    assert section.kwargs == {"block_size": 32}
    assert method_problems({"peft": section}) == []
    how = adaptation(section)
    assert type(how.config) is peft.C3AConfig
    assert (how.config.block_size, how.config.target_modules) == (32, {"q_proj", "v_proj"})
    assert (how.config.task_type, how.method.name) == ("CAUSAL_LM", "c3a")
    assert resolved_settings(section) == {"target_modules": ["q_proj", "v_proj"], "block_size": 32}
    # A circulant block of size b has b numbers: in x out / b.
    assert trainable_parameters(attach_adapter(base, how)) == 4 * (128 * 128 + 128 * 64) // 32


@pytest.mark.parametrize("kind", ["lora", "LORA"])
def test_a_type_that_has_a_row_is_that_method(kind):
    how = adaptation(PeftSection(type=kind, kwargs={"r": 3, "use_dora": True}))
    assert (how.method.name, how.config.r) == ("dora", 3)


def test_an_unknown_type_is_refused_with_the_nearest_name():
    with pytest.raises(RecipeError, match=r"^peft\.type: PEFT has no type 'C3B' \(did you mean C3A\?\)$"):
        adaptation(PeftSection(type="C3B"))


@pytest.mark.parametrize("setting", ["rank", "alpha", "dropout"])
def test_our_settings_are_not_arguments_of_a_type(setting):
    section = PeftSection(type="C3A", **{setting: OTHER_VALUES[setting]})
    ((path, _),) = method_problems({"peft": section})
    assert path == ("peft", setting)


def test_a_method_beside_a_type_is_refused():
    ((path, _),) = method_problems({"peft": PeftSection(type="C3A", method="dora")})
    assert path == ("peft", "method")


def test_an_argument_of_a_type_beside_an_adapter_that_is_continued_is_refused():
    section = PeftSection(type="C3A", adapter="folder", kwargs={"block_size": 32})
    assert [path for path, _ in method_problems({"peft": section})] == [("peft", "kwargs", "block_size")]


@pytest.mark.parametrize("kind", REFUSED_TYPES)
def test_a_type_that_cannot_be_trained_is_refused_with_the_reason(kind):
    assert kind in {known.value for known in PEFT_TYPE_TO_CONFIG_MAPPING}
    for written in (kind, kind.lower()):
        ((path, problem),) = method_problems({"peft": PeftSection(type=written)})
        assert path == ("peft", "type")
        assert str(problem) == f"{kind} cannot be trained: {REFUSED_TYPES[kind]}"


def test_a_config_that_cannot_be_trained_is_refused_before_it_is_attached(base):
    with pytest.raises(RecipeError, match=r"^peft_config: PROMPT_TUNING cannot be trained: its virtual tokens"):
        attach_adapter(base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    assert not hasattr(base, "peft_config")


@pytest.mark.parametrize("name", METHODS)
def test_a_learning_rate_that_would_hardly_move_an_adapter_is_said(name):
    method = METHODS[name]
    usual = method.learning_rate
    assert usual == pytest.approx(1e-5 * method.rate)
    for rate in (usual, 10 * usual, 0.21 * usual):
        assert rate_warning(method, rate) is None
    said = rate_warning(method, 0.19 * usual)
    if name == "full":
        assert said is None
    else:
        assert f"learning rate {0.19 * usual:g} is in the range of full fine-tuning" in said
        assert f"{name} usually takes about {usual:g}" in said


@pytest.mark.parametrize("name", METHODS)
def test_dropout_of_an_adapter_is_said(name):
    rate = METHODS[name].learning_rate
    assert list(setting_warnings(adaptation(PeftSection(method=name)), rate)) == []
    if "dropout" in METHODS[name].settings:
        how = adaptation(PeftSection(method=name, dropout=0.25))
        assert dropout_of(how.config) == 0.25
        (said,) = setting_warnings(how, rate)
        assert said.startswith("adapter dropout 0.25: rollouts have none")


def test_a_rank_that_a_layer_does_not_have_is_refused(base):
    for name in ("pissa", "milora", "milora_plus", "rlpo"):
        with pytest.raises(ModelError, match=r"^peft\.rank: .*k_proj is 64 x 128 and has no 65 singular triples"):
            attach_adapter(base, adaptation(PeftSection(method=name, rank=65, target_modules=["k_proj"])))
        base = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
