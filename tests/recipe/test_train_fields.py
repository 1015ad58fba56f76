"""The training arguments that a recipe may name are read from sources, exactly and without importing them."""

import dataclasses
import json
import subprocess
import sys

import pytest

from perl.recipe.train_fields import REFUSED, train_fields, train_model

HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "accelerate")


def modules_after(program):
    program += "\nimport json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def config_fields():
    from perl.trainer.config import PeftRLConfig

    return {field.name: field for field in dataclasses.fields(PeftRLConfig) if field.init}


def test_the_names_are_exactly_those_that_the_class_takes(config_fields):
    assert list(train_fields()) == list(config_fields)


def test_every_sentence_is_that_of_the_class(config_fields):
    read = {name: field.help for name, field in train_fields().items() if field.help}
    assert read == {name: config_fields[name].metadata["help"] for name in read}
    assert len(read) > 100


def test_every_constant_default_is_that_of_the_class(config_fields):
    read = {name: field.default for name, field in train_fields().items() if field.default is not None}
    assert read == {name: config_fields[name].default for name in read}
    assert {"seed", "loss_type", "importance_sampling_level", "beta", "logging_steps"} <= set(read)


def test_every_refused_field_exists():
    assert not set(REFUSED) - set(train_fields())


@pytest.mark.parametrize("name", ["_VALID_DICT_FIELDS", "framework", "self", ""])
def test_what_is_no_field_is_not_read_as_one(name):
    assert name not in train_fields()


def test_only_the_fields_that_are_given_are_checked():
    model = train_model(("seed",))
    assert model.model_validate({"seed": 3}).model_dump(exclude_unset=True) == {"seed": 3}
    with pytest.raises(ValueError, match="seed"):
        model.model_validate({"seed": "three"})
    with pytest.raises(ValueError, match="sead"):
        model.model_validate({"sead": 3})


@pytest.mark.parametrize(
    "program",
    [
        "import perl",
        "import perl.recipe",
        "from perl.recipe import load_recipe; load_recipe('quickstart', ['train.beta=0.02'])",
        "from perl.methods.registry import METHODS; assert METHODS",
        "import perl.cli.commands",
    ],
)
def test_a_recipe_is_checked_without_importing_what_trains_it(program):
    imported = modules_after(program)
    assert "perl" in imported
    assert not imported & set(HEAVY)


def test_the_same_look_sees_a_heavy_import():
    assert "torch" in modules_after("import perl.policy.logprobs")
