"""The training arguments that a recipe may name are read from sources, exactly and without importing them."""

import dataclasses
import json
import subprocess
import sys

import pytest

from perl.algorithms.train_fields import train_fields
from perl.recipe.places import REFUSED

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
