"""PeftRLConfig is TRL's GRPOConfig with an adapter, a batch in a person's terms, and the defaults it documents."""

import dataclasses
import itertools
import re
import types
import typing
import warnings

import numpy
import pytest
from transformers import HfArgumentParser
from trl import GRPOConfig

from perl import PeftGRPOTrainer
from perl.algorithms.registry import loss_mistakes
from perl.errors import PerlError, RecipeError
from perl.methods.registry import METHODS
from perl.recipe import load_recipe
from perl.recipe.sections import PeftSection
from perl.trainer.arguments.config import PeftRLConfig, rollout_section
from perl.training.prepare import training_arguments

ON_A_CPU = {"use_cpu": True, "bf16": False, "activation_checkpointing": False, "dataloader_pin_memory": False}
SAMPLING = {"vllm_importance_sampling_mode": "sequence_mask"}
LIKE_TRL = {"learning_rate": 1e-6, "logging_steps": 10, "save_steps": 500, **SAMPLING}
# Arguments that are one of a few words. TRL looks at these when it trains, or never.
LATE_WORDS = {
    "loss_type": ("dapoo", "dapo"),
    "importance_sampling_level": ("tokn", "token"),
    "scale_rewards": ("gruop", "group"),
    "multi_objective_aggregation": ("sum_and_normalize", "sum_then_normalize"),
    "vllm_importance_sampling_mode": ("token_trunkate", "token_truncate"),
}
LATE_WORDS_OF_OURS = {
    "advantage_estimator": ("rlo", "rloo"),
    "kl_estimator": ("k33", "k3"),
    "dppo_divergence": ("tvv", "tv"),
}
WORDS = {
    "lr_scheduler_type": ("liner", "linear"),
    "optim": ("adamw_trch", "adamw_torch"),
    "save_strategy": ("stps", "steps"),
    "eval_strategy": ("epok", "epoch"),
    "logging_strategy": ("stepz", "steps"),
    "hub_strategy": ("every_sve", "every_save"),
}
PARENT_FIELDS = [field for field in dataclasses.fields(GRPOConfig) if field.init]


