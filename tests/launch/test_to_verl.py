"""What of a recipe goes to verl, as what, and what is refused: no verl is needed for it."""

import json
import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers

from perl.errors import RecipeError
from perl.launch.verl.can_go import GOES, MAPPED, REFUSED, STATED, all_keys, method_refusal, plain_alpha, refusals
from perl.launch.verl.hydra import override
from perl.methods.registry import METHODS
from perl.recipe import Recipe
from perl.training.stages import read_recipe
from perl.training.to_verl import prepare_export, read_for_verl
from tests.launch.verl_recipes import ALGORITHMS, ENGINES, of_algorithm, recipe, told, with_train

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def exported():
    return prepare_export(recipe())


def values_of(exported, **sections):
    return told(exported, recipe(**sections)).values


def refused(exported, **sections):
    """Where a recipe is refused -> how."""
    with pytest.raises(RecipeError) as caught:
        told(exported, recipe(**sections))
    return {mistake.where.split(": ")[-1]: str(mistake) for mistake in caught.value.mistakes}


def test_every_key_of_a_recipe_is_mapped_or_refused_or_said_to_mean_nothing():
    keys = all_keys()
    assert len(keys) == len(set(keys)) > 280
    classes = [sum(key in table for table in (MAPPED, REFUSED, STATED)) for key in keys]
    assert [key for key, found in zip(keys, classes, strict=True) if found != 1] == []
    assert sorted([*MAPPED, *REFUSED, *STATED]) == sorted(keys)


def test_every_method_goes_or_is_refused_with_the_nearest_one_that_goes():
    answers = {name: method_refusal(name) for name in METHODS}
    assert {name for name, answer in answers.items() if answer is None} == set(GOES) == {"lora", "rslora"}
    for name, answer in answers.items():
        if answer is not None:
            mistakes = {mistake.where: mistake for mistake in refusals(recipe(peft={"method": name}))}
            assert name in mistakes["peft.method"].message
            assert mistakes["peft.method"].hint == answer.instead


@pytest.mark.parametrize("rank", [1, 8, 24, 128])
def test_rslora_goes_as_the_plain_lora_of_its_scale(rank):
    linears = [torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(2)]
    ours = peft.LoraConfig(r=rank, lora_alpha=8, use_rslora=True, target_modules=["0"])
    plain = peft.LoraConfig(r=rank, lora_alpha=plain_alpha(rank, 8, rslora=True), target_modules=["0"])
    models = [peft.get_peft_model(*pair) for pair in zip(linears, (ours, plain), strict=True)]
    scales = [model.base_model.model[0].scaling["default"] for model in models]
    assert scales[1] == pytest.approx(scales[0], rel=1e-12) == pytest.approx(8 / math.sqrt(rank), rel=1e-12)
    assert plain_alpha(rank, 8, rslora=False) == pytest.approx(8)


@pytest.mark.parametrize(
    ("sections", "where", "words"),
    [
        ({"peft": {"method": "dora"}}, "peft.method", ("dora", "rslora")),
        ({"peft": {"dropout": 0.1}}, "peft.dropout", ("0.1", "dropout")),
        ({"peft": {"kwargs": {"init_lora_weights": "gaussian"}}}, "peft.kwargs.init_lora_weights", ("no key",)),
        ({"peft": {"kwargs": {"rank_pattern": {"q_proj": 4}}}}, "peft.kwargs.rank_pattern", ("plain LoRA",)),
        ({"teacher": {"hint": "The answer is {answer}."}}, "teacher.hint", ("teacher", "here")),
        ({"prompts": {"memory": True}}, "prompts.memory", ("random",)),
        ({"algorithm": "dapo"}, "train.mask_truncated_completions", ("algorithm: dapo sets it", "soft_overlong")),
        ({"algorithm": "maxrl"}, "train.advantage_estimator", ("maxrl", "group")),
        ({"train": {"loss_type": "bnpo"}}, "train.loss_type", ("bnpo", "micro-batch")),
        ({"train": {"lr_scheduler_type": "linear"}}, "train.lr_scheduler_type", ("linear", "megatron")),
        ({"train": {"beta": 0.01}}, "train.use_bias_correction_kl", ("ratio", "false")),
        ({"train": {"scale_rewards": "batch"}}, "train.scale_rewards", ("group or none",)),
        ({"train": {"max_grad_norm": 0.0}}, "train.max_grad_norm", ("1e9",)),
        ({"train": {"save_steps": 3, "num_iterations": 2}}, "train.save_steps", ("multiple of 2",)),
        ({"train": {"vllm_tensor_parallel_size": 2}}, "train.vllm_tensor_parallel_size", ("1 GPUs",)),
        ({"model": {"name": "sandbox:base", "dtype": "float16"}}, "model.dtype", ("bfloat16",)),
        ({"rollout": {"min_p": 0.1, "max_completion_length": 32}}, "rollout.min_p", ("min_p", "top_p")),
        ({"alarms": {"stop": ["rewards_flat"]}}, "alarms.stop", ("watches",)),
        ({"train": {"report_to": ["comet_ml"]}}, "train.report_to", ("comet_ml", "wandb")),
    ],
)
def test_what_verl_cannot_do_is_refused_by_its_key(exported, sections, where, words):
    found = refused(exported, **sections)
    assert where in found
    assert "cannot go to verl" in found[where]
    assert [word for word in words if word not in found[where]] == []


