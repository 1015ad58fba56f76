"""What a person writes about the adapter becomes a config with every setting in place, or is refused in one line."""

import peft
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from perl.errors import RecipeError
from perl.methods.base_checks import quantization_mistakes
from perl.methods.registry import METHODS
from perl.methods.settings import (
    adaptation,
    continued_adaptation,
    dropout_of,
    method_mistakes,
    method_of,
    rate_warning,
    resolved_settings,
)
from perl.policy.attach import attach_adapter
from perl.policy.model import trainable_parameters
from perl.recipe import load_recipe
from perl.recipe.sections import PeftSection
from perl.sandbox import BASE_FOLDER
from perl.trainer.policy_setup import setting_warnings

ADAPTERS = [name for name, method in METHODS.items() if method.config]
LORA_FAMILY = [name for name in ADAPTERS if METHODS[name].config == "LoraConfig"]

OTHER_VALUES = {"rank": 3, "alpha": 5.0, "dropout": 0.25, "target_modules": ["q_proj"]}


@pytest.fixture
def base():
    return AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", ADAPTERS)
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
        problems = method_mistakes({"peft": section})
        if setting in METHODS[name].settings:
            assert problems == []
        else:
            ((path, problem),) = problems
            assert path == ("peft", setting)
            assert str(problem) == f"{name} has no {setting} (leave it out)"
            with pytest.raises(RecipeError, match=rf"^peft\.{setting}: {name} has no {setting} \(leave it out\)$"):
                adaptation(section)


@pytest.mark.parametrize(
    ("written", "overrides", "lines"),
    [
        ("peft: {method: full}", [], []),
        ("peft: {type: LORA}", ["peft.r=4"], []),
        ("peft: {}", ["peft.method=ia3"], []),
        ("peft: {method: dora, rank: 4}", ["peft.method=full"], []),
        ("peft: {method: full}\nmodel: {quantization: nf4}", [], ["mine.yaml:2: peft.method: full cannot stand on"]),
        ("peft: {method: full, rank: 4}", [], ["mine.yaml:2: peft.rank: full has no rank (leave it out)"]),
        ("peft: {method: full}", ["peft.alpha=4"], ["command line: peft.alpha: full has no alpha (leave it out)"]),
    ],
)
def test_what_an_earlier_recipe_wrote_for_its_own_method_is_nobodys_mistake(tmp_path, written, overrides, lines):
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: quickstart\n{written}\n")
    found = []
    try:
        recipe = load_recipe(path, overrides, [method_mistakes, quantization_mistakes])
        assert (recipe.peft.rank, recipe.peft.alpha) == (None, None)
        assert load_recipe(recipe, [], [method_mistakes]).peft == recipe.peft
        assert adaptation(recipe.peft) is not None
    except RecipeError as error:
        found = str(error).splitlines()
    assert len(found) == len(lines)
    assert all(words in line for words, line in zip(lines, found, strict=True))
    kept = load_recipe("quickstart", ["peft.method=dora"], [method_mistakes]).peft
    assert (kept.rank, kept.alpha) == (8, 16)  # of a method that has them


def test_a_training_that_is_too_short_for_the_method_is_refused_before_a_model_is_loaded():
    with pytest.raises(RecipeError, match=r"train\.max_steps: adalora needs 2 optimizer steps or more"):
        load_recipe("quickstart", ["peft.method=adalora", "train.max_steps=1"], [method_mistakes])
    assert load_recipe("quickstart", ["peft.method=adalora", "train.max_steps=2"], [method_mistakes]).train[
        "max_steps"
    ] == pytest.approx(2)
    continued = ["train.max_steps=1", "peft.adapter=mine", "peft.method=adalora", "peft.rank=null"]
    assert load_recipe("quickstart", continued, [method_mistakes]).peft.adapter == "mine"


@pytest.mark.parametrize(
    ("further", "path"), [({"kwargs": {"r": 4}}, "kwargs"), ({"adapter": "folder/adapter"}, "adapter")]
)
def test_the_method_full_refuses_what_an_adapter_would_need(further, path):
    ((found, problem),) = method_mistakes({"peft": PeftSection(method="full", **further)})
    assert found == ("peft", path)
    assert "without an adapter" in problem.message


@pytest.mark.parametrize("setting", OTHER_VALUES)
def test_an_adapter_that_is_continued_brings_its_settings(setting):
    section = PeftSection(adapter="folder", **{setting: OTHER_VALUES[setting]})
    ((path, problem),) = method_mistakes({"peft": section})
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