def made(config_class, **arguments):
    """The fields of a config, or the class of the error that the arguments raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the parent has to say of its own arguments
        try:
            config = config_class(**{"output_dir": "out", **arguments})
        except Exception as error:  # noqa: BLE001 (whatever the parent raises, we must raise)
            return type(error)
    return {field.name: getattr(config, field.name) for field in PARENT_FIELDS}


def values_of(hint, default):
    """Values of the annotated types that differ from the default."""
    samples = {
        bool: [True, False],
        int: [3, 16],
        float: [0.5, 2.0],
        str: ["text", "no"],
        dict: [{"a": 1}],
        list: [["a"]],
    }
    alternatives = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    found = []
    for alternative in alternatives:
        kind = typing.get_origin(alternative) or alternative
        found += typing.get_args(alternative) if kind is typing.Literal else samples.get(kind, [])
    return [value for value in found if value != default]


def test_every_argument_of_the_parent_does_what_it_does_there():
    hints, tried, accepted = typing.get_type_hints(GRPOConfig), set(), 0
    for field in PARENT_FIELDS:
        for value in values_of(hints[field.name], field.default):
            tried.add(field.name)
            arguments = {**ON_A_CPU, **LIKE_TRL, field.name: value}
            expected, found = made(GRPOConfig, **arguments), made(PeftRLConfig, **arguments)
            if found is RecipeError and field.name == "report_to":  # transformers refuses it with the model loaded
                assert expected["report_to"] == (value if isinstance(value, list) else [value])
            elif found is RecipeError:  # a kind of the parent's error, with the nearest word
                assert expected is ValueError or field.name == "deepspeed"  # which is refused whatever is installed
                assert field.name in {*WORDS, "deepspeed"}
            else:
                assert found == expected, (field.name, value)
                accepted += isinstance(expected, dict)
    assert len(PARENT_FIELDS) > 150
    assert len(tried) > 0.95 * len(PARENT_FIELDS)
    assert accepted > 200


def test_the_documented_defaults_are_the_ones_that_differ():
    said = PeftRLConfig.__doc__.replace("is the method's usual one, 1e-5 for LoRA,", "1e-5")
    documented = re.findall(r"``(\w+)`` ([\d.e-]+) instead of ([\d.e-]+)", said)
    documented = {name: (float(theirs), float(ours)) for name, ours, theirs in documented}
    documented["vllm_importance_sampling_mode"] = ("sequence_mask", "token_truncate")
    theirs, ours = made(GRPOConfig, **ON_A_CPU), made(PeftRLConfig, use_cpu=True)
    assert documented == {name: (theirs[name], ours[name]) for name in ours if ours[name] != theirs[name]}
    bullets = re.findall(r"^    \* (.*)$", said.replace("\n      ", " "), re.MULTILINE)
    named = {name for bullet in bullets for name in re.findall(r"``(\w+)``", bullet)}
    off = {"bf16", "gradient_checkpointing", "dataloader_pin_memory"}
    assert named == {*documented, "token_truncate", "sequence_mask", *off}
    (count,) = re.findall(r"(\w+) defaults differ from TRL's", said)
    assert (count.lower(), len(documented) + len(off)) == ("seven", 7)


OFF_ON_A_CPU = ["bf16", "gradient_checkpointing", "activation_checkpointing", "dataloader_pin_memory"]


def test_what_a_gpu_is_for_is_off_on_a_cpu_unless_it_is_set():
    config = PeftRLConfig("out", use_cpu=True)
    assert config.device.type == "cpu"
    assert [getattr(config, name) for name in OFF_ON_A_CPU] == [False] * 4
    for name in OFF_ON_A_CPU:
        expected = made(GRPOConfig, **{**ON_A_CPU, **LIKE_TRL, name: True})
        if name == "gradient_checkpointing":
            expected |= {"gradient_checkpointing": True, "activation_checkpointing": True}
        assert made(PeftRLConfig, use_cpu=True, **{**LIKE_TRL, name: True}) == expected, name


COMMAND_LINES = {
    "": {},
    "--peft_method dora --peft_rank 4 --peft_alpha 2.5 --peft_dropout 0.1 --peft_target_modules q_proj v_proj": {
        "method": "dora", "rank": 4, "alpha": 2.5, "dropout": 0.1, "target_modules": ["q_proj", "v_proj"]
    },
    '--peft_kwargs {"bias":"none","rank_pattern":{"q_proj":2}} --peft_target_modules all-linear': {
        "kwargs": {"bias": "none", "rank_pattern": {"q_proj": 2}}, "target_modules": "all-linear"
    },
}  # fmt: skip


@pytest.mark.parametrize(("written", "section"), COMMAND_LINES.items())
def test_the_command_line_parser_of_transformers_reads_every_field(written, section):
    arguments = ["--output_dir", "out", "--use_cpu", "true", "--prompts_per_step", "3", "--learning_rate", "2e-5"]
    (config,) = HfArgumentParser(PeftRLConfig).parse_args_into_dataclasses([*arguments, *written.split()])
    assert config.peft == PeftSection(**section)
    assert (config.prompts_per_step, config.learning_rate) == (3, 2e-5)
    if not section:
        assert config == PeftRLConfig("out", use_cpu=True, prompts_per_step=3, learning_rate=2e-5)


def test_prompts_per_step_gives_the_other_batch_numbers():
    for prompts, generations, fixed in itertools.product(
        (1, 2, 5, 16), (2, 8), ({}, {"per_device_train_batch_size": 2}, {"gradient_accumulation_steps": 1})
    ):
        config = PeftRLConfig("out", use_cpu=True, prompts_per_step=prompts, num_generations=generations, **fixed)
        rows, passes = config.per_device_train_batch_size, config.gradient_accumulation_steps
        assert rows * passes == prompts * generations == config.generation_batch_size
        assert all(getattr(config, name) == value for name, value in fixed.items())
        assert fixed or rows == max(d for d in range(1, 9) if prompts * generations % d == 0)


CONTRADICTIONS = (
    ({"per_device_train_batch_size": 3}, "2 prompts x 8 generations = 16 completions a step.*passes of 3 rows"),
    ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}, "16 completions a step"),
    ({"prompts_per_step": 0}, "prompts_per_step"),
    ({"train_tokens_per_microbatch": -5}, r"train_tokens_per_microbatch: must be greater than or equal to 0, not -5"),
    ({"dppo_threshold": -0.1}, "^dppo_threshold: must be greater than or equal to 0, not -0.1"),
    ({"entropy_weight": float("inf")}, "^entropy_weight: must be a finite number"),
    ({"kl_in_reward": True, "beta": 0.1}, r"^kl_in_reward: [^\n]* group \(advantage_estimator: rloo or batch"),
    ({"kl_in_reward": True, "advantage_estimator": "batch"}, "^kl_in_reward: [^\n]*beta[^\n]*$"),
    (
        {"kl_in_reward": True, "advantage_estimator": "batch", "beta": 0.1, "kl_estimator": "k2"},
        "^kl_estimator: [^\n]*k2[^\n]*$",
    ),
    ({"algorithm": "dapo", "delta": 1.27}, r"^delta: 1.27 is below 1 \+ epsilon_high, 1.28: [^\n]*$"),
    (
        {"advantage_estimator": "rloo", "num_generations_eval": 1, "eval_strategy": "steps", "eval_steps": 2},
        r"^num_generations_eval: must be 2 or more[^\n]*rloo[^\n]*eval_strategy: no[^\n]*$",
    ),
    (
        {"advantage_estimator": "rloo", "multi_objective_aggregation": "normalize_then_sum"},
        r"^multi_objective_aggregation: normalize_then_sum [^\n]*rloo[^\n]*\(advantage_estimator: group[^\n]*$",
    ),
    ({"process_reward_weight": 0.5}, "process_reward_weight"),
    ({"process_reward_kwargs": {"model": "sandbox:base"}}, "process_reward_kwargs"),
    *(
        ({name: value}, rf"^{name}: must be [^\n]*, not [^\n]*$")
        for name, value in {
            "peft_rank": 2.5, "peft_alpha": 0.0, "peft_dropout": 1.0, "peft_target_modules": 5,
            "peft_kwargs": ["a"], "peft_method": None, "adapter": 5,
        }.items()
    ),
)  # fmt: skip


@pytest.mark.parametrize(("changes", "problem"), CONTRADICTIONS)
def test_numbers_that_are_impossible_or_contradict_each_other_are_refused_by_name(changes, problem):
    numbers = {"prompts_per_step": 2, "num_generations": 8, **changes}
    with pytest.raises(RecipeError, match=problem):
        PeftRLConfig("out", use_cpu=True, **numbers)


def in_a_recipe(name, wrong, right):
    return rf"^command line: train\.{name}: .*'{wrong}' \(did you mean {right}\?\)$"


def test_a_word_that_does_not_exist_is_refused_by_script_and_recipe_with_the_nearest_one():
    for name, (wrong, right) in WORDS.items():
        with pytest.raises(RecipeError, match=rf"^{name}: there is no '{wrong}' \(did you mean {right}\?\)$"):
            PeftRLConfig("out", use_cpu=True, **{name: wrong})
        with pytest.raises(RecipeError, match=rf"^{name}: must be one of .*{right}.*, not \['{right}'\]$"):
            PeftRLConfig("out", use_cpu=True, **{name: [right]})
        with pytest.raises(RecipeError, match=in_a_recipe(name, wrong, right)):
            raise_located(f"train.{name}={wrong}")


def refused_before_loading(folder, line, config_class=PeftRLConfig, kind=PeftGRPOTrainer, **arguments):
    """The line, or that of a model that does not exist."""

    def make():
        args = config_class(str(folder), **ON_A_CPU, **arguments)
        kind(model="no/such-model", reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args)

    with pytest.raises((PerlError, OSError), match=line):
        make()


LOADS = "to load the files"


@pytest.mark.parametrize("config_class", [PeftRLConfig, GRPOConfig])
def test_a_word_that_trl_looks_at_late_is_refused_before_a_model_is_loaded(tmp_path, config_class):
    words = LATE_WORDS | (LATE_WORDS_OF_OURS if config_class is PeftRLConfig else {})
    # What a loss of one's own makes of its name and its ratio is its own business.
    own = type("Own", (PeftGRPOTrainer,), {"_compute_loss": lambda *_: None, "__module__": __name__})
    for name, (wrong, right) in words.items():
        nearest, read = rf"^{name}: there is no '{wrong}' \(did you mean {right}\?\)$", {}
        if name == "dppo_divergence":
            read = {"loss_type": "dppo"}
        refused_before_loading(tmp_path, nearest, config_class, **{name: wrong}, **read)
        refused = rf"^{name}: must be one of .*{right}.*, not 7$"
        refused_before_loading(tmp_path, refused, config_class, **{name: 7}, **read)
        refused_before_loading(tmp_path, LOADS, config_class, **{name: right})
        with pytest.raises(RecipeError, match=in_a_recipe(name, wrong, right)):
            raise_located(f"train.{name}={wrong}")
        line = LOADS if name in ("loss_type", "importance_sampling_level") else f"^{name}: "
        refused_before_loading(tmp_path, line, config_class, own, **{name: wrong})


def test_arguments_of_another_type_are_refused_by_name_and_what_trl_takes_is_taken(tmp_path):
    class Own(PeftRLConfig):
        pass

    for kind in (PeftRLConfig, Own):
        for name, wrong in (
            ("gae_gamma", "x"),
            ("beta", numpy.array([0.1, 0.2])),
            ("padding_free", 1),
            ("num_generations", 8.0),
            ("prompts_per_step", "4"),
            ("critic_adapter", 7),
            ("learning_rate", float("nan")),
            ("learning_rate", -1.0),
        ):
            with pytest.raises(RecipeError, match=rf"^{name}: must be [^\n]*$"):
                kind(str(tmp_path), **ON_A_CPU, **{name: wrong})
        for given in (
            {"num_generations": numpy.int64(4), "per_device_train_batch_size": 8},
            {"beta": numpy.float32(0.5), "epsilon": numpy.array(0.3)},
            {"save_steps": 0, "save_strategy": "no"},
            {"logging_steps": 0, "logging_strategy": "no"},
            {"save_total_limit": 0},
            {"learning_rate": "1e-5"},
            {"learning_rate": 0.0, "max_steps": -1},
            {"num_train_epochs": "3"},
            {"algorithm": "ppo", "critic_adapter": tmp_path},
        ):
            kind(str(tmp_path), **ON_A_CPU, **given)


OF_TRLS_STEP = {"top_entropy_quantile": 0.5, "entropy_coef": 0.1, "use_adaptive_entropy": True}
OF_OUR_STEP = ({"loss_type": "dppo"}, {"kl_estimator": "k1"}, {"entropy_weight": 0.1}, {"kl_in_reward": True})


def test_what_trls_loss_does_not_know_is_refused_with_what_only_trls_loss_does(tmp_path):
    for setting, (name, value) in itertools.product(OF_OUR_STEP, OF_TRLS_STEP.items()):
        (key,) = setting
        others = {"advantage_estimator": "batch", "beta": 0.1} if key == "kl_in_reward" else {}
        line = rf"^{key}: [^\n]*because of {name}[^\n]*$"
        refused_before_loading(tmp_path, line, **{name: value}, **setting, **others)


def raise_located(override):
    """What is said of a recipe's arguments, at the place of the key."""
    recipe = load_recipe("quickstart", [override], checks=(loss_mistakes,))
    try:
        training_arguments(recipe, "out")
    except PerlError as error:
        raise recipe.located(error) from None


