"""A TRL script with two classes renamed: what it is told, what it is refused, what it finds in the log."""

import inspect
import logging
import math
from functools import partial

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import GRPOConfig

from perl import PeftGRPOTrainer, PeftRLConfig
from perl.errors import DataError, ModelError, RecipeError, RewardError
from perl.hub.push.publish import write_log
from perl.recipe import load_recipe
from perl.sandbox import BASE_FOLDER
from perl.trainer.sampling.given_rewards import unique_names
from perl.training.prepare import training_arguments
from tests.trainer.test_overrides import by_place
from tests.trainer.test_trainer import arguments, base, problems, weights_of

SHORT = {"max_steps": 1, "max_completion_length": 6}
TRLS = {
    "use_cpu": True,
    "bf16": False,
    "activation_checkpointing": False,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "report_to": [],
    "save_strategy": "no",
}


def made(args, model="sandbox:base", reward=by_place, **others):
    return PeftGRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=problems(8), **others)


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# What is trained.


def test_a_script_without_a_peft_config_is_told_in_one_line_what_is_trained(tmp_path, caplog):
    trainer = made(PeftRLConfig(str(tmp_path), use_cpu=True, report_to=[]))
    (line,) = [line for line in lines(caplog) if "no peft_config" in line]
    count = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert 0 < count < 0.5 * sum(p.numel() for p in trainer.model.parameters())
    assert f"{count:,} parameters" in line
    assert "lora of rank 16" in line
    assert 'peft_method="full"' in line


def test_fields_that_a_peft_config_overrules_are_named(tmp_path, caplog):
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear")
    made(arguments(tmp_path, peft_method="dora", peft_rank=32), peft_config=lora)
    (line,) = [line for line in lines(caplog) if "do nothing" in line]
    assert line.startswith("peft_method, peft_rank do nothing: the adapter is that of the peft_config")


@pytest.mark.parametrize("changes", [{}, {"max_steps": -1}])
@pytest.mark.parametrize("prompts", [0, 1])
def test_a_data_set_that_holds_no_step_is_refused_and_not_trained_on_in_silence(tmp_path, prompts, changes):
    trainer = made(arguments(tmp_path, prompts_per_step=2, **{**SHORT, **changes}))
    trainer.train_dataset = problems(8).select(range(prompts))
    with pytest.raises(DataError, match=r"^train_dataset: .*fewer prompts than one step takes, which are 2"):
        trainer.train()


def test_data_without_questions_is_refused_by_name(tmp_path):
    for rows, words in (
        (problems(8).rename_column("prompt", "question"), "has no column 'prompt', it has question"),
        (problems(8).map(lambda _: {"prompt": " "}), "a prompt asks nothing: ' '"),
    ):
        with pytest.raises(DataError, match=rf"^train_dataset: {words}"):
            PeftGRPOTrainer("sandbox:base", by_place, arguments(tmp_path, **SHORT), rows).train()


def test_a_stream_is_trained_on_and_gone_on_with(tmp_path):
    trained = []
    for resume in (None, str(tmp_path / "checkpoint-1")):
        args = arguments(tmp_path, **{**SHORT, "max_steps": 2}, save_strategy="steps", save_steps=1)
        trainer = PeftGRPOTrainer("sandbox:base", by_place, args, problems(8).to_iterable_dataset())
        trainer.train(resume_from_checkpoint=resume)
        trained.append(weights_of(trainer.policy))
    assert torch.equal(*trained)


def test_rollouts_for_more_steps_than_before_begin_where_a_training_is_gone_on_with(tmp_path):
    asked = []

    def reward(completions, trainer_state, **_):
        asked.append(trainer_state.global_step)
        return by_place(completions)

    for steps, changes, resume in ((3, {}, None), (6, {"steps_per_generation": 2}, str(tmp_path / "checkpoint-3"))):
        args = arguments(tmp_path, **{**SHORT, "max_steps": steps, **changes}, save_strategy="steps", save_steps=3)
        trainer = made(args, reward=reward)
        trainer.train(resume_from_checkpoint=resume)
    assert asked == [0, 1, 2, 3, 5]


def test_a_flat_reward_beside_a_term_of_the_method_is_no_defect(tmp_path):
    """AdaLoRA's regulariser moves A and B; its singular values wait for a reward."""
    args = arguments(tmp_path, peft_method="adalora", **{**SHORT, "max_steps": 7, "max_completion_length": 2})
    trainer = made(args, reward=lambda completions, **_: [1.0] * len(completions))
    trainer.train()
    assert trainer.state.global_step == 7