@pytest.mark.parametrize("method", ["dora", "vera", "pissa"])
def test_a_method_is_refused_once_by_its_name(exported, method):
    assert list(refused(exported, peft={"method": method})) == ["peft.method"]


def test_all_that_is_refused_is_said_at_once(exported):
    found = refused(exported, peft={"method": "pissa", "dropout": 0.1}, train={"optim": "sgd", "loss_type": "vespo"})
    assert {"peft.method", "peft.dropout", "train.optim", "train.loss_type"} <= set(found)


def test_batches_and_steps_are_counted_in_batches_of_rollouts(exported):
    train = {"prompts_per_step": 4, "num_generations": 8, "gradient_accumulation_steps": 4, "steps_per_generation": 8}
    train |= {"num_iterations": 2, "max_steps": 40, "save_steps": 8, "lr_scheduler_type": "constant_with_warmup"}
    values = values_of(exported, train={**train, "warmup_steps": 4})
    # 4 optimizer steps a batch of rollouts: two mini-batches of 4 prompts, seen twice
    assert values["data.train_batch_size"] == pytest.approx(8)
    assert values[f"{ACTOR}.ppo_mini_batch_size"] == pytest.approx(4)
    assert values[f"{ACTOR}.ppo_epochs"] == pytest.approx(2)
    assert values[f"{ROLLOUT}.n"] == pytest.approx(8)
    assert values["trainer.total_training_steps"] == pytest.approx(10)
    assert values["trainer.save_freq"] == pytest.approx(2)
    assert values[f"{ACTOR}.optim.lr_warmup_steps"] == pytest.approx(1)


@pytest.mark.parametrize(("waits", "twice", "first"), [(0, 1, 0), (3, 1, 4), (4, 2, 3), (2, 1, 3), (0, 2, 0)])
def test_the_policy_waits_for_the_critic_as_long_as_here(exported, waits, twice, first):
    """verl's policy trains where critic_warmup <= the number of the batch, which begins at 1."""
    told_so = with_train(of_algorithm("ppo"), critic_warmup_steps=waits, num_iterations=twice)
    value = told(exported, told_so).values["trainer.critic_warmup"]
    assert value == pytest.approx(first)
    assert sum(twice for batch in range(1, 9) if batch < value) == pytest.approx(waits)
    with pytest.raises(RecipeError, match="multiple of 2"):
        told(exported, with_train(of_algorithm("ppo"), critic_warmup_steps=3, num_iterations=2))


@pytest.mark.parametrize(("share", "steps"), [(0.25, 3), (0.05, 1), (0.5, 5), (4, 4)])
def test_a_share_of_the_steps_is_rounded_up_as_transformers_does(exported, share, steps):
    train = {"max_steps": 10, "save_strategy": "steps", "save_steps": share, "eval_strategy": "steps"}
    values = values_of(exported, train={**train, "eval_steps": share})
    state = transformers.TrainerState(max_steps=10)
    asked = SimpleNamespace(logging_steps=1, eval_steps=share, save_steps=share)
    state.compute_steps(asked, 10)
    assert (state.save_steps, state.eval_steps) == pytest.approx((steps, steps))
    assert (values["trainer.save_freq"], values["trainer.test_freq"]) == pytest.approx((steps, steps))


