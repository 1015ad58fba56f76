"""A setting without its section, as an option, or with a name of a GPU, is answered with how it is written."""

import sys
from pathlib import Path

import pytest

from perl.cli.commands import run
from perl.errors import EXIT_USER_MISTAKE, RecipeError
from perl.recipe import load_recipe
from perl.recipe.places import place_hint
from perl.rewards.resolve import reward_mistakes


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("--learning-rate", "did you mean train.learning_rate?"),
        ("max_completion_length", "did you mean rollout.max_completion_length or eval.max_completion_length?"),
        ("adapter", "did you mean peft.adapter or teacher.adapter?"),
        ("peft_rank", "did you mean peft.rank?"),
        ("max_new_tokens", "did you mean rollout.max_completion_length?"),
        ("--gpus", "did you mean engine.processes?"),
        ("trian", ""),
        ("zebra", ""),
    ],
)
def test_a_setting_is_found_by_its_name_or_one_very_like_it(name, hint):
    assert place_hint(name) == hint


def test_in_a_file_and_on_the_command_line_the_section_is_named(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: quickstart\nlearning_rate: 1e-5\ntrian: {seed: 1}\n")
    with pytest.raises(RecipeError) as found:
        load_recipe(path)
    first, second = str(found.value).splitlines()
    assert first.endswith(":2: learning_rate: unknown section (did you mean train.learning_rate?)")
    assert second.endswith("trian: unknown section (did you mean train?)")
    with pytest.raises(RecipeError, match=r"'lr=1e-4' is not an override \(did you mean train.learning_rate\?\)"):
        load_recipe("quickstart", ["lr=1e-4"])


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            "train.learnin_rate: 1e-5",
            "unknown section (dots are for the command line; in a file: train: {learning_rate: ...})",
        ),
        ("rewards.accuracy.weight: 1", "in a file: rewards: {accuracy: {weight: ...}})"),
        ("data: {train.name: x}", "(dots are for the command line; in a file: data: {train: {name: ...}})"),
        ("lora: {rank: 4}", "lora: unknown section (did you mean peft?)"),
        ("model: sandbox:base", "must be a mapping, not 'sandbox:base' (model: {name: sandbox:base})"),
        ("peft: dora", "must be a mapping, not 'dora' (peft: {method: dora})"),
        ("data: my.jsonl", "must be a mapping, not 'my.jsonl' (data: {train: my.jsonl})"),
        ("gpus: 8", "gpus: unknown section (did you mean engine.processes?)"),
        ("train: {rank: 4}", "train.rank: unknown key (did you mean peft.rank?)"),
        ("train: {learnin_rate: 1}", "train.learnin_rate: unknown key (did you mean learning_rate?)"),
        ("model: {load_in_4bit: true}", "model.load_in_4bit: unknown key (did you mean model.quantization?)"),
    ],
)
def test_a_slip_is_answered_with_the_right_key(tmp_path, written, said):
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: quickstart\n{written}\n")
    with pytest.raises(RecipeError) as found:
        load_recipe(path)
    [line] = str(found.value).splitlines()
    assert said in line


@pytest.mark.parametrize("command", [["train", "quickstart"], ["eval"]])
def test_options_of_other_tools_for_gpus_are_answered_with_ours(capsys, command):
    assert run([*command, "--gpus", "8"], "perl") == EXIT_USER_MISTAKE
    assert "--processes N" in capsys.readouterr().err
    assert run([*command, "--cuda"], "perl") == EXIT_USER_MISTAKE
    assert "CUDA_VISIBLE_DEVICES" in capsys.readouterr().err
    assert run([*command, "--device", "cuda"], "perl") == EXIT_USER_MISTAKE
    assert "CUDA_VISIBLE_DEVICES" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "option"), [("train", "--lr"), ("plan", "--learning_rate=1e-4")])
def test_as_an_option_too(capsys, command, option):
    assert run([command, "quickstart", option, "1e-4"], "perl") == EXIT_USER_MISTAKE
    assert "settings stand after the recipe, train.learning_rate=VALUE" in capsys.readouterr().err
    assert run([command, "quickstart", "--zebra"], "perl") == EXIT_USER_MISTAKE
    assert "stand after" not in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cuda:1", "gpu"])
def test_a_gpu_by_name_is_answered_with_how_one_is_chosen(device):
    with pytest.raises(RecipeError) as found:
        load_recipe("quickstart", [f"engine.device={device}"])
    said = str(found.value)
    assert said.startswith(f"command line: engine.device: must be one of auto, cpu, not '{device}'")
    assert "CUDA_VISIBLE_DEVICES" in said


def test_a_module_beside_the_recipe_is_found_from_another_folder_and_hides_none(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder, elsewhere = tmp_path / "recipes", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    for name in ("beside_the_recipe", "json"):
        (folder / f"{name}.py").write_text("def reward(completions, **_):\n    return [0.0] * len(completions)\n")
    (folder / "mine.yaml").write_text("extends: quickstart\nrewards: {beside_the_recipe:reward: 1.0}\n")
    monkeypatch.chdir(elsewhere)
    for path in (folder / "mine.yaml", Path("..") / "recipes" / "mine.yaml"):
        load_recipe(path, checks=[reward_mistakes])
    assert sys.path.count(str(folder)) == 1
    assert sys.path[-1] == str(folder)
    with pytest.raises(RecipeError, match="json has no function 'reward'"):
        load_recipe(folder / "mine.yaml", ["rewards.json:reward=1"], checks=[reward_mistakes])
    sys.modules.pop("beside_the_recipe")


@pytest.mark.parametrize(("name", "meant"), [("gpus", "gpus_each"), ("gpu_each", "gpus_each")])
def test_a_slip_in_the_settings_of_started_servers_names_the_one_that_was_meant(name, meant):
    rollout = {"backend": "vllm-server", "servers": {"count": 2, name: 1}}
    with pytest.raises(RecipeError, match=rf"rollout.servers.{name}: unknown key \(did you mean {meant}\?\)"):
        load_recipe({"extends": "quickstart", "engine": {"name": "ray"}, "rollout": rollout})
