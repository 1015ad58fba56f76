"""Without the Hub a plan takes the sizes that ship, and gives what it gives with the base's config; nothing trains."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GptOssConfig, Qwen2Config, Qwen3_5Config

import perl
from perl.errors import ModelError, PerlError
from perl.policy.bases import BASES, shipped_config
from perl.recipe.assets import packaged_recipes
from perl.sandbox import BASE_FOLDER, is_sandbox
from perl.training.counted import counted_decoder
from perl.training.decoder import decoder_of
from perl.training.forecast import answer
from perl.training.prepare import prepare, read_recipe
from perl.training.without_hub import CHARACTERS_OF_A_TOKEN

HYBRID = {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 3584, "vocab_size": 248320}
HYBRID |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256}
HYBRID |= {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
DENSE = {"num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "vocab_size": 151936}
DENSE |= {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
CONFIGS = {
    "Qwen/Qwen2.5-0.5B-Instruct": lambda: Qwen2Config(**DENSE),
    "Qwen/Qwen3.5-0.8B": lambda: Qwen3_5Config(
        text_config=HYBRID, tie_word_embeddings=True, architectures=["Qwen3_5ForConditionalGeneration"]
    ),
    "unsloth/gpt-oss-20b-BF16": lambda: GptOssConfig(num_hidden_layers=24, num_local_experts=32),
}


def plan_on(model, characters):
    """Of prompts of 20 to 59 tokens, of so many characters each."""
    rows = [{"prompt": str(i) + "7" * (characters * (20 + i) - len(str(i))), "answer": str(i)} for i in range(40)]
    Path("data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    values = {
        "model": {"name": model, "dtype": "bfloat16"},
        "peft": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        "data": {"train": "data.jsonl", "chat": False},
        "train": {"prompts_per_step": 4, "num_generations": 4, "max_steps": 3},
        "rollout": {"max_completion_length": 64},
        "eval": {"enabled": False},
    }
    return perl.plan(values, gpu="H100").values


@pytest.mark.parametrize("name", CONFIGS)
def test_a_plan_without_the_hub_is_that_with_the_config_in_a_folder(name):
    CONFIGS[name]().save_pretrained("base")
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained("base")  # a token a digit
    with_config, without = plan_on("./base", 1), plan_on(name, CHARACTERS_OF_A_TOKEN)
    assert with_config["assumed"] == []
    sizes, tokens = without["assumed"]
    assert name in sizes
    assert str(CHARACTERS_OF_A_TOKEN) in tokens
    assert without["model"] == name
    assert without["tokens"]["prompt"] == 40
    said = ("model", "assumed")
    assert {key: with_config[key] for key in with_config if key not in said} == {
        key: without[key] for key in without if key not in said
    }


def test_the_base_of_every_recipe_ships_and_has_the_parameters_that_its_name_says():
    named = {read_recipe(name, on_verl=True).model.name for name in packaged_recipes()}
    assert {name for name in named if not is_sandbox(name)} == set(BASES)
    for name in BASES:
        number, unit = re.search(r"(\d[\d.]*)([BM])\b", name, re.IGNORECASE).groups()
        config = shipped_config(name)
        parameters = (decoder_of(config) or counted_decoder(config)).parameters
        assert parameters == pytest.approx(float(number) * {"B": 1e9, "M": 1e6}[unit.upper()], rel=0.19), name


def test_only_a_plan_assumes_and_only_of_what_is_out_of_reach():
    recipe = read_recipe("qwen3.5-0.8b")
    sizes, data = answer(recipe, gpu="RTX 4090").plan.assumed
    assert recipe.model.name in sizes
    assert "its data is not here" in data
    for refused in (prepare, lambda one: answer(one, measured=True)):
        with pytest.raises(ModelError, match=rf"model\.name: .*HF_HUB_OFFLINE .* the sizes of {len(BASES)} bases"):
            refused(recipe)
    for changes, place in ({"model.name=nobody/none": "model.name", "data.train=none.jsonl": "data.train"}).items():
        with pytest.raises(PerlError, match=place):
            answer(read_recipe("qwen3.5-0.8b", [changes]), gpu="RTX 4090")


def test_a_hub_that_does_not_answer_is_as_one_that_is_not_asked(monkeypatch):
    monkeypatch.setattr("perl.policy.hub_files.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert len(answer(read_recipe("t4-0.5b"), gpu="T4").plan.assumed) == 2