def test_a_share_of_warmup_and_a_least_rate_are_transformers_numbers(exported):
    train = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    values = values_of(exported, train={**train, "warmup_steps": 0.25, "learning_rate": 3e-5, "max_steps": 10})
    assert values[f"{ACTOR}.optim.lr_warmup_steps"] == pytest.approx(3)  # 2.5, rounded up
    assert values[f"{ACTOR}.optim.min_lr_ratio"] == pytest.approx(0.1)
    assert values[f"{ACTOR}.optim.lr"] == pytest.approx(3e-5)


@pytest.mark.parametrize(
    ("name", "mode", "mean", "bounds", "estimator"),
    [
        ("grpo", "vanilla", "seq-mean-token-mean", (0.2, 0.2), "grpo"),
        ("dapo", "vanilla", "token-mean", (0.2, 0.28), "grpo"),
        ("dr_grpo", "vanilla", "seq-mean-token-sum-norm", (0.2, 0.2), "grpo"),
        ("rloo", "gpg", "token-mean", (0.2, 0.2), "rloo"),
        ("reinforce_pp", "vanilla", "token-mean", (0.2, 0.2), "reinforce_plus_plus"),
        ("gspo", "gspo", "seq-mean-token-mean", (3e-4, 4e-4), "grpo"),
        ("cispo", "cispo", "token-mean", (1.0, 4.0), "grpo"),
        ("ppo", "vanilla", "token-mean", (0.2, 0.2), "gae"),
    ],
)
def test_an_algorithms_name_is_verls_loss_bounds_and_advantage(exported, name, mode, mean, bounds, estimator):
    values = told(exported, of_algorithm(name)).values
    assert values[f"{ACTOR}.policy_loss.loss_mode"] == mode
    assert values[f"{ACTOR}.loss_agg_mode"] == mean
    assert values["algorithm.adv_estimator"] == estimator
    found = [values[f"{ACTOR}.clip_ratio_low"], values[f"{ACTOR}.clip_ratio_high"]]
    assert found == pytest.approx(bounds)
    assert values[f"{ACTOR}.clip_ratio_c"] > 1e8  # verl's dual clip of 3 is on unless it is told otherwise
    assert values["algorithm.norm_adv_by_std_in_grpo"] is (name != "dr_grpo")
    if name == "dr_grpo":
        assert values[f"{ACTOR}.loss_scale_factor"] == pytest.approx(32)


def test_a_divergence_is_in_the_loss_or_in_the_reward(exported):
    grpo = told(exported, of_algorithm("grpo")).values
    assert (grpo[f"{ACTOR}.use_kl_loss"], grpo["algorithm.use_kl_in_reward"]) == (True, False)
    assert grpo[f"{ACTOR}.kl_loss_coef"] == pytest.approx(0.04)
    assert grpo[f"{ACTOR}.kl_loss_type"] == "low_var_kl"
    rloo = told(exported, of_algorithm("rloo")).values
    assert (rloo[f"{ACTOR}.use_kl_loss"], rloo["algorithm.use_kl_in_reward"]) == (False, True)
    assert rloo["algorithm.kl_ctrl.kl_coef"] == pytest.approx(0.03)
    assert rloo["algorithm.kl_penalty"] == "kl"


def test_the_correction_for_the_engine_has_the_recipes_bounds(exported):
    place = "algorithm.rollout_correction"
    assert values_of(exported)[f"{place}.rollout_is_threshold"] == pytest.approx(3.0)
    masked = values_of(exported, algorithm="icepop")
    low, high = map(float, masked[f"{place}.rollout_is_threshold"].split("_"))
    assert (low, high) == pytest.approx((0.5, 5.0))
    assert values_of(exported, train={"vllm_importance_sampling_correction": False})[f"{place}.rollout_is"] is None


def test_soft_overlong_is_verls_own(exported):
    rewards = {"accuracy": 1.0, "soft_overlong": {"weight": 0.5, "args": {"soft_punish_cache": 8}}}
    values = values_of(exported, rewards=rewards)
    buffer = values["+reward.reward_kwargs.overlong_buffer_cfg"]
    assert values["reward.reward_manager.name"] == "dapo"
    assert [buffer["len"], buffer["penalty_factor"]] == pytest.approx([8, 0.5])
    assert values["+reward.reward_kwargs.max_resp_len"] == pytest.approx(32)


