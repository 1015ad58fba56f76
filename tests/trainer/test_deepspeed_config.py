"""Which of DeepSpeed's stages a strategy or a configuration means, and what is refused before a model loads."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers.optimization import Adafactor

from perl import PeftRLConfig
from perl.errors import MissingExtraError, RecipeError
from perl.recipe import Recipe
from perl.trainer.arguments.deepspeed_config import chosen_deepspeed
from perl.trainer.step.partitioned_optimizer import check_divisible
from perl.training.prepare import training_arguments

STAGE = "zero_optimization"


@pytest.fixture(autouse=True)
def deepspeed_is_found(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "deepspeed" or found(name, *rest))


def test_a_strategy_needs_no_configuration_and_a_configuration_no_strategy(tmp_path):
    assert chosen_deepspeed("ddp", None, processes=2) == ("ddp", None)
    assert chosen_deepspeed("fsdp2", None, processes=2) == ("fsdp2", None)
    strategy, config = chosen_deepspeed("zero2", None, processes=2)
    assert (strategy, config[STAGE]) == ("zero2", {"stage": 2})
    assert chosen_deepspeed("zero2", None, processes=1) == ("zero2", None)  # nothing to divide
    own = {STAGE: {"stage": 1}}
    (tmp_path / "ds.json").write_text(json.dumps(own))
    for given in (own, json.dumps(own), str(tmp_path / "ds.json")):
        assert chosen_deepspeed("ddp", given, processes=2) == ("zero2", given)


@pytest.mark.parametrize(
    ("strategy", "given", "said"),
    [
        ("ddp", {STAGE: {"stage": 3}}, "strategy: fsdp2"),
        ("zero2", {STAGE: {"stage": 0}}, "stage 0 of ZeRO shares nothing"),
        ("fsdp2", {STAGE: {"stage": 2}}, "is not fsdp2"),
        ("zero2", {STAGE: {"stage": 2}, "optimizer": {"type": "Adam"}}, "section optimizer"),
        ("zero2", {STAGE: {"stage": 2}, "scheduler": {"type": "WarmupLR"}}, "lr_scheduler_type"),
        ("zero2", "absent.json", "absent.json cannot be read"),
        ("zero2", "{not json", "cannot be read"),
    ],
)
def test_what_cannot_be_meant_is_one_line(strategy, given, said):
    with pytest.raises(RecipeError, match=said) as caught:
        chosen_deepspeed(strategy, given, processes=2)
    assert caught.value.mistakes[0].where == "deepspeed"


def test_a_package_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(MissingExtraError, match="deepspeed") as caught:
        chosen_deepspeed("zero2", None, processes=2)
    assert "perl-rl[deepspeed]" in str(caught.value)


def test_arguments_that_contradict_it_are_refused_when_they_are_made(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("perl.trainer.arguments.config.exchange_by_gloo", lambda: None)
    with pytest.raises(RecipeError, match="losses are not scaled") as caught:
        PeftRLConfig(str(tmp_path), strategy="zero2", fp16=True)
    assert caught.value.mistakes[0].where == "fp16"


def test_a_recipe_is_told_the_key_and_one_process_needs_no_deepspeed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "model: {name: 'sandbox:base'}\ndata: {train: 'sandbox:addition'}\nengine: {strategy: zero2}\n"
    Path("r.yaml").write_text(text)
    args = training_arguments(Recipe.load("r.yaml"), str(tmp_path / "run"))
    assert (args.strategy, args.deepspeed) == ("zero2", None)


def test_optimizers_that_treat_each_number_by_itself_are_divided_and_others_are_not():
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop):
        check_divisible(kind)
    for kind in (Adafactor, torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Adagrad):
        with pytest.raises(RecipeError, match=rf"{kind.__name__} looks at whole tensors"):
            check_divisible(kind)