MADE_BY = {
    **{"rslora": "use_rslora", "dora": "use_dora", "pissa": "init_lora_weights", "olora": "init_lora_weights"},
    "fourierft": "init_weights",
}
REFUSED = [
    ({"method": "zzzzzz"}, r"peft\.method: no method 'zzzzzz'.*lora"),
    ({"method": "vera", "kwargs": {"nonsense": 1}}, r"peft\.kwargs\.nonsense: VeraConfig has no such argument"),
    *(
        ({"kwargs": {argument: 1}}, rf"peft\.kwargs\.{argument}: ")
        for argument in ("r", "lora_alpha", "lora_dropout", "target_modules")  # a setting holds it
    ),
    ({"kwargs": {"task_type": "SEQ_CLS"}}, r"peft\.kwargs.*task_type"),
    *(
        ({"method": name, "kwargs": {argument: False}}, rf"peft\.kwargs\.{argument}: is what makes this method")
        for name, argument in MADE_BY.items()
    ),
    *(
        ({"kwargs": {argument: value}}, rf"peft\.kwargs\.{argument}: .*peft\.method: {name}")
        for argument, value, name in (
            ("init_lora_weights", "pissa", "pissa"),
            ("init_lora_weights", "pissa_niter_4", "pissa"),
            ("init_lora_weights", "olora", "olora"),
            ("use_dora", True, "dora"),
            ("use_rslora", True, "rslora"),
        )
    ),
]


@pytest.mark.parametrize(("written", "line"), REFUSED, ids=str)
def test_what_a_section_cannot_ask_for_is_refused_in_a_line_with_its_place_and_what_to_write(written, line):
    with pytest.raises(RecipeError, match=f"^{line}") as caught:
        adaptation(PeftSection(**written))
    assert len(caught.value.mistakes) == 1


def test_a_config_of_peft_belongs_to_the_method_that_builds_it():
    configs = [
        (LoraConfig(), "lora"),
        (LoraConfig(use_rslora=True), "rslora"),
        (LoraConfig(use_dora=True), "dora"),
        (LoraConfig(init_lora_weights="pissa"), "pissa"),
        (LoraConfig(init_lora_weights="pissa_niter_4"), "pissa"),
        (LoraConfig(init_lora_weights="olora"), "olora"),
        (LoraConfig(init_lora_weights="gaussian"), "lora"),
        *((adaptation(PeftSection(method=name)).config, name) for name in set(ADAPTERS) - set(LORA_FAMILY)),
        *((adaptation(PeftSection(type=kind, kwargs={"use_dora": True})).config, "dora") for kind in ("lora", "LORA")),
    ]
    assert [(name, config) for config, name in configs if method_of(config) is not METHODS[name]] == []


@pytest.mark.filterwarnings("ignore:`init_lora_weights` is")  # PEFT misses the settings of CorDA and EVA
@pytest.mark.parametrize(
    ("kwargs", "where"),
    [
        ({"bias": "lora_only"}, "peft.kwargs.bias"),
        ({"init_lora_weights": "corda"}, "peft_config.init_lora_weights"),
    ],
    ids=str,
)
def test_a_config_that_would_change_the_base_is_refused(kwargs, where):
    with pytest.raises(RecipeError) as caught:
        method_of(LoraConfig(**kwargs))
    assert caught.value.mistakes[0].where == where


def test_a_type_of_peft_is_taken_verbatim(base):
    section = PeftSection.model_validate({"type": "C3A", "block_size": 32, "target_modules": ["q_proj", "v_proj"]})
    assert section.kwargs == {"block_size": 32}
    assert method_mistakes({"peft": section}) == []
    how = adaptation(section)
    assert type(how.config) is peft.C3AConfig
    assert (how.config.block_size, how.config.target_modules) == (32, {"q_proj", "v_proj"})
    assert (how.config.task_type, how.method.name) == ("CAUSAL_LM", "c3a")
    assert resolved_settings(section) == {"target_modules": ["q_proj", "v_proj"], "block_size": 32}
    # A circulant block of size b has b numbers: in x out / b.
    blocks = sum(m.weight.numel() // 32**2 for n, m in base.named_modules() if n.endswith(("q_proj", "v_proj")))
    assert trainable_parameters(attach_adapter(base, how)) == blocks * how.config.block_size


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