@pytest.mark.parametrize("strategy", ENGINES)
def test_a_strategy_has_its_own_keys_and_numbers(exported, strategy):
    values = told(exported, of_algorithm("grpo", strategy)).values
    megatron = strategy == "megatron"
    rank = values["actor_rollout_ref.model.lora.rank" if megatron else "actor_rollout_ref.model.lora_rank"]
    alpha = values["actor_rollout_ref.model.lora.alpha" if megatron else "actor_rollout_ref.model.lora_alpha"]
    assert (rank, alpha) == pytest.approx((16, 32))
    gpus = values["trainer.nnodes"] * values["trainer.n_gpus_per_node"]
    assert gpus == pytest.approx({"fsdp": 4, "fsdp2": 4, "megatron": 16}[strategy])
    assert (f"{ROLLOUT}.layered_summon" in values) is not megatron
    assert values[f"{ROLLOUT}.load_format"] == "safetensors"
    if megatron:
        assert len(values["actor_rollout_ref.model.lora.target_modules"]) == pytest.approx(7)
        assert values["model_engine"] == "megatron"


def test_megatron_takes_names_of_layers_that_it_has_and_a_linear_rate(exported):
    engine = {"name": "verl", "strategy": "megatron", "gpus": 2}
    targets = ["q_proj", "down_proj"]
    export = replace(exported, job=replace(exported.job, adapter=peft.LoraConfig(r=4, target_modules=targets)))
    values = told(export, recipe(engine=engine, train={"lr_scheduler_type": "linear", "learning_rate": 1e-4})).values
    assert values["actor_rollout_ref.model.lora.target_modules"] == ["linear_fc2", "linear_q"]
    assert values[f"{ACTOR}.optim.lr_decay_style"] == "linear"
    assert values[f"{ACTOR}.optim.lr"] == pytest.approx(1e-4)
    other = replace(exported, job=replace(exported.job, adapter=peft.LoraConfig(r=4, target_modules=["c_attn"])))
    with pytest.raises(RecipeError, match="c_attn"):
        told(other, recipe(engine=engine))


def test_further_overrides_are_not_of_what_the_recipe_says(exported):
    engine = {"name": "verl", "overrides": {f"{ROLLOUT}.max_num_seqs": 64}}
    assert values_of(exported, engine=engine)[f"{ROLLOUT}.max_num_seqs"] == pytest.approx(64)
    for key, words in ((f"{ACTOR}.optim.lr", "say it in the recipe"), ("trainer.v1.trainer_mode", "verl#7495")):
        with pytest.raises(RecipeError, match=words):
            told(exported, recipe(engine={"name": "verl", "overrides": {key: 1}}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{ACTOR}.optim", {"lr": 1e-3}),
        ("actor_rollout_ref", {"actor": {"clip_ratio": 0.5}}),
        (f"~{ROLLOUT}", None),
        ("model_engine", "megatron"),
        (f"actor@{ACTOR}", "megatron_actor"),
        ("trainer.v1", {"trainer_mode": "separate_async"}),
    ],
)
def test_a_key_above_what_the_recipe_says_is_refused_too(exported, key, value):
    found = refused(exported, engine={"name": "verl", "overrides": {key: value}})
    assert list(found) == ["engine.overrides"]
    beside = values_of(exported, engine={"name": "verl", "overrides": {f"+{ROLLOUT}.engine_kwargs.vllm.seed": 3}})
    assert beside[f"+{ROLLOUT}.engine_kwargs.vllm.seed"] == pytest.approx(3)


