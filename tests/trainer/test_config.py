"""PeftRLConfig is TRL's GRPOConfig with an adapter, a batch in a person's terms, and the defaults it documents."""

import dataclasses
import re
import types
import typing
import warnings

import pytest
from pydantic import ValidationError
from transformers import HfArgumentParser
from trl import GRPOConfig

from perl.errors import RecipeError
from perl.methods.registry import METHODS
from perl.recipe import load_recipe
from perl.recipe.sections import PeftSection
from perl.trainer.config import PeftRLConfig, rollout_section, training_arguments

ON_A_CPU = {"use_cpu": True, "bf16": False, "activation_checkpointing": False, "dataloader_pin_memory": False}
SAMPLING = {"vllm_importance_sampling_mode": "sequence_mask"}
LIKE_TRL = {"learning_rate": 1e-6, "logging_steps": 10, "save_steps": 500, **SAMPLING}
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
            expected = made(GRPOConfig, **arguments)
            assert made(PeftRLConfig, **arguments) == expected, (field.name, value)
            accepted += isinstance(expected, dict)
    assert len(PARENT_FIELDS) > 150
    assert len(tried) > 0.95 * len(PARENT_FIELDS)
    assert accepted > 200


def test_the_documented_defaults_are_the_ones_that_differ():
    said = PeftRLConfig.__doc__.replace("is the method's usual one, 1e-5 for LoRA,", "1e-5")
    documented = re.findall(r"``(\w+)`` ([\d.e-]+) instead of ([\d.e-]+)", said)
    documented = {name: (float(theirs), float(ours)) for name, ours, theirs in documented}
    assert documented == {"learning_rate": (1e-6, 1e-5), "logging_steps": (10, 1), "save_steps": (500, 50)}
    assert "``bf16``, ``gradient_checkpointing`` and ``dataloader_pin_memory`` are off on a CPU" in PeftRLConfig.__doc__
    theirs = made(GRPOConfig, **ON_A_CPU)
    ours = made(PeftRLConfig, use_cpu=True)
    differing = {name: (theirs[name], ours[name]) for name in ours if ours[name] != theirs[name]}
    assert differing.pop("vllm_importance_sampling_mode") == ("sequence_mask", "token_truncate")
    assert "``vllm_importance_sampling_mode`` is ``token_truncate``" in PeftRLConfig.__doc__
    assert differing == documented


def test_the_count_of_differing_defaults_in_the_documentation_is_right():
    (count,) = re.findall(r"(\w+) defaults differ from TRL's", PeftRLConfig.__doc__)
    bullets = re.findall(r"^    \* (.*)$", PeftRLConfig.__doc__.replace("\n      ", " "), re.MULTILINE)
    named = {name for bullet in bullets for name in re.findall(r"``(\w+)``", bullet)}
    assert named == {
        "learning_rate",
        "logging_steps",
        "save_steps",
        "bf16",
        "gradient_checkpointing",
        "dataloader_pin_memory",
        "vllm_importance_sampling_mode",
        "token_truncate",
        "sequence_mask",
    }
    assert count.lower() == "seven"


def test_a_cpu_needs_no_argument_and_gives_no_warning():
    config = PeftRLConfig("out", use_cpu=True)
    assert (config.bf16, config.gradient_checkpointing, config.activation_checkpointing) == (False, False, False)
    assert config.dataloader_pin_memory is False
    assert config.device.type == "cpu"


@pytest.mark.parametrize(
    "name", ["bf16", "gradient_checkpointing", "activation_checkpointing", "dataloader_pin_memory"]
)
def test_what_is_asked_for_is_done_on_a_cpu_too(name):
    expected = made(GRPOConfig, **{**ON_A_CPU, **LIKE_TRL, name: True})
    if name == "gradient_checkpointing":
        expected |= {"gradient_checkpointing": True, "activation_checkpointing": True}
    assert made(PeftRLConfig, use_cpu=True, **{**LIKE_TRL, name: True}) == expected


def test_the_command_line_parser_of_transformers_reads_every_field():
    (config,) = HfArgumentParser(PeftRLConfig).parse_args_into_dataclasses(["--output_dir", "out", "--use_cpu", "true"])
    assert config == PeftRLConfig("out", use_cpu=True)
    assert config.peft == PeftSection()