def test_a_rollout_setting_that_does_not_exist_is_refused_by_the_arguments_name():
    for given, line in (
        ({"rollout_backend": "vlm"}, r"rollout_backend: must be one of .*, not 'vlm' \(did you mean vllm\?\)"),
        ({"rollout_backend": "vllm-server"}, "rollout_backend: vllm-server needs servers, .*"),
        ({"rollout_servers": ["http://a:1"]}, "rollout_servers: are used by backend vllm-server only, not by auto"),
        (
            {"rollout_servers": ["a:1"], "rollout_backend": "vllm-server"},
            "rollout_servers: a server is an address like http://localhost:8000, not 'a:1'",
        ),
        ({"use_vllm": True, "vllm_mode": "sever"}, r"vllm_mode: there is no 'sever' \(did you mean server\?\)"),
        ({"rollout_check_every": -1}, "rollout_check_every: must be greater than or equal to 0, not -1"),
    ):
        with pytest.raises(RecipeError, match=rf"^{line}$"):
            PeftRLConfig("out", use_cpu=True, **given)


def test_the_adapter_fields_are_the_recipes_section():
    names = [field.name for field in dataclasses.fields(PeftRLConfig) if field.name.startswith("peft_")]
    assert set(names) == {f"peft_{key}" for key in PeftSection.model_fields if key != "adapter"}
    assert PeftRLConfig("out", use_cpu=True).peft == PeftSection()
    config = PeftRLConfig("out", use_cpu=True, peft_type="C3A", peft_kwargs={"block_size": 32}, adapter="folder")
    assert config.peft == PeftSection(type="C3A", kwargs={"block_size": 32}, adapter="folder")


