"""What of a recipe goes to verl, as what, and what is refused: no verl is needed for it."""

import logging
import re
from importlib import import_module

import pytest

import perl.verl.settings
from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.named import KEY
from perl.algorithms.registry import LOSSES
from perl.algorithms.train_fields import train_fields, words_of_fields
from perl.errors import RecipeError
from perl.methods.registry import METHODS
from perl.recipe import Recipe
from perl.recipe.places import REFUSED
from perl.recipe.sections import FIELD_OF_SETTING, SECTIONS, RewardSetting
from perl.training.on_verl import prepare_export, read_for_verl
from perl.training.prepare import read_recipe
from perl.verl.table import (
    CANNOT,
    METHODS_THAT_GO,
    TABLE,
    cells,
    further_overrides,
    named_keys,
    override,
    refusals,
)
from tests.conftest import CHECKOUT
from tests.verl.recipes import ALGORITHMS, of_algorithm, recipe, told, with_train

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CELLS = [cell for rows in TABLE["told"].values() for _, cell in cells(rows) if isinstance(cell, dict)]


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


def all_keys():
    """Every key that a recipe may hold; of data sets and rewards those of each one."""
    keys = [KEY, *(f"rewards.{name}" for name in RewardSetting.model_fields)]
    source = SECTIONS["data"].model_fields["train"].annotation.model_fields
    for section, model in SECTIONS.items():
        keys += [f"{section}.{name}" for name in model.model_fields if (section, name) not in TWO_SETS]
    keys += [f"data.{name}.{key}" for _, name in TWO_SETS for key in source]
    elsewhere = {*FIELD_OF_SETTING.values(), *REFUSED, KEY}
    return keys + [f"train.{name}" for name in train_fields() if name not in elsewhere]


TWO_SETS = (("data", "train"), ("data", "eval"))


def test_every_key_of_a_recipe_is_told_or_refused_or_said_to_mean_nothing():
    refused_keys = [key for row in CANNOT["keys"] for key in row["keys"]]
    named = [*refused_keys, *(key for key in named_keys() if not key.startswith("job."))]
    assert len(named) == len(set(named)) > 270
    ours = {f"train.{name}" for name, field in train_fields().items() if field.ours}
    assert set(all_keys()) - set(named) <= ours
    assert set(named) <= set(all_keys())


def test_a_setting_of_ours_that_the_table_does_not_know_is_refused(exported):
    lines = refused(exported, train={"cov_low": 0.5, "loss_type": "clip_cov"})
    assert "verl has no such setting (leave it out)" in lines["train.cov_low"]


def test_every_value_has_verls_word_or_a_reason_and_what_is_made_has_a_row(exported, monkeypatch):
    known = {"train.loss_type": LOSSES, "train.advantage_estimator": ADVANTAGES}
    known["train.kl_estimator"] = words_of_fields()["kl_estimator"]
    for cell in CELLS:
        if str(cell.get("from")) in known:
            reasons = [value for row in CANNOT["values"] if row["key"] == cell["from"] for value in row["values"]]
            assert sorted([*cell["as"], *reasons]) == sorted(known[cell["from"]])
    made, tell = {}, perl.verl.settings.told
    monkeypatch.setattr(
        perl.verl.settings, "told", lambda look, when, more: made.update(more) or tell(look, when, more)
    )
    for name in ALGORITHMS:
        told(exported, of_algorithm(name))
    values_of(exported, rewards={"accuracy": 1.0, "soft_overlong": {"args": {"soft_punish_cache": 8}}})
    assert made.keys() <= {key for rows in TABLE["told"].values() for key, _ in cells(rows)}


def test_every_method_goes_or_is_refused_once_with_the_nearest_one_that_goes(exported):
    for name in METHODS:
        mistakes = refusals(recipe(peft={"method": name}))
        assert [mistake.where for mistake in mistakes] == ([] if name in METHODS_THAT_GO else ["peft.method"])
        assert all(name in mistake.message and "lora" in mistake.hint for mistake in mistakes)
    assert list(refused(exported, peft={"method": "vera"})) == ["peft.method"]


@pytest.mark.parametrize(
    ("sections", "where", "words"),
    [
        ({"peft": {"kwargs": {"rank_pattern": {"q_proj": 4}}}}, "peft.kwargs.rank_pattern", ("no key",)),
        ({"teacher": {"hint": "The answer is {answer}."}}, "teacher.hint", ("teacher", "here")),
        ({"algorithm": "dapo"}, "train.mask_truncated_completions", ("algorithm: dapo sets it", "soft_overlong")),
        ({"peft": {"dropout": 0.1}, "train": {"optim": "sgd"}}, "train.optim", ("sgd", "adamw_torch")),
        ({"peft": {"dropout": 0.1}, "train": {"optim": "sgd"}}, "peft.dropout", ("0.1", "dropout")),
        ({"train": {"lr_scheduler_type": "linear"}}, "train.lr_scheduler_type", ("linear", "cosine_with_min_lr")),
        ({"train": {"beta": 0.01}}, "train.use_bias_correction_kl", ("ratio", "false")),
        ({"train": {"scale_rewards": "batch"}}, "train.scale_rewards", ("group or none",)),
        ({"train": {"max_grad_norm": 0.0}}, "train.max_grad_norm", ("1e9",)),
        ({"train": {"save_steps": 3, "num_iterations": 2}}, "train.save_steps", ("multiple of 2",)),
        ({"train": {"vllm_tensor_parallel_size": 2}}, "train.vllm_tensor_parallel_size", ("1 GPUs",)),
        ({"train": {"report_to": ["comet_ml"]}}, "train.report_to", ("comet_ml", "wandb")),
    ],
)
def test_what_verl_cannot_do_is_refused_by_its_key(exported, sections, where, words):
    found = refused(exported, **sections)
    assert "cannot go to verl" in found[where]
    assert [word for word in words if word not in found[where]] == []