def test_what_was_asked_for_is_not_told(tmp_path, caplog):
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear")
    made(arguments(tmp_path), peft_config=lora)
    made(arguments(tmp_path), model=get_peft_model(base(), lora))
    made(arguments(tmp_path, peft_method="full", peft_rank=None))
    made(GRPOConfig(str(tmp_path), **TRLS, max_completion_length=6), model=str(BASE_FOLDER))
    recipe = load_recipe({"train": {"report_to": []}, "engine": {"device": "cpu"}, "rewards": {"accuracy": 1}})
    made(training_arguments(recipe, str(tmp_path)))
    assert not [line for line in lines(caplog) if "are trained" in line]
    trainer = made(arguments(tmp_path, model_init_kwargs={"dtype": "bfloat16"}))
    assert trainer.policy.get_base_model().dtype == torch.bfloat16
    assert trainer.args.model_init_kwargs == {"dtype": "bfloat16"}
    assert "will be ignored" not in caplog.text


# What is refused, before anything is trained.


def no_weights(*_, **__):
    raise AssertionError("weights were loaded")


SECOND_MODEL = {"sync_ref_model": True, "ref_model_sync_steps": 3}
INSTEAD = r'sync_ref_model: .*reference="rolling:3"'
PROMPTS = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)


@pytest.mark.parametrize(
    ("changes", "peft_config", "message"),
    [
        ({**SECOND_MODEL, "beta": 0.0}, None, INSTEAD),
        ({**SECOND_MODEL, "beta": 0.1}, None, INSTEAD),
        ({**SECOND_MODEL, "beta": 0.0, "peft_method": "full", "peft_rank": None}, None, INSTEAD),
        ({**SECOND_MODEL, "beta": 0.1, "peft_method": "full", "peft_rank": None}, None, INSTEAD),
        ({"hub_token": "hf_secret"}, None, r"hub_token: .*hf auth login"),
        ({}, PROMPTS, "PROMPT_TUNING cannot be trained"),
    ],
)
def test_what_would_not_be_done_is_refused_before_weights_are_loaded_and_what_takes_its_place_is_named(
    tmp_path, monkeypatch, changes, peft_config, message
):
    monkeypatch.setattr("perl.trainer.policy_setup.create_model_from_path", no_weights)
    with pytest.raises(RecipeError, match=message) as caught:
        made(arguments(tmp_path, **changes), peft_config=peft_config)
    assert len(str(caught.value).splitlines()) == 1
    if "sync_ref_model" in changes:
        made(arguments(tmp_path, beta=0.1, reference="rolling:3"), model=base())