def test_the_default_learning_rate_is_the_methods():
    """In a recipe too, and null gives it back to one that extends another."""
    rates = {name: 1e-5 * method.rate for name, method in METHODS.items()}
    assert (rates["lora"], rates["full"]) == pytest.approx((1e-5, 1e-6), rel=1e-12)
    for method, expected in rates.items():
        assert PeftRLConfig("out", use_cpu=True, peft_method=method).learning_rate == pytest.approx(expected, rel=1e-12)
        given = {"peft": {"method": method}, "engine": {"device": "cpu"}, "train": {"learning_rate": 3e-7}}
        for recipe in (load_recipe({**given, "train": {}}), load_recipe(given, ["train.learning_rate=null"])):
            assert training_arguments(recipe, "out").learning_rate == pytest.approx(expected, rel=1e-12)
    assert PeftRLConfig("out", use_cpu=True, learning_rate=3e-7).learning_rate == 3e-7


def test_only_a_reference_of_the_kl_divergence_that_exists_is_taken():
    for reference in (None, "base", "initial", "rolling:1", "rolling:50"):
        assert PeftRLConfig("out", use_cpu=True, reference=reference).reference == reference
    for unknown in ("", "pristine", "rolling", "rolling:0", "rolling:-2", "rolling:1.5", "base\n"):
        with pytest.raises(RecipeError) as caught:
            PeftRLConfig("out", use_cpu=True, reference=unknown)
        (mistake,) = caught.value.mistakes
        assert (mistake.where, "rolling:N" in mistake.message) == ("reference", True), unknown