def test_the_command_line_parser_of_transformers_reads_the_adapter():
    arguments = ["--output_dir", "out", "--use_cpu", "true", "--prompts_per_step", "3", "--learning_rate", "2e-5"]
    arguments += ["--peft_method", "dora", "--peft_rank", "4", "--peft_alpha", "2.5", "--peft_dropout", "0.1"]
    arguments += ["--peft_target_modules", "q_proj", "v_proj"]
    arguments += ["--peft_kwargs", '{"bias": "none", "use_rslora": true, "rank_pattern": {"q_proj": 2}}']
    (config,) = HfArgumentParser(PeftRLConfig).parse_args_into_dataclasses(arguments)
    assert config.peft == PeftSection(
        method="dora",
        rank=4,
        alpha=2.5,
        dropout=0.1,
        target_modules=["q_proj", "v_proj"],
        kwargs={"bias": "none", "use_rslora": True, "rank_pattern": {"q_proj": 2}},
    )
    assert (config.prompts_per_step, config.learning_rate) == (3, 2e-5)


@pytest.mark.parametrize("targets", ["all-linear", "q_proj", ".*self_attn.*_proj"])
def test_one_target_on_the_command_line_is_that_target(targets):
    arguments = ["--output_dir", "out", "--use_cpu", "true", "--peft_target_modules", targets]
    (config,) = HfArgumentParser(PeftRLConfig).parse_args_into_dataclasses(arguments)
    assert config.peft.target_modules in (targets, [targets])
    assert (config.peft.target_modules == "all-linear") is (targets == "all-linear")


@pytest.mark.parametrize("prompts", [1, 2, 5, 16])
@pytest.mark.parametrize("generations", [2, 8])
@pytest.mark.parametrize("fixed", [{}, {"per_device_train_batch_size": 2}, {"gradient_accumulation_steps": 1}])
def test_prompts_per_step_gives_the_other_batch_numbers(prompts, generations, fixed):
    config = PeftRLConfig("out", use_cpu=True, prompts_per_step=prompts, num_generations=generations, **fixed)
    rows, passes = config.per_device_train_batch_size, config.gradient_accumulation_steps
    assert rows * passes == prompts * generations == config.generation_batch_size
    assert all(getattr(config, name) == value for name, value in fixed.items())
    if not fixed:
        assert rows == max(d for d in range(1, 9) if prompts * generations % d == 0)


@pytest.mark.parametrize(
    "numbers",
    [
        {"per_device_train_batch_size": 3},
        {"gradient_accumulation_steps": 5},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
    ],
)
def test_prompts_per_step_that_contradicts_the_other_numbers_is_refused(numbers):
    with pytest.raises(RecipeError, match="2 prompts x 8 generations = 16 completions a step"):
        PeftRLConfig("out", use_cpu=True, prompts_per_step=2, num_generations=8, **numbers)


@pytest.mark.parametrize("prompts", [0, -1])
def test_prompts_per_step_below_one_is_refused(prompts):
    with pytest.raises(RecipeError):
        PeftRLConfig("out", use_cpu=True, prompts_per_step=prompts)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("peft_rank", 0),
        ("peft_rank", 2.5),
        ("peft_alpha", 0.0),
        ("peft_alpha", -1.0),
        ("peft_dropout", 1.0),
        ("peft_dropout", -0.1),
        ("peft_target_modules", 5),
        ("peft_kwargs", ["a"]),
        ("peft_method", None),
        ("peft_type", 5),
        ("adapter", 5),
    ],
)
def test_an_impossible_adapter_is_refused_at_once(name, value):
    with pytest.raises(ValidationError) as caught:
        PeftRLConfig("out", use_cpu=True, **{name: value})
    assert caught.value.errors()[0]["loc"][0] == name.removeprefix("peft_")


def test_the_adapter_fields_are_the_recipes_section():
    names = [field.name for field in dataclasses.fields(PeftRLConfig) if field.name.startswith("peft_")]
    assert set(names) == {f"peft_{key}" for key in PeftSection.model_fields if key != "adapter"}
    assert PeftRLConfig("out", use_cpu=True).peft == PeftSection()
    config = PeftRLConfig("out", use_cpu=True, peft_type="C3A", peft_kwargs={"block_size": 32}, adapter="folder")
    assert config.peft == PeftSection(type="C3A", kwargs={"block_size": 32}, adapter="folder")


@pytest.mark.parametrize("method", METHODS)
def test_the_default_learning_rate_is_the_methods(method):
    config = PeftRLConfig("out", use_cpu=True, peft_method=method)
    assert config.learning_rate == pytest.approx(1e-5 * METHODS[method].rate, rel=1e-12)
    assert PeftRLConfig("out", use_cpu=True, peft_method=method, learning_rate=3e-7).learning_rate == 3e-7
    recipe = load_recipe({"peft": {"method": method}, "engine": {"device": "cpu"}})
    assert training_arguments(recipe, "out").learning_rate == config.learning_rate


