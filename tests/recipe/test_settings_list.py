"""Every setting is listed with its true default; training arguments are read without importing them."""

import dataclasses
import json
import subprocess
import sys

import pytest
import yaml

from perl.algorithms.train_fields import train_fields
from perl.cli.commands import run
from perl.errors import EXIT_DONE, EXIT_USER_MISTAKE, RecipeError
from perl.recipe.places import REFUSED
from perl.recipe.sections import SECTIONS
from perl.recipe.settings_list import COMPUTED, chosen_settings, settings, shown_value
from perl.trainer.arguments.config import PeftRLConfig


def test_every_training_arguments_default_is_that_of_the_class():
    fields = {one.name: one for one in dataclasses.fields(PeftRLConfig)}
    listed = {one.name.removeprefix("train."): one for one in settings() if one.name.startswith("train.")}
    assert len(listed) > 150
    computed = {name for name, one in listed.items() if one.default == COMPUTED}
    assert computed <= {"optim", "include_for_metrics"}
    for name in listed.keys() - computed:
        default = fields[name].default
        said = yaml.safe_load(listed[name].default) if listed[name].default[0] not in "[{" else None
        plain = getattr(default, "value", default)
        assert said == plain or shown_value(plain) == listed[name].default, name


def test_every_default_of_a_section_is_the_models():
    listed = {one.name: one.default for one in settings()}
    for section, model in SECTIONS.items():
        for key, value in model().model_dump().items():
            if not isinstance(value, dict | list):
                assert yaml.safe_load(listed[f"{section}.{key}"]) == value


@pytest.mark.parametrize("columns", [60, 200])
def test_a_line_fits_the_screen(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(["recipes", "--settings"], "perl") == EXIT_DONE
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(settings())
    assert max(map(len, lines)) <= columns
    assert all(
        line.startswith(f"{one.name}: {one.default}"[:columns]) for line, one in zip(lines, settings(), strict=True)
    )


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("train.beta", ["train.beta"]),
        ("beta", ["train.beta"]),
        ("lr", ["train.learning_rate"]),
        ("train.betta", ["train.beta"]),
        ("temperature", ["rollout.temperature", "eval.temperature"]),
        ("alarms", ["alarms.stop"]),
        ("weight", ["teacher.weight", "rewards.NAME.weight"]),
        ("name", ["model.name", "engine.name", "data.train.name", "eval.tasks.N.name"]),
        ("prompt", ["data.train.columns.prompt"]),
    ],
)
def test_a_key_is_found_by_its_name_another_tools_or_one_very_like_it(key, found):
    assert [one.name for one in chosen_settings(key)] == found


def test_one_key_is_said_whole_with_the_values_that_it_takes(capsys):
    assert run(["recipes", "--settings", "train.scale_rewards"], "perl") == EXIT_DONE
    said = capsys.readouterr().out
    assert said.startswith("train.scale_rewards: group\n  values: one of group, batch, none or true or false\n")
    assert " ".join(said.split()).endswith("question-level difficulty bias.")
    [beta] = chosen_settings("train.beta")
    assert beta.values == "number >= 0"
    assert chosen_settings("eval.top_p")[0].values == "number > 0 <= 1"
    assert chosen_settings("model.quantization")[0].values.endswith("or null")
    assert run(["recipes", "--settings", "zebra"], "perl") == EXIT_USER_MISTAKE
    with pytest.raises(RecipeError, match="no setting 'zebra'"):
        chosen_settings("zebra")


HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "accelerate")


def modules_after(program):
    program += "\nimport json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def config_fields():
    from perl.trainer.arguments.config import PeftRLConfig

    return {field.name: field for field in dataclasses.fields(PeftRLConfig) if field.init}


def test_names_sentences_and_constant_defaults_are_those_of_the_class(config_fields):
    fields = train_fields()
    assert list(fields) == [name for name in config_fields if not name.startswith("_")]
    sentences = {name: field.help for name, field in fields.items() if field.help}
    assert sentences == {name: config_fields[name].metadata["help"] for name in sentences}
    assert len(sentences) > 100
    defaults = {name: field.default for name, field in fields.items() if field.default is not None}
    assert defaults == {name: config_fields[name].default for name in defaults}
    assert {"seed", "loss_type", "importance_sampling_level", "beta", "logging_steps"} <= set(defaults)
    assert not set(REFUSED) - set(fields)
    assert not {"_VALID_DICT_FIELDS", "framework", "self", ""} & set(fields)


@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        ("from perl.recipe import load_recipe; load_recipe('quickstart', ['train.beta=0.02'])", False),
        ("import perl.policy.reference", True),  # so that the look would see one
    ],
)
def test_a_recipe_is_checked_without_importing_what_trains_it(program, heavy):
    imported = modules_after(program)
    assert "perl" in imported
    assert bool(imported & set(HEAVY)) is heavy