def test_a_recipes_training_arguments_arrive():
    recipe = load_recipe(
        {
            "peft": {"rank": 4, "target_modules": ["q_proj"], "kwargs": {"bias": "none"}},
            "rewards": {"format": 0.25, "accuracy": 2},
            "rollout": {"temperature": 0.5, "top_k": 7, "max_completion_length": 9},
            "engine": {"device": "cpu"},
            "train": {
                "prompts_per_step": 4, "num_generations": 2, "adam_beta2": 0.5, "mask_truncated_completions": True,
                "lr_scheduler_type": "cosine", "epsilon_high": 0.3, "chat_template_kwargs": {"a": 1}, "report_to": [],
                "loss_type": "dr_grpo", "seed": 7, "save_total_limit": 3, "output_dir": "elsewhere",
            },
        }
    )  # fmt: skip
    arguments = training_arguments(recipe, "folder/checkpoints")
    assert arguments.output_dir == "folder/checkpoints"
    assert arguments.peft == recipe.peft
    assert arguments.reward_weights == [0.25, 2.0]
    assert (arguments.temperature, arguments.top_k, arguments.max_completion_length) == (0.5, 7, 9)
    assert (arguments.num_generations, arguments.generation_batch_size) == (2, 8)
    assert arguments.use_cpu
    asked = {key: recipe.train[key] for key in recipe.train if key not in {"prompts_per_step", "output_dir"}}
    assert {key: getattr(arguments, key) for key in asked} == asked


