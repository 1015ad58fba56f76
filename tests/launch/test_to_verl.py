"""What of a recipe goes to verl, as what, and what is refused: no verl is needed for it."""

import json
import logging
import math
import os
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import peft
import pyarrow.parquet
import pytest
import torch
import transformers
from datasets import Dataset

from perl.errors import PerlError, RecipeError
from perl.launch.verl.can_go import GOES, MAPPED, REFUSED, STATED, all_keys, method_refusal, plain_alpha, refusals
from perl.launch.verl.check_job import check_lengths, overrides_of
from perl.launch.verl.hydra import override
from perl.launch.verl.reward_files import reward_files
from perl.launch.verl.rows import write_rows
from perl.methods.registry import METHODS
from perl.recipe import Recipe
from perl.rewards import check
from perl.rewards.one_by_one import scorer, settings_text
from perl.run.files import sha256_of
from perl.training.stages import read_recipe
from perl.training.to_verl import export_verl, prepare_export, read_for_verl
from tests.launch.verl_recipes import ALGORITHMS, ENGINES, of_algorithm, recipe, told, with_train

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def exported():
    return prepare_export(recipe())


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of rsLoRA, written."""
    folder = tmp_path_factory.mktemp("jobs") / "mine"
    given = recipe(peft={"method": "rslora", "rank": 16, "alpha": 6.0}, train={"seed": 11})
    return export_verl(given, folder, ["engine.gpus=4", "eval.limit=40"])


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


def test_a_job_has_all_that_it_needs_and_says_what_it_is(job):
    folder, export = job
    facts = json.loads((folder / "job.json").read_text())
    assert (facts["rank"], facts["alpha"], facts["verl_alpha"]) == pytest.approx((16, 6.0, 24.0))
    assert (facts["format"], facts["seed"], facts["steps"]) == pytest.approx((1, 11, 8))
    assert (facts["method"], facts["use_rslora"], facts["verl_version"]) == ("rslora", True, "0.9.1")
    assert {name: sha256_of(folder / name) for name in facts["files"]} == facts["files"]
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert written - set(facts["files"]) == {"job.json"}
    lines = (folder / "overrides.txt").read_text().splitlines()
    assert "actor_rollout_ref.model.lora_alpha=24" in lines
    assert len(lines) == len(export.made.values)
    assert Recipe.of_run(folder / "recipe.yaml").engine.gpus == pytest.approx(4)
    assert (folder / "run.sh").stat().st_mode & 0o111 == 0o111
    assert len(facts["base_fingerprint"]) == pytest.approx(64)


def test_rows_are_verls_and_their_prompts_the_recipes(job):
    folder, export = job
    rows = pyarrow.parquet.read_table(folder / "train.parquet").to_pylist()
    assert len(rows) == len(export.job.train)
    assert len(pyarrow.parquet.read_table(folder / "eval.parquet")) == pytest.approx(40)
    first = export.job.train[0]
    assert set(rows[0]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert rows[0]["reward_model"] == {"style": "rule", "ground_truth": first["solution"]}
    assert rows[0]["prompt"] == [{key: message[key] for key in ("role", "content")} for message in first["prompt"]]


def test_a_column_called_plain_is_the_data_sets(tmp_path):
    problems = Dataset.from_list([{"prompt": f"{i}+1=", "solution": "2", "plain": 0.5 + i} for i in range(3)])
    write_rows(problems, tmp_path / "rows.parquet", "mine", "train")
    extra = [row["extra_info"] for row in pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()]
    assert [one["plain"] for one in extra] == [True] * 3
    assert [json.loads(one["columns"])["plain"] for one in extra] == pytest.approx([0.5, 1.5, 2.5])


def test_every_row_is_measured_before_verl_cuts_one():
    class Words:
        def apply_chat_template(self, prompt, **_):
            return {"input_ids": prompt[0]["content"].split()}

    prompts = [[{"role": "user", "content": "a " * length}] for length in (3, 5, 9, 7, 2)]
    data = SimpleNamespace(max_prompt_length=9, apply_chat_template_kwargs={})
    check_lengths(prompts, Words(), data, Path("train.parquet"))
    data.max_prompt_length = 6
    with pytest.raises(RecipeError) as caught:
        check_lengths(prompts, Words(), data, Path("train.parquet"))
    numbers = [int(word) for word in str(caught.value).replace("=", " ").replace(":", " ").split() if word.isdigit()]
    assert numbers == pytest.approx([2, 6, 2])  # how many are longer than what, the first
    assert "max_prompt_length=9" in str(caught.value)


def test_run_sh_hands_verl_what_was_written_wherever_it_lies(job, tmp_path):
    """With a program in Python's place that writes down how it was called."""
    folder = Path(shutil.copytree(job[0], tmp_path / "R&D jobs &"))
    seen, python = tmp_path / "seen", tmp_path / "python"
    python.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > "{seen}.$(date +%s%N)"\n')
    python.chmod(0o755)
    further = ["trainer.nnodes=2", "+a={b: c d}"]
    for given in (further, further[:1]):
        subprocess.run([folder / "run.sh", *given], check=True, env={**os.environ, "PYTHON": str(python)})
    calls = [file.read_text().splitlines() for file in sorted(tmp_path.glob("seen.*"))]
    assert calls[0] == ["-m", "perl.launch.verl.check_job", str(folder), *further]
    assert calls[1] == ["-m", "verl.trainer.main_ppo", *overrides_of(folder, further)]
    assert [len(one) for one in calls] == pytest.approx(
        [5, len(job[1].made.values) + 4, 4, len(job[1].made.values) + 3]
    )
    kept = (folder / "further_overrides.txt").read_text().splitlines()
    assert kept == [*further, *further[:1]]


