"""Recipes in which no reward counts: nothing teaches, or a teacher does and settings of advantages act on nothing."""

import pytest

from perl.errors import RecipeError
from perl.recipe import load_recipe

TAUGHT = {"algorithm": "opd", "teacher": {"hint": "h"}}
ONE = {"train": {"num_generations": 1, "prompts_per_step": 4}}


def refused(values, overrides=()):
    with pytest.raises(RecipeError) as caught:
        load_recipe(values, overrides)
    (line,) = str(caught.value).splitlines()
    return line


def test_rewards_that_all_weigh_nothing_need_a_teacher():
    line = refused({"rewards": {"accuracy": 0.0, "format": 0.0}})
    assert line.startswith("rewards.accuracy.weight: every reward has the weight 0, so nothing is taught")
    assert refused({}, ["rewards.accuracy=0"]).startswith("command line: rewards.accuracy")
    load_recipe({"rewards": {"accuracy": 0.0, "format": -0.5}})
    load_recipe({"rewards": {"accuracy": 0.0}, "teacher": {"hint": "h"}})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", 0.3),
        ("epsilon_high", 0.28),
        ("delta", 3.0),
        ("scale_rewards", "none"),
        ("advantage_estimator", "rloo"),
        ("multi_objective_aggregation", "normalize_then_sum"),
        ("importance_sampling_level", "sequence"),
    ],
)
def test_a_setting_of_advantages_acts_on_nothing_where_a_teacher_teaches_alone(field, value):
    line = refused({**TAUGHT, "train": {field: value}})
    assert line.startswith(f"train.{field}: {value:g}" if isinstance(value, float) else f"train.{field}: {value}")
    assert "changes nothing: the teacher alone teaches" in line
    assert refused({**TAUGHT, "rewards": {"accuracy": 0.0}, "train": {field: value}}) == line
    load_recipe({**TAUGHT, "rewards": {"accuracy": 1.0}, "train": {field: value}})
    load_recipe({"rewards": {}, "teacher": {"hint": "h"}, "train": {field: value}})  # without a name as in TRL


def test_settings_of_what_is_left_beside_a_teacher_are_taken():
    left = {"loss_type": "grpo", "beta": 0.1, "kl_estimator": "k2", "entropy_weight": 0.1}
    for train in (left, {"beta": 0.1, "importance_sampling_level": "sequence"}, {"epsilon": 0.2}):
        load_recipe({**TAUGHT, "train": train})
    alone = {"beta": 0.1, "importance_sampling_level": "sequence", "use_bias_correction_kl": False}
    assert refused({**TAUGHT, "train": alone}).startswith("train.importance_sampling_level: ")
    # What is taken off rewards makes advantages of nothing else.
    penalised = {"advantage_estimator": "rloo", "beta": 0.1, "kl_in_reward": True, "kl_estimator": "k1"}
    load_recipe({**TAUGHT, "train": penalised})


def test_one_completion_of_a_prompt_is_enough_where_none_are_compared():
    assert load_recipe({**TAUGHT, **ONE}).batch.completions_per_step == 4
    load_recipe({**TAUGHT, **ONE, "rewards": {"accuracy": 0.0}})
    load_recipe({"teacher": {"hint": "h"}, "rewards": {}, **ONE})
    assert "compares a prompt's completions" in refused({**TAUGHT, **ONE, "rewards": {"accuracy": 0.5}})


def test_a_critic_has_nothing_to_learn_without_a_reward():
    ppo = {"algorithm": "ppo", "teacher": {"hint": "h"}, "rewards": {}}
    assert "gae trains a critic, and without a reward" in refused(ppo)
    unnamed = {**TAUGHT, "algorithm": None, "rewards": {}, "train": {"advantage_estimator": "gae"}}
    assert "gae trains a critic, and without a reward" in refused(unnamed)
    load_recipe({**ppo, "rewards": {"accuracy": 1.0}})
    load_recipe({**ppo, "train": {"beta": 0.1, "kl_in_reward": True}})


def test_another_estimator_of_a_penalty_in_the_reward_changes_nothing():
    assert refused({"algorithm": "rloo", "train": {"kl_estimator": "k3"}}).startswith("train.kl_estimator: k3 changes")
    for train in ({"kl_estimator": "k1"}, {"kl_estimator": "k3", "kl_in_reward": False}):
        load_recipe({"algorithm": "rloo", "train": train})
    load_recipe({"algorithm": "ppo", "train": {"beta": 0.1, "kl_in_reward": True, "kl_estimator": "k1"}})


def test_a_text_that_yaml_takes_for_a_mapping_is_told_apart():
    assert "text that begins with a brace needs quotes" in refused({}, ["teacher.hint={prompt}"])
    assert load_recipe({}, ['teacher.hint="{prompt}!"']).teacher.hint == "{prompt}!"