def test_a_tied_head_that_trl_cannot_cast_under_an_adapter_is_refused(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    config = transformers.Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    args = arguments(tmp_path, cast_lm_head_to_fp32=True)
    with pytest.raises(ModelError, match=r"cast_lm_head_to_fp32: .*Gemma2ForCausalLM.*tied"):
        made(args, model=model, processing_class=tokenizer)
    full = arguments(tmp_path, cast_lm_head_to_fp32=True, peft_method="full", peft_rank=None)
    made(full, model=model, processing_class=tokenizer)


# Models of which PEFT refuses some layers.


def with_mamba() -> PreTrainedModel:
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    config = transformers.NemotronHConfig(
        vocab_size=len(tokenizer), hidden_size=32, pad_token_id=tokenizer.pad_token_id, intermediate_size=64,
        layers_block_type=["mamba", "attention"], num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=8, n_groups=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("by", ["fields", "peft_config"])
def test_all_linear_leaves_out_what_an_adapter_does_not_reach_and_says_so(tmp_path, caplog, by):
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear") if by == "peft_config" else None
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    trainer = made(arguments(tmp_path, **SHORT), with_mamba(), peft_config=config, processing_class=tokenizer)
    targets = {name.split(".")[-1] for name in trainer.policy.peft_config["default"].target_modules}
    assert targets == {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj"}
    assert [line for line in lines(caplog) if "all-linear without" in line and "out_proj" in line]
    before = {n: p.detach().clone() for n, p in trainer.policy.named_parameters() if "lora_B" in n}
    trainer.train()
    assert before
    assert all(not torch.equal(p, before[n]) for n, p in trainer.policy.named_parameters() if n in before)


def test_a_target_that_peft_refuses_is_named_with_the_setting(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    args = arguments(tmp_path, peft_target_modules=["in_proj", "out_proj"])
    with pytest.raises(ModelError, match=r"peft\.target_modules: PEFT refuses: .*out_proj.*all-linear") as caught:
        made(args, with_mamba(), processing_class=tokenizer)
    assert len(str(caught.value).splitlines()) == 1


# What is in the log.


@pytest.mark.parametrize("every", [1, 2, 10])
def test_the_entry_that_closes_a_training_has_the_last_values_and_is_a_step_of_a_pushed_log_if_none_has_them(
    tmp_path, every
):
    trainer = made(arguments(tmp_path / "ours", **{**SHORT, "max_steps": 3}, logging_steps=every, entropy_coef=0.01))
    trainer.train()
    *steps_logged, closing = trainer.state.log_history
    assert "train_runtime" in closing
    for name in ("reward", "reward_std", "policy_loss", "entropy", "completions/mean_length", "rewards/by_place/mean"):
        assert closing[name] is not None
        if every in (1, 3):  # the last step was logged
            assert closing[name] == steps_logged[-1][name]
    assert len(steps_logged) == 3 // every
    write_log(tmp_path, trainer.state.log_history)
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == math.ceil(3 / every)  # the last of them after step 3


def test_rows_that_a_reward_leaves_out_are_counted_and_the_logged_reward_is_of_the_others(tmp_path, caplog):
    """Of two groups of 4: the second reward leaves out one row of the first group, and the whole second group."""

    def first(completions, **_):
        return [4.0, 0.0, 0.0, 2.0] * (len(completions) // 4)

    def second(**_):
        return [None, 1.0, 2.0, 3.0, None, None, None, None]

    args = arguments(tmp_path, **{**SHORT, "max_steps": 2})
    trainer = made(args, reward=[first, second])
    trainer.train()
    rewards = torch.tensor([1.0, 2.0, 5.0, 4.0, 0.0, 0.0, 2.0])
    for entry in trainer.state.log_history[:2]:
        assert entry["rows/unscored"] == 1.0
        assert entry["reward"] == pytest.approx(rewards.mean().item())
        assert entry["reward_std"] == pytest.approx(rewards.std().item())
        assert entry["rewards/first/mean"] == 1.5
    (line,) = [line for line in lines(caplog) if "None" in line]
    assert "second gave None for some completions of a group" in line
    assert "1 of 8" in line
    # Alone, the second reward scores no completion of the second group; TRL's mean would take those for zeros.
    trainer = made(args, reward=[second])
    trainer.train()
    assert trainer.state.log_history[0]["rows/unscored"] == 5.0
    assert trainer.state.log_history[0]["reward"] == pytest.approx(2.0)
    caplog.clear()
    trainer = made(arguments(tmp_path, **SHORT))  # whose reward is for all
    trainer.train()
    assert trainer.state.log_history[0]["rows/unscored"] == 0.0
    assert not [line for line in lines(caplog) if "None" in line]


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda **_: None, "NoneType, not a list"),
        (lambda **_: 1.0, "float, not a list"),
        (lambda prompts, **_: ["1.0"] * len(prompts), "'1.0', which is not a number"),
        (lambda prompts, **_: [[1.0, 2.0]] * len(prompts), "list"),
        (lambda prompts, **_: [math.nan] * len(prompts), "NaN for every completion"),
        (lambda answer, **_: [1.0] * len(answer), "'answer'.*solution"),
    ],
)
@pytest.mark.parametrize("waits", [False, True])
def test_what_is_no_list_of_rewards_is_one_line_with_the_rewards_name(tmp_path, reward, words, waits):
    async def later(**given):
        return reward(**given)

    later.__signature__ = inspect.signature(reward)
    function = later if waits else reward
    function.__name__ = "mine"
    with pytest.raises(RewardError, match=rf"^reward mine: [^\n]*{words}[^\n]*$"):
        made(arguments(tmp_path, **SHORT), reward=[by_place, function]).train()


def test_rewards_of_one_name_are_logged_apart(tmp_path):
    def times(completions, by=1, **_):
        return [by * float(index % 4 == 0) for index in range(len(completions))]

    rewards = [partial(times, by=2), partial(times, by=-1), partial(times, by=3)]
    trainer = made(arguments(tmp_path, **SHORT), reward=rewards)
    trainer.train()
    means = {name: value for name, value in trainer.state.log_history[0].items() if name.endswith("/mean")}
    assert {name: means[f"rewards/{name}/mean"] for name in ("times", "times_2", "times_3")} == {
        "times": 0.5,
        "times_2": -0.25,
        "times_3": 0.75,
    }
    assert trainer.latest_group()[0]["rewards"] == {"times": 2.0, "times_2": -1.0, "times_3": 3.0}
    assert unique_names(["a", "a", "a_2"]) == ["a", "a_3", "a_2"]