def test_arguments_that_trl_refuses_are_the_recipes_mistake():
    for train in (
        {"steps_per_generation": 2, "generation_batch_size": 16},
        {"generation_batch_size": 3},
    ):
        recipe = load_recipe({"train": train, "engine": {"device": "cpu"}})
        with pytest.raises(RecipeError) as caught:
            training_arguments(recipe, "out")
        assert caught.value.mistakes[0].where.startswith("train")
        assert len(str(caught.value).splitlines()) == 1


SERVERS = {"rollout_backend": "vllm-server", "rollout_servers": ["http://localhost:8000"]}
UNCORRECTED = {"vllm_importance_sampling_correction": False}


def test_a_policy_whose_log_probabilities_could_not_be_corrected_is_not_sampled_from():
    """A distribution that is cut off, or an older policy's."""
    cut = ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"repetition_penalty": 1.1})
    for sampling in cut:
        (name,) = sampling
        with pytest.raises(RecipeError, match=rf"rollout\.{name}: .* cuts off"):
            PeftRLConfig("out", use_cpu=True, **SERVERS, **sampling)
        PeftRLConfig("out", use_cpu=True, **SERVERS, **sampling, **UNCORRECTED)
        PeftRLConfig("out", use_cpu=True, rollout_backend="transformers", **sampling)
    PeftRLConfig("out", use_cpu=True, **SERVERS, temperature=0.7, min_p=0.0)
    for further, word in (({"advantage_estimator": "remax"}, "greedy"), (UNCORRECTED, "older policy")):
        with pytest.raises(RecipeError, match=rf"rollout\.prefetch: .*{word}"):
            PeftRLConfig("out", use_cpu=True, **SERVERS, rollout_prefetch=1, **further)
    PeftRLConfig("out", use_cpu=True, **SERVERS, rollout_prefetch=1)


def test_trls_way_to_ask_for_vllm_is_understood():
    for trls, backend, servers in (
        ({"use_vllm": True}, "vllm", []),
        ({"vllm_mode": "server"}, "auto", []),
        ({"use_vllm": True, "vllm_mode": "server"}, "vllm-server", ["http://localhost:8000"]),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_host": "gpu", "vllm_server_port": 9},
            "vllm-server",
            ["http://gpu:9"],
        ),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://gpu:7"},
            "vllm-server",
            ["http://gpu:7"],
        ),
    ):
        for config in (PeftRLConfig("out", use_cpu=True, **trls), GRPOConfig("out", **ON_A_CPU, **trls)):
            how = rollout_section(config)
            assert (how.backend, how.servers) == (backend, servers)
