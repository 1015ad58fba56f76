"""A mistake in what is asked of the adapter is one line that says what is wrong and where, before weights load."""

from pathlib import Path

import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import perl
from perl.cli.commands import run
from perl.errors import ModelError
from perl.methods.registry import REFUSED_TYPES
from perl.sandbox import BASE_FOLDER

LINEAR_LAYERS = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"


def test_unknown_method(mistake):
    line = mistake(recipe="peft:\n  method: rslroa\n")
    assert line == "recipe.yaml:3: peft.method: no method 'rslroa' (did you mean rslora?)"


def test_unknown_argument_of_the_adapter(mistake):
    line = mistake(recipe="peft: {kwargs: {use_rslor: true}}\n")
    assert "peft.kwargs.use_rslor" in line
    assert "did you mean use_rslora?" in line


@pytest.mark.parametrize(
    "further",
    [
        "init_lora_weights: nonsense",
        "init_lora_weights: pissa",  # a method of its own
        "init_lora_weights: pissa_niter_4",
        "init_lora_weights: loftq",  # it would write to the base
        "bias: nonsense",
        "bias: all",  # biases of the base itself
        "layers_to_transform: [0]",  # PEFT wants target_modules as a list with it
    ],
)
def test_arguments_of_the_adapter_that_peft_refuses(mistake, further):
    assert mistake(recipe=f"peft: {{kwargs: {{{further}}}}}\n").startswith("recipe.yaml:2: peft")


@pytest.mark.parametrize(
    ("method", "setting"),
    [("ia3", "rank: 4"), ("ia3", "alpha: 4"), ("vera", "alpha: 4"), ("hra", "dropout: 0.1"), ("full", "rank: 4")],
)
def test_a_setting_that_the_method_does_not_have(mistake, method, setting):
    name = setting.partition(":")[0]
    line = mistake(recipe=f"peft:\n  method: {method}\n  {setting}\n")
    assert line == f"recipe.yaml:4: peft.{name}: {method} has no {name} (leave it out)"


@pytest.mark.parametrize("kind", REFUSED_TYPES)
def test_a_type_of_peft_that_cannot_be_trained(mistake, kind):
    line = mistake(recipe=f"peft:\n  type: {kind}\n")
    assert line == f"recipe.yaml:3: peft.type: {kind} cannot be trained: {REFUSED_TYPES[kind]}"


def test_a_type_of_peft_that_can_be_trained_is_no_mistake(capsys):
    Path("c3a.yaml").write_text("extends: sound.yaml\npeft: {type: C3A, block_size: 32}\n", encoding="utf-8")
    assert run(["train", "c3a.yaml", "--dry-run"], "perl") == 0
    printed = capsys.readouterr().out
    assert "block_size 32" in printed
    # Numbers of a layer: inputs x outputs / 32.
    linear = 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384)
    assert f"{linear // 32:,} parameters" in printed


@pytest.mark.parametrize(
    ("further", "words"),
    [
        ("blok_size: 32", "did you mean block_size?"),
        ("block_size: 31", "PEFT refuses"),
        ("block_size: 32, rank: 4", "peft.rank: is not an argument of PEFT"),
        ("block_size: 32, method: dora", "peft.method: is not read beside peft.type"),
    ],
)
def test_arguments_of_a_type_that_it_does_not_take(mistake, further, words):
    line = mistake(recipe=f"peft: {{type: C3A, {further}}}\n")
    assert line.startswith("recipe.yaml:2: peft.")
    assert words in line


def test_a_type_that_peft_does_not_have(mistake):
    assert mistake(recipe="peft:\n  type: C3B\n") == (
        "recipe.yaml:3: peft.type: PEFT has no type 'C3B' (did you mean C3A?)"
    )


@pytest.mark.parametrize("reference", ["rolling:0", "rolling", "start"])
def test_a_reference_that_does_not_exist(mistake, reference):
    line = mistake(recipe=f"train:\n  reference: {reference}\n")
    assert line == (
        f"recipe.yaml:3: train.reference: must be base, initial, or rolling:N with N >= 1, not '{reference}'"
    )


@pytest.mark.parametrize("name", ["absent/folder/adapter", "./adapter"])
def test_an_adapter_to_continue_that_does_not_exist(mistake, name):
    line = mistake(recipe=f"peft:\n  adapter: {name}\n")
    assert line.startswith(f"recipe.yaml:3: peft.adapter: {name}: no such folder")


