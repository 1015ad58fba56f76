"""Recipes in which no reward counts: nothing teaches, or a teacher does and settings of advantages act on nothing."""

import pytest
import torch

from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.registry import function_at
from perl.errors import RecipeError
from perl.recipe import Recipe, load_recipe
from perl.recipe.plain_yaml import dump

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


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_one_completion_is_enough_for_every_estimator_that_makes_0_of_no_reward_and_the_others_say_so(estimator):
    row, given = ADVANTAGES[estimator], {"advantage_estimator": estimator, **ONE["train"]}
    alone = {"teacher": {"hint": "h"}, "rewards": {}, "train": given}
    if row.critic:
        return
    if row.compares:
        assert "compares a prompt's completions" in refused(alone)
        return
    load_recipe(alone)
    rewards_PG = torch.zeros(3, 1)
    facts = {"scale": "group", "lengths_PG": torch.full((3, 1), 7.0), "greedy_PG": torch.zeros(3, 1)}
    assert function_at(row.function)(rewards_PG, **{name: facts[name] for name in row.reads}).tolist() == [[0.0]] * 3
    penalised = {"beta": 0.1, "kl_in_reward": True, "kl_estimator": "k1"}
    if row.penalty and not row.alone:  # then there is something to compare
        assert "compares a prompt's completions" in refused({**alone, "train": {**given, **penalised}})


def test_an_algorithm_of_rewards_is_nothing_where_none_counts():
    for name in ("gspo", "maxrl", "remax"):
        line = refused({"algorithm": name, "teacher": {"hint": "h"}, "rewards": {"accuracy": 0.0}})
        assert line.startswith(f"algorithm: {name} makes advantages of rewards, and none counts")
        load_recipe({"algorithm": name, "teacher": {"hint": "h"}})
    load_recipe({"algorithm": "rloo", "teacher": {"hint": "h"}, "rewards": {}})  # whose KL penalty makes advantages


def test_a_run_that_was_started_by_other_rules_can_still_be_read(tmp_path):
    for number, values in enumerate(
        (
            {"rewards": {"accuracy": 0.0}},
            {"algorithm": "rloo", "train": {"kl_estimator": "k3"}},
            {**TAUGHT, "train": {"epsilon": 0.3}},
        )
    ):
        path = tmp_path / f"{number}.yaml"
        path.write_text(dump(values))
        refused(path)
        assert Recipe.of_run(path).train == load_recipe(path, starts=False).train


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
