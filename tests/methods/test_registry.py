"""Every PEFT method builds the config that its paper asks for and starts as the base itself."""

import math

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM

from perl.adapter import attach_adapter
from perl.errors import RecipeError
from perl.methods.registry import METHODS, Method
from perl.methods.settings import adaptation, method_problems, resolved_settings
from perl.model import trainable_parameters
from perl.recipe.sections import PeftSection
from perl.sandbox import BASE_FOLDER

# Name -> alpha at rank 16, LoRA's flags. DoRA and rsLoRA are flags of LoRA in PEFT.
EXPECTED = {
    "lora": (32.0, {"use_rslora": False, "use_dora": False}),
    "rslora": (8.0, {"use_rslora": True, "use_dora": False}),
    "dora": (32.0, {"use_rslora": False, "use_dora": True}),
}
SETTINGS = [name for name in PeftSection.model_fields if name not in {"method", "kwargs"}]
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


def test_every_method_has_a_name_a_sentence_and_a_source():
    assert set(EXPECTED) <= set(METHODS)
    assert all(method.name == name and method.summary and method.source for name, method in METHODS.items())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_method_without_settings_has_its_documented_defaults(name):
    alpha, flags = EXPECTED[name]
    config = adaptation(PeftSection(method=name))
    assert type(config) is LoraConfig
    assert config.task_type == "CAUSAL_LM"
    assert (config.r, config.lora_alpha, config.lora_dropout) == (16, alpha, 0.0)
    assert config.target_modules == "all-linear"
    assert {flag: getattr(config, flag) for flag in flags} == flags
    assert resolved_settings(PeftSection(method=name)) == {
        "rank": 16, "alpha": alpha, "dropout": 0.0, "target_modules": "all-linear"
    }  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_settings_and_further_arguments_reach_the_config(name):
    _, flags = EXPECTED[name]
    section = PeftSection(method=name, **OTHER_VALUES, kwargs={"bias": "lora_only", "rank_pattern": {"q_proj": 2}})
    config = adaptation(section)
    assert (config.r, config.lora_alpha, config.lora_dropout) == (3, 5.0, 0.25)
    assert config.target_modules == {"q_proj"}
    assert (config.bias, config.rank_pattern) == ("lora_only", {"q_proj": 2})
    assert {flag: getattr(config, flag) for flag in flags} == flags
    assert resolved_settings(section) == OTHER_VALUES


@pytest.mark.parametrize("name", METHODS)
def test_a_method_refuses_exactly_the_settings_it_does_not_read(name):
    for setting in SETTINGS:
        problems = method_problems({"peft": PeftSection(method=name, **{setting: OTHER_VALUES[setting]})})
        if setting in METHODS[name].defaults:
            assert problems == []
        else:
            ((path, problem),) = problems
            assert path == ("peft", setting)
            assert f"{name} has no {setting}" in str(problem)


def test_a_setting_that_a_method_would_ignore_is_refused(monkeypatch):
    monkeypatch.setitem(METHODS, "fixed", Method("fixed", "none", "none", {"rank": 4}, METHODS["lora"].build))
    section = PeftSection(method="fixed", rank=2, alpha=3.0, dropout=0.5)
    assert [(path, problem.message) for path, problem in method_problems({"peft": section})] == [
        (("peft", "alpha"), "fixed has no alpha"),
        (("peft", "dropout"), "fixed has no dropout"),
    ]
    with pytest.raises(RecipeError, match=r"^peft\.alpha: fixed has no alpha \(leave it out\)$"):
        resolved_settings(section)
    assert resolved_settings(PeftSection(method="fixed", rank=2)) == {"rank": 2}


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


@pytest.mark.parametrize("name", EXPECTED)
def test_an_unknown_further_argument_is_refused_with_the_nearest_name(name):
    with pytest.raises(RecipeError) as caught:
        adaptation(PeftSection(method=name, kwargs={"init_lora_weight": True}))
    assert str(caught.value) == (
        "peft.kwargs.init_lora_weight: LoraConfig has no such argument (did you mean init_lora_weights?)"
    )


@pytest.mark.parametrize("argument", ["r", "lora_alpha", "lora_dropout", "target_modules", "task_type"])
def test_a_further_argument_that_a_setting_holds_is_refused(argument):
    with pytest.raises(RecipeError, match=rf"^peft\.kwargs\.{argument}: "):
        adaptation(PeftSection(kwargs={argument: 1}))


@pytest.mark.parametrize(("name", "argument"), [("rslora", "use_rslora"), ("dora", "use_dora")])
def test_what_makes_a_method_cannot_be_changed(name, argument):
    with pytest.raises(RecipeError, match=rf"^peft\.kwargs\.{argument}: is what makes this method"):
        adaptation(PeftSection(method=name, kwargs={argument: False}))


@pytest.mark.parametrize("name", METHODS)
def test_an_adapter_is_all_that_trains_and_starts_as_the_base(base, name):
    before = log_probs(base)
    weights = {key: value.clone() for key, value in base.state_dict().items()}
    policy = attach_adapter(base, adaptation(PeftSection(method=name)))
    assert trainable_parameters(policy) > 0
    trained = [key for key, value in policy.named_parameters() if value.requires_grad]
    assert all("lora_" in key for key in trained)
    assert not [key for key in trained if "lm_head" in key or "embed" in key]
    kept = {
        key.removeprefix("base_model.model.").replace(".base_layer.", "."): v for key, v in policy.state_dict().items()
    }
    assert all(torch.equal(kept[key], value) for key, value in weights.items())
    policy.eval()
    torch.testing.assert_close(log_probs(policy), before, rtol=0, atol=2e-5)
    for key, value in policy.named_parameters():
        if "lora_B" in key:
            nn.init.constant_(value, 0.02)
    assert (log_probs(policy) - before).abs().max() > 1e-2


@pytest.mark.parametrize(("name", "rank"), [("lora", 4), ("rslora", 7), ("dora", 4)])
def test_the_number_of_trained_parameters_is_that_of_the_paper(base, name, rank):
    linear = [m for key, m in base.named_modules() if isinstance(m, nn.Linear) and key != "lm_head"]
    assert len(linear) == 4 * 7
    expected = sum(rank * (m.in_features + m.out_features) for m in linear)
    expected += sum(m.out_features for m in linear) if name == "dora" else 0
    assert trainable_parameters(attach_adapter(base, adaptation(PeftSection(method=name, rank=rank)))) == expected


@pytest.mark.parametrize(("name", "scale"), [("lora", 12 / 9), ("dora", 12 / 9), ("rslora", 12 / math.sqrt(9))])
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