def test_an_adapter_to_continue_without_a_name(mistake):
    line = mistake(recipe="peft:\n  adapter: ''\n")
    assert line == "recipe.yaml:3: peft.adapter: must have at least 1 character, not ''"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("nonsense", "Expecting value"),
        ("[1]", "not a mapping"),
        ("{}", "adapter_config.json names no peft_type"),
        ('{"peft_type": "LORRA"}', "PEFT has no type 'LORRA'"),
        ('{"peft_type": "LORA"}', "header"),  # its weights are no safetensors
    ],
)
def test_an_adapter_whose_files_cannot_be_read(mistake, config, words):
    Path("broken").mkdir()
    Path("broken/adapter_config.json").write_text(config, encoding="utf-8")
    Path("broken/adapter_model.safetensors").write_bytes(b"nonsense")
    line = mistake(recipe="peft:\n  adapter: broken\n")
    assert line.startswith("recipe.yaml:3: peft.adapter: broken cannot be read: ")
    assert words in line


def test_a_folder_that_holds_no_adapter(mistake):
    line = mistake(recipe="peft:\n  adapter: weightless\n")
    assert line == "recipe.yaml:3: peft.adapter: weightless holds no adapter: adapter_config.json is absent"


def test_a_setting_beside_an_adapter_that_is_continued(mistake):
    line = mistake(recipe="peft:\n  adapter: anywhere\n  rank: 4\n")
    what, hint = "comes from the adapter that is continued", "leave it out, or rank: null if it is inherited"
    assert line == f"recipe.yaml:4: peft.rank: {what} ({hint})"


def test_an_adapter_of_another_base(mistake):
    other = Qwen3ForCausalLM(Qwen3Config.from_pretrained(BASE_FOLDER, hidden_size=64))
    get_peft_model(other, LoraConfig(r=4, task_type="CAUSAL_LM")).save_pretrained("narrow")
    line = mistake(recipe="peft:\n  adapter: narrow\n")
    assert line.startswith("recipe.yaml:3: peft.adapter: narrow does not fit this base, it was made for another one: ")
    assert "4 x 64 there, 4 x 128 here" in line


def test_target_modules_that_match_nothing(mistake):
    line = mistake(recipe="peft: {target_modules: [query_key_value]}\n")
    assert line.startswith("recipe.yaml:2: peft.target_modules: query_key_value match no module of Qwen3ForCausalLM")
    assert LINEAR_LAYERS in line


def test_target_modules_of_which_one_matches(mistake):
    line = mistake(recipe="peft: {target_modules: [q_proj, key_proj]}\n")
    assert line.startswith("recipe.yaml:2: peft.target_modules: key_proj match no module of Qwen3ForCausalLM")
    assert LINEAR_LAYERS in line


def test_a_target_pattern_that_matches_nothing(mistake):
    line = mistake(recipe="peft: {target_modules: '.*attn_proj'}\n")
    assert line.startswith("recipe.yaml:2: peft.target_modules: .*attn_proj match no module of Qwen3ForCausalLM")
    assert LINEAR_LAYERS in line


@pytest.mark.parametrize("targets", ["[input_layernorm]", "[self_attn]", "'.*attn.*'"])
def test_target_modules_that_cannot_carry_an_adapter(mistake, targets):
    line = mistake(recipe=f"peft: {{target_modules: {targets}}}\n")
    assert line.startswith("recipe.yaml:2: peft.target_modules: ")
    assert LINEAR_LAYERS in line


@pytest.mark.parametrize("targets", ["[q_proj, v_proj]", "'.*self_attn.*_proj'", "all-linear"])
def test_target_modules_that_match_are_no_mistake(targets):
    assert run(["train", "sound.yaml", "--dry-run", f"peft.target_modules={targets}"], "perl") == 0


def test_an_adapter_that_would_not_be_trained():
    base = AutoModelForCausalLM.from_pretrained(BASE_FOLDER)
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM")).save_pretrained("adapter")
    frozen = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE_FOLDER), "adapter", is_trainable=False)
    with pytest.raises(ModelError) as caught:
        perl.PeftGRPOTrainer(
            model=frozen,
            reward_funcs=perl.rewards.format_reward,
            args=perl.PeftRLConfig("out", use_cpu=True, report_to=[]),
            train_dataset=[{"prompt": "1+1="}],
        )
    assert "no trainable parameters" in str(caught.value)
    assert "is_trainable=True" in str(caught.value)