def test_the_usual_learning_rates_of_lora_and_of_all_weights_differ_tenfold():
    rates = [PeftRLConfig("out", use_cpu=True, peft_method=method).learning_rate for method in ("lora", "full")]
    assert rates == pytest.approx([1e-5, 1e-6], rel=1e-12)


def test_null_gives_the_methods_learning_rate_back_to_a_recipe_that_extends_another():
    recipe = load_recipe("quickstart", ["peft.method=dora", "train.learning_rate=null", "engine.device=cpu"])
    assert training_arguments(recipe, "out").learning_rate == 1e-5 * METHODS["dora"].rate


@pytest.mark.parametrize("reference", [None, "base", "initial", "rolling:1", "rolling:50"])
def test_a_reference_of_the_kl_divergence_is_named(reference):
    assert PeftRLConfig("out", use_cpu=True, reference=reference).reference == reference
    recipe = load_recipe({"train": {"reference": reference}, "engine": {"device": "cpu"}})
    assert training_arguments(recipe, "out").reference == reference


@pytest.mark.parametrize("reference", ["", "pristine", "rolling", "rolling:0", "rolling:-2", "rolling:1.5", "base\n"])
def test_a_reference_that_does_not_exist_is_refused(reference):
    with pytest.raises(RecipeError) as caught:
        PeftRLConfig("out", use_cpu=True, reference=reference)
    (problem,) = caught.value.mistakes
    assert problem.where == "reference"
    assert "rolling:N" in problem.hint
    with pytest.raises(RecipeError, match=r"^train\.reference: must "):
        load_recipe({"train": {"reference": reference}})


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


@pytest.mark.parametrize(
    "train",
    [
        {"eval_strategy": "sometimes"},
        {"lr_scheduler_type": "zigzag"},
        {"steps_per_generation": 2, "generation_batch_size": 16},
        {"generation_batch_size": 3},
    ],
)
def test_arguments_that_trl_refuses_are_the_recipes_mistake(train):
    recipe = load_recipe({"train": train, "engine": {"device": "cpu"}})
    with pytest.raises(RecipeError) as caught:
        training_arguments(recipe, "out")
    assert caught.value.mistakes[0].where.startswith("train")
    assert len(str(caught.value).splitlines()) == 1


def test_a_pass_of_less_than_no_tokens_is_refused():
    with pytest.raises(RecipeError, match=r"train_tokens_per_microbatch: a pass of -5 tokens"):
        PeftRLConfig("run", train_tokens_per_microbatch=-5)


SERVERS = {"rollout_backend": "vllm-server", "rollout_servers": ["http://localhost:8000"]}


@pytest.mark.parametrize(
    ("sampling", "where"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 20}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.1}, None),
    ],
)
def test_a_cut_off_distribution_is_refused_where_its_log_probabilities_would_be_corrected(sampling, where):
    with pytest.raises(RecipeError, match=rf"rollout\.{where or 'repetition_penalty'}: .* cuts off"):
        PeftRLConfig("out", use_cpu=True, **SERVERS, **sampling)
    PeftRLConfig("out", use_cpu=True, **SERVERS, **sampling, vllm_importance_sampling_correction=False)
    PeftRLConfig("out", use_cpu=True, rollout_backend="transformers", **sampling)
    PeftRLConfig("out", use_cpu=True, **SERVERS, temperature=0.7, min_p=0.0)


def test_rollouts_ahead_of_their_step_need_the_correction():
    PeftRLConfig("out", use_cpu=True, **SERVERS, rollout_prefetch=1)
    with pytest.raises(RecipeError, match=r"rollout\.prefetch: .*older policy"):
        PeftRLConfig("out", use_cpu=True, **SERVERS, rollout_prefetch=1, vllm_importance_sampling_correction=False)


@pytest.mark.parametrize(
    ("trls", "backend", "servers"),
    [
        ({"use_vllm": True}, "vllm", []),
        ({"use_vllm": True, "vllm_mode": "server"}, "vllm-server", ["http://localhost:8000"]),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_server_host": "gpu", "vllm_server_port": 9}, "vllm-server",
         ["http://gpu:9"]),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://gpu:7"}, "vllm-server",
         ["http://gpu:7"]),
        ({"use_vllm": False, "vllm_mode": "server"}, "auto", []),
    ],
)  # fmt: skip
def test_trls_way_to_ask_for_vllm_is_understood(trls, backend, servers):
    ours, theirs = PeftRLConfig("out", use_cpu=True, **trls), GRPOConfig("out", **ON_A_CPU, **trls)
    for config in (ours, theirs):
        how = rollout_section(config)
        assert (how.backend, how.servers) == (backend, servers)