def test_a_jobs_rewards_judge_as_ours_do(job):
    folder, _ = job
    score = scorer(folder)
    rows = pyarrow.parquet.read_table(folder / "train.parquet").slice(0, 12).to_pylist()
    written = ["so it is \\boxed{%s}", "it is %s0", "no idea", "\\boxed{%s.0}"]
    texts = [
        (row, form % row["reward_model"]["ground_truth"] if "%" in form else form) for row in rows for form in written
    ]
    theirs = [score(text, row["reward_model"]["ground_truth"], row["extra_info"])["score"] for row, text in texts]
    ours = [float(check(row["reward_model"]["ground_truth"], text).right) for row, text in texts]
    assert theirs == pytest.approx(ours)
    assert 0 < sum(ours) < len(ours)


def test_a_users_reward_goes_along_with_what_it_imports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "carried_words.py").write_text("WORDS = {'yes': 1.0}\n")
    (tmp_path / "carried_reward.py").write_text(
        "import json\nfrom carried_words import WORDS\n\n\n"
        "async def polite(completions, level=0, *, bonus=0.0, **_):\n"
        "    return [WORDS.get(one[0]['content'], 0.25) + bonus for one in completions]\n\n\n"
        "def counts(completions, completion_ids, **_):\n    return [len(ids) for ids in completion_ids]\n"
    )
    given = recipe(rewards={"carried_reward:polite": {"weight": 2.0, "args": {"bonus": 0.5}}, "accuracy": 1.0})
    folder, _ = export_verl(given, tmp_path / "job")
    carried = {path.name for path in (folder / "reward_files").iterdir()}
    assert carried == {"carried_reward.py", "carried_words.py"}
    answer = scorer(folder)("yes", "7", {"columns": json.dumps({"solution": "7"})})
    assert answer["score"] == pytest.approx(2.0 * 1.5)
    parts = [answer[name] for name in ("reward/polite", "reward/accuracy", "unjudged")]
    assert parts == pytest.approx([1.5, 0.0, 0.0])
    # In verl's workers the job's own copy counts, whatever has become of the file where they start.
    for name in ("carried_words", "carried_reward"):
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(tmp_path)])
    theirs = runpy.run_path(str(folder / "rewards.py"))["compute_score"]
    again = theirs("it", "yes", "7", {"columns": json.dumps({"solution": "7"})})
    assert again == pytest.approx(answer)
    with pytest.raises(RecipeError, match="completion_ids"):
        prepare_export(recipe(rewards={"carried_reward:counts": 1.0}))


def test_rewards_may_be_called_as_verls_own_numbers_are(tmp_path, monkeypatch):
    module = ModuleType("named_as_verls")
    for name, value in (("score", 0.5), ("unjudged", 3.0), ("reward", 0.25), ("acc", -1.0)):
        setattr(module, name, lambda completions, value=value, **_: [value for _ in completions])
        getattr(module, name).__name__ = name
    monkeypatch.setitem(sys.modules, module.__name__, module)
    weights = {"score": 0.2, "unjudged": 1.0, "reward": 2.0, "acc": 1.0}
    given = recipe(rewards={f"named_as_verls:{name}": {"weight": weight} for name, weight in weights.items()})
    (tmp_path / "rewards.json").write_text(settings_text(given.rewards, 32, {}))
    found = scorer(tmp_path)("text", "", {"plain": True, "columns": json.dumps({"plain": "yes"})})
    assert found["score"] == pytest.approx(0.1 + 3.0 + 0.5 - 1.0)
    assert (found["unjudged"], found["reward/score"], found["reward/acc"]) == pytest.approx((0.0, 0.5, -1.0))
    assert set(found) & {"reward", "acc", "overlong"} == set()


def test_what_a_reward_is_of_goes_or_is_installed_or_is_refused(tmp_path, monkeypatch):
    site = tmp_path / "dist-packages"
    for place in (tmp_path / "spaced" / "deep", site / "distributed"):
        place.mkdir(parents=True)
        (place / "scored.py").write_text("def one(completions, **_):\n    return [1.0 for _ in completions]\n")
    (tmp_path / "linked.py").symlink_to(site / "distributed" / "scored.py")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(site), *sys.path])
    kinds = ("spaced.deep.scored", "distributed.scored", "linked", "json")
    for name in kinds:
        __import__(name)
    found = reward_files([f"{name}:one" for name in kinds])
    assert {path: file.stat().st_size for path, file in found.items()} == pytest.approx({"spaced/deep/scored.py": 65})
    monkeypatch.setitem(sys.modules, "nowhere", ModuleType("nowhere"))
    with pytest.raises(RecipeError, match=r"rewards\.nowhere:one.*\.py file"):
        reward_files(["nowhere:one"])


def test_rewards_that_see_a_group_or_tokens_are_refused():
    for name, words in (("length_penalty", "group"), ("cosine_length", "tokens"), ("repetition_penalty", "tokens")):
        with pytest.raises(PerlError, match=words):
            prepare_export(recipe(rewards={"accuracy": 1.0, name: 0.1}))


def test_a_folder_that_is_there_is_not_written_to(job, tmp_path):
    folder, _ = job
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(PerlError, match="exists already"):
        export_verl(recipe(), folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    with pytest.raises(PerlError):
        export_verl(recipe(peft={"method": "dora"}), tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


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
