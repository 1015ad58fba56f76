"""The name of an algorithm among a script's arguments: what it sets, what overrides it, what copies keep."""

import copy
import dataclasses
import pickle

import pytest
from transformers import HfArgumentParser
from trl import TrlParser

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.algorithms.named import ALGORITHMS
from perl.errors import PerlError, RecipeError
from perl.recipe import load_recipe
from perl.training.prepare import training_arguments

DAPO, GSPO = ALGORITHMS["dapo"].sets, ALGORITHMS["gspo"].sets


def made(**given):
    return PeftRLConfig("out", use_cpu=True, **given)


def set_by(config, sets):
    return {name: getattr(config, name) for name in sets}


def replaced(config, **changes):
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_name_sets_its_fields_in_a_script_as_in_a_recipe(name):
    config, sets = made(algorithm=name), ALGORITHMS[name].sets
    assert set_by(config, sets) == sets
    recipe = load_recipe({"algorithm": name, "engine": {"device": "cpu"}})
    arguments = training_arguments(recipe, "out")
    assert arguments.algorithm == name
    assert set_by(arguments, sets) == sets
    untouched = [field.name for field in dataclasses.fields(config) if field.name not in {"algorithm", *sets}]
    assert set_by(config, untouched) == {**set_by(made(), untouched), "_algorithm_applied": name}


def test_what_is_given_overrides_the_name_also_where_it_is_the_default():
    config = made(algorithm="grpo", loss_type="dapo", beta=0.0)
    assert (config.loss_type, config.beta) == ("dapo", 0.0)
    assert (made(algorithm="grpo").loss_type, made().loss_type) == ("grpo", "dapo")
    assert set_by(made(algorithm="grpo"), ["beta", "use_bias_correction_kl"]) == {
        "beta": 0.04,
        "use_bias_correction_kl": False,
    }
    recipe = load_recipe({"algorithm": "grpo", "train": {"loss_type": "dapo"}, "engine": {"device": "cpu"}})
    assert training_arguments(recipe, "out").loss_type == "dapo"


def test_a_subclass_has_its_own_defaults_and_its_own_constructor():
    @dataclasses.dataclass
    class Further(PeftRLConfig):
        loss_type: str = "dr_grpo"
        further: int = 1

    assert Further("out", use_cpu=True).loss_type == "dr_grpo"
    assert Further("out", use_cpu=True, algorithm="gspo", further=2).loss_type == "grpo"
    assert Further("out", use_cpu=True, algorithm="grpo", loss_type="dr_grpo").loss_type == "dr_grpo"

    class Wrapped(PeftRLConfig):
        def __init__(self, where):
            super().__init__(where, use_cpu=True, algorithm="gspo", beta=0.3)

    assert set_by(Wrapped("out"), GSPO) == {**GSPO, "beta": 0.3}


def test_a_parser_fills_in_every_default_and_what_differs_from_it_overrides():
    line = ["--output_dir", "out", "--use_cpu", "true", "--algorithm", "gspo", "--epsilon", "0.1"]
    for parser in (HfArgumentParser, TrlParser):
        (config,) = parser(PeftRLConfig).parse_args_into_dataclasses(line)
        assert set_by(config, GSPO) == {**GSPO, "epsilon": 0.1}
        (config,) = parser(PeftRLConfig).parse_args_into_dataclasses(line[:4])
        assert config == made()
    with pytest.raises(RecipeError, match=r"^algorithm: no algorithm 'gsop' \(did you mean gspo\?\)$"):
        HfArgumentParser(PeftRLConfig).parse_args_into_dataclasses(["--output_dir", "out", "--algorithm", "gsop"])


def test_replacing_a_field_keeps_the_others_and_another_name_replaces_what_the_first_one_set():
    config = made(algorithm="grpo", loss_type="dapo", seed=5)
    assert set_by(replaced(config, seed=6), ["seed", "loss_type", "beta"]) == {
        "seed": 6,
        "loss_type": "dapo",
        "beta": 0.04,
    }
    assert replaced(config, beta=0.0).beta == 0.0
    assert set_by(replaced(config, algorithm="gspo"), GSPO) == {**GSPO, "loss_type": "dapo"}
    assert set_by(replaced(made(algorithm="icepop"), algorithm="gspo"), GSPO) == GSPO
    assert replaced(made(algorithm="icepop"), algorithm="gspo").vllm_importance_sampling_mode == "token_truncate"
    assert set_by(replaced(made(seed=5), algorithm="dapo"), DAPO) == DAPO
    unnamed = replaced(config, algorithm=None)
    assert (unnamed.algorithm, unnamed.beta) == (None, 0.04)  # as the fields stand
    assert set_by(replaced(unnamed, algorithm="gspo"), ["beta", "epsilon"]) == {"beta": 0.04, "epsilon": 3e-4}


def test_copies_are_what_they_are_copies_of():
    for config in (made(), made(algorithm="grpo", loss_type="dapo"), made(algorithm="gspo", beta=0.2)):
        config.epsilon = 0.123
        for copied in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):  # noqa: S301 (ours)
            assert copied == config
            assert vars(copied).keys() == vars(config).keys()
            assert copied.to_dict() == config.to_dict()


def test_overrides_that_leave_nothing_and_names_that_come_too_late_are_refused_before_a_model_is_loaded(tmp_path):
    with pytest.raises(RecipeError, match=r"^importance_sampling_level: 'token' leaves nothing of gspo"):
        made(algorithm="gspo", importance_sampling_level="token")
    with pytest.raises(RecipeError, match=r"^epsilon_high: 0.28 is below 1"):
        made(algorithm="cispo", epsilon_high=0.28)
    with pytest.raises(RecipeError, match=r"^algorithm: must be a name, not 5"):
        made(algorithm=5)
    args = PeftRLConfig(str(tmp_path), use_cpu=True)
    args.algorithm = "gspo"
    with pytest.raises(PerlError, match=r"^algorithm: 'gspo' was set after the arguments were made") as caught:
        PeftGRPOTrainer(model="no/such-model", reward_funcs=lambda **_: [0.0], args=args)
    assert "PeftRLConfig(algorithm='gspo'" in str(caught.value)