def test_batches_and_steps_are_counted_in_batches_of_rollouts(exported):
    train = {"prompts_per_step": 4, "num_generations": 8, "gradient_accumulation_steps": 4, "steps_per_generation": 8}
    train |= {"num_iterations": 2, "max_steps": 40, "save_steps": 8, "lr_scheduler_type": "constant_with_warmup"}
    values = values_of(exported, train={**train, "warmup_steps": 4})
    # 4 optimizer steps a batch of rollouts: two mini-batches of 4 prompts, seen twice
    names = ["data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_epochs", f"{ROLLOUT}.n"]
    assert [values[name] for name in names] == pytest.approx([8, 4, 2, 8])
    names = ["trainer.total_training_steps", "trainer.save_freq", f"{ACTOR}.optim.lr_warmup_steps"]
    assert [values[name] for name in names] == pytest.approx([10, 2, 1])


def test_an_algorithms_name_is_verls_loss_bounds_and_advantage(exported):
    for name, mode, mean, bounds, estimator in (
        ("dapo", "vanilla", "token-mean", (0.2, 0.28), "grpo"),
        ("dr_grpo", "vanilla", "seq-mean-token-sum-norm", (0.2, 0.2), "grpo"),
        ("gspo", "gspo", "seq-mean-token-mean", (3e-4, 4e-4), "grpo"),
        ("cispo", "cispo", "token-mean", (1.0, 4.0), "grpo"),
        ("ppo", "vanilla", "token-mean", (0.2, 0.2), "gae"),
    ):
        made = told(exported, of_algorithm(name))
        values = made.values
        keys = (f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode", "algorithm.adv_estimator")
        assert [values[key] for key in keys] == [mode, mean, estimator]
        found = [values[f"{ACTOR}.clip_ratio_low"], values[f"{ACTOR}.clip_ratio_high"]]
        assert found == pytest.approx(bounds)
        assert values[f"{ACTOR}.clip_ratio_c"] > 1e8  # verl's dual clip of 3 is on unless it is told otherwise
        assert values["algorithm.norm_adv_by_std_in_grpo"] is (name != "dr_grpo")
        assert values.get(f"{ACTOR}.loss_scale_factor") == (32 if name == "dr_grpo" else None)
        assert len(made.lines) == len({line.partition("=")[0] for line in made.lines}) > 80
    assert (values["critic.model.lora_rank"], values["critic.cliprange_value"]) == pytest.approx((0, 0.2))
    assert (values["algorithm.gamma"], values["algorithm.lam"]) == pytest.approx((1.0, 0.95))
    assert "critic: a whole model" in "\n".join(made.notes)


def test_a_divergence_is_in_the_loss_or_in_the_reward_and_the_engine_is_corrected_for_within_bounds(exported):
    grpo, rloo = (told(exported, of_algorithm(name)).values for name in ("grpo", "rloo"))
    keys = (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")
    assert [[values[key] for key in keys] for values in (grpo, rloo)] == [[True, False], [False, True]]
    assert grpo[f"{ACTOR}.kl_loss_coef"] == pytest.approx(0.04)
    assert grpo[f"{ACTOR}.kl_loss_type"] == "low_var_kl"
    assert rloo["algorithm.kl_ctrl.kl_coef"] == pytest.approx(0.03)
    place = "algorithm.rollout_correction"
    assert values_of(exported)[f"{place}.rollout_is_threshold"] == pytest.approx(3.0)
    bounds = values_of(exported, algorithm="icepop")[f"{place}.rollout_is_threshold"]
    assert [float(bound) for bound in bounds.split("_")] == pytest.approx([0.5, 5.0])
    without = values_of(exported, train={"vllm_importance_sampling_correction": False})
    assert without[f"{place}.rollout_is"] is None
    assert f"{place}.rollout_is_threshold" not in without


LORA = "actor_rollout_ref.model.lora"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (f"{ACTOR}.optim.lr", 1, "say train.learning_rate"),
        ("actor_rollout_ref", {"actor": {"clip_ratio": 0.5}}, "say "),
        (f"actor@{ACTOR}", "megatron_actor", "say engine.strategy"),
        ("+actor_rollout_ref.model.exclude_modules", "lm_head", "say peft.kwargs"),  # that no key of this job tells
        (f"{ROLLOUT}.load_format", "dummy", "safetensors in every job: dummy"),
        (f"{ROLLOUT}.layered_summon", False, "true in every job"),
        ("trainer.v1", {"trainer_mode": "separate_async"}, "verl#7495"),
        ("model_engine", "megatron", "engine.strategy"),
        ("+critic.model.lora.rank", 8, "a LoRA as critic crashes"),
        (LORA, {"type": "dora"}, "say engine.merge"),
    ],
)
def test_further_overrides_are_not_of_what_the_recipe_says_or_verl_would_ignore(key, value, words):
    with pytest.raises(RecipeError, match=f"^engine.overrides: {re.escape(key)}.*{re.escape(words)}"):
        further_overrides(recipe(engine={"name": "verl", "overrides": {key: value}}))