def test_settings_of_verl_are_refused_where_it_does_not_train(caplog):
    for engine, words in (
        ({"gpus": 4}, "engine.name: verl, not of local"),
        ({"strategy": "megatron"}, "ddp, zero2, fsdp2"),
        ({"name": "verl", "strategy": "zero2"}, "fsdp2, fsdp, megatron"),
        ({"name": "verl", "processes": 2}, "engine.gpus"),
        ({"name": "verl", "gpus": 3, "strategy": "megatron", "parallel": {"tensor": 2}}, "no multiple"),
        ({"name": "verl", "gpus": 2, "parallel": {"tensor": 2}}, "strategy: megatron"),
    ):
        with pytest.raises(RecipeError, match=words):
            Recipe.load({"engine": engine})
    assert "gpus" not in Recipe.load({}).as_dict()["engine"]
    sixteen = Recipe.load({"engine": {"name": "verl", "nodes": 2, "gpus": 8}})
    assert sixteen.engine.gpus_in_all == pytest.approx(16)
    assert Recipe.load(sixteen.as_dict()).engine == sixteen.engine
    with caplog.at_level(logging.WARNING, logger="perl"):
        here = {"processes": 4, "threads": 2, "strategy": "zero2"}
        assert read_for_verl({"engine": here}).engine.gpus == pytest.approx(4)
    assert [record.code for record in caplog.records] == ["PRL347"] * 2
    assert [word for word in ("engine.threads: 2", "engine.strategy: zero2") if word not in caplog.text] == []


def test_perl_train_says_how_such_a_recipe_is_trained():
    with pytest.raises(RecipeError, match="perl export-verl") as caught:
        read_recipe({"engine": {"name": "verl", "gpus": 4}})
    assert caught.value.exit_code == 2
    assert caught.value.mistakes[0].where.endswith("engine.name")


def test_values_are_quoted_as_hydra_reads_them():
    assert override("a", None) == "a=null"
    assert override("a", 1e-05) == "a=1e-05"
    assert override("a", [1, True, "x-y"]) == "a=[1,true,x-y]"
    assert override("a", "off") == "a='off'"
    assert override("a", "it's") == "a='it\\'s'"
    assert override("+a", {"b": "c d"}) == "+a={b:'c d'}"
    with pytest.raises(RecipeError, match="several lines"):
        override("a", "one\ntwo")


def test_keys_without_meaning_there_are_said(exported):
    made = told(exported, with_train(recipe(), logging_steps=5, fused_lora=False))
    said = "\n".join(made.notes)
    assert "train.logging_steps: nothing reads it there" in said
    assert "train.fused_lora: nothing reads it there" in said


def test_a_critic_is_said_to_be_another_one(exported):
    made = told(exported, of_algorithm("ppo"))
    assert made.values["critic.model.lora_rank"] == pytest.approx(0)
    assert made.values["critic.cliprange_value"] == pytest.approx(0.2)
    assert (made.values["algorithm.gamma"], made.values["algorithm.lam"]) == pytest.approx((1.0, 0.95))
    assert "critic: a whole model" in "\n".join(made.notes)


def test_all_of_the_named_algorithms_go(exported):
    lengths = [len(told(exported, of_algorithm(name)).lines) for name in ALGORITHMS]
    assert min(lengths) > 80
    assert lengths == pytest.approx([len(set(told(exported, of_algorithm(name)).values)) for name in ALGORITHMS])


@pytest.mark.parametrize(
    ("name", "gpus", "split", "prompts", "steps"),
    [
        ("0.5b", 1, 1, 116, 64),
        ("7b", 1, 1, 16, 467),
        ("32b", 4, 4, 180, 41),
        ("72b", 8, 8, 64, 116),
        ("7b-megatron", 8, 2, 128, 58),
    ],
)
def test_the_packaged_recipes_go_with_verls_own_sizes(name, gpus, split, prompts, steps, tmp_path):
    for part in ("train", "eval"):
        rows = [{"question": f"{i}+{i + (part == 'eval')}=", "answer": f"#### {2 * i}"} for i in range(prompts + 8)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = [
        f"data.{part}={{name: {tmp_path / part}.jsonl, columns: {{prompt: question, answer: answer}}}}"
        for part in ("train", "eval")
    ]
    smaller = ["model.name=sandbox:base", "model.dtype=auto", "rollout.max_completion_length=256"]
    given = read_for_verl(f"to-verl/{name}", [*smaller, *data])
    values = prepare_export(given).made.values
    found = [values["trainer.n_gpus_per_node"], values[f"{ROLLOUT}.tensor_model_parallel_size"]]
    assert found == pytest.approx([gpus, split])
    found = [values["data.train_batch_size"], values["trainer.total_training_steps"]]
    assert found == pytest.approx([prompts, steps])
    assert values[f"{ACTOR}.kl_loss_coef"] == pytest.approx(0.001)