def test_of_megatrons_lora_no_key_goes_and_a_hint_names_a_key_that_a_recipe_has():
    of_lora = [key for row in CANNOT["overrides"] for key in row["keys"] if key.startswith(f"{LORA}.")]
    assert len(of_lora) == len(set(of_lora)) > 12
    every = {key: 7 for key in (*of_lora, *(key for rows in TABLE["told"].values() for key, _ in cells(rows)))}
    with pytest.raises(RecipeError) as caught:
        further_overrides(recipe(engine={"name": "verl", "overrides": every}))
    assert len(caught.value.mistakes) == len(every)
    known = {name for section, model in SECTIONS.items() for name in (section, *model.model_fields)}
    for mistake in caught.value.mistakes:
        hinted = re.findall(r"\b([a-z]+)\.([a-z_]+)", mistake.hint)
        assert mistake.hint == "leave it out" or hinted, mistake
        assert all(section in known and (section == "train" or name in known) for section, name in hinted), mistake
    goes = {f"+{ROLLOUT}.engine_kwargs.vllm.seed": 3, f"+{LORA}.fully_sharded_loras": True}
    assert further_overrides(recipe(engine={"name": "verl", "overrides": goes})) == goes


def test_the_page_has_the_table_of_verls_guide(monkeypatch):
    monkeypatch.syspath_prepend(str(CHECKOUT / "docs"))
    assert f"\n{import_module('verl_keys').table()}\n" in (CHECKOUT / "docs" / "verl.md").read_text(encoding="utf-8")


def test_settings_of_verl_are_refused_where_it_does_not_train(caplog):
    for engine, words in (
        ({"gpus": 4}, "engine.name: verl, not of local"),
        ({"name": "verl", "strategy": "ddp"}, "fsdp2, fsdp"),
        ({"name": "verl", "strategy": "megatron"}, "engine.strategy.*Megatron-Bridge; fsdp2 or fsdp"),
        ({"name": "verl", "processes": 2}, "engine.gpus"),
        ({"name": "verl", "gpus": 3, "parallel": {"context": 2}}, "no multiple"),
    ):
        with pytest.raises(RecipeError, match=words):
            Recipe.load({"engine": engine})
    sixteen = Recipe.load({"engine": {"name": "verl", "nodes": 2, "gpus": 8}})
    assert Recipe.load(sixteen.as_dict()).engine == sixteen.engine
    with caplog.at_level(logging.WARNING, logger="perl"):
        here = {"processes": 4, "threads": 2, "shards": "all"}
        assert read_for_verl({"engine": here}).engine.gpus == pytest.approx(4)
    assert [record.code for record in caplog.records] == ["PRL347"]
    assert [word for word in ("engine.threads: 2", "engine.shards: all") if word not in caplog.text] == []
    with pytest.raises(RecipeError, match=r"engine\.name.*perl export-verl"):  # from who trains by themselves
        read_recipe({"engine": {"name": "verl", "gpus": 4}})


def test_values_are_quoted_as_hydra_reads_them_and_keys_that_mean_nothing_are_said(exported):
    assert override("a", None) == "a=null"
    assert override("a", 1e-05) == "a=1e-05"
    assert override("a", [1, True, "x-y"]) == "a=[1,true,x-y]"
    assert override("a", "off") == "a='off'"
    assert override("a", "it's") == "a='it\\'s'"
    assert override("+a", {"b": "c d"}) == "+a={b:'c d'}"
    with pytest.raises(RecipeError, match="several lines"):
        override("a", "one\ntwo")
    said = "\n".join(told(exported, with_train(recipe(), logging_steps=5, fused_lora=False)).notes)
    assert "train.logging_steps: nothing reads it there" in said
    assert "train.fused_lora: nothing reads it there" in said


def test_the_packaged_recipes_go_with_verls_own_sizes(exported):
    for name, *sizes in (
        ("0.5b", 1, 1, 116, 64),
        ("7b", 1, 1, 16, 467),
        ("32b", 4, 4, 180, 41),
        ("72b", 8, 8, 64, 116),
    ):
        values = told(exported, read_for_verl(f"to-verl/{name}", ["model.name=sandbox:base"])).values
        keys = ("trainer.n_gpus_per_node", f"{ROLLOUT}.tensor_model_parallel_size", "data.train_batch_size")
        assert [values[key] for key in (*keys, "trainer.total_training_steps")] == pytest.approx(sizes)
