"""Settings of a critic that cannot be, and one completion of a prompt where nothing is left of the advantage."""

import pytest

from perl import PeftRLConfig
from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.train_fields import defaults_of
from perl.errors import RecipeError
from perl.recipe import load_recipe
from perl.training.prepare import prepare, read_recipe

OTHERS = {
    "gae_gamma": 0.99,
    "gae_lambda": 1.0,
    "value_clip": None,
    "critic_learning_rate": 1e-3,
    "critic_rank": 8,
    "critic_warmup_steps": 3,
    "critic_adapter": "runs/other/critic",
}


def refused(**given) -> str:
    with pytest.raises(RecipeError) as caught:
        PeftRLConfig("run", use_cpu=True, **given)
    assert len(caught.value.mistakes) == 1
    return str(caught.value)


def test_every_setting_of_a_critic_is_tried():
    assert OTHERS.keys() == defaults_of("critic").keys()


@pytest.mark.parametrize("name", OTHERS)
def test_a_setting_of_a_critic_without_one_is_refused_and_with_one_taken(name):
    line = refused(algorithm="grpo", **{name: OTHERS[name]})
    assert line.startswith(f"{name}: belongs to a critic")
    assert "algorithm: ppo" in line
    assert getattr(PeftRLConfig("run", use_cpu=True, algorithm="ppo", **{name: OTHERS[name]}), name) == OTHERS[name]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gae_gamma": 1.01}, ("gae_gamma", "less than or equal to 1", "1.01")),
        ({"gae_lambda": float("nan")}, ("gae_lambda", "finite", "nan")),
        ({"value_clip": 0.0}, ("value_clip", "greater than 0")),
        ({"critic_rank": 0}, ("critic_rank", "greater than or equal to 1")),
        ({"critic_warmup_steps": 5, "max_steps": 5}, ("critic_warmup_steps", "fewer than 5")),
        ({"peft_method": "full"}, ("peft_method", "frozen base")),
        ({"fp16": True}, ("fp16", "bf16")),
        ({"compile_layers": True}, ("compile_layers", "hooks")),
        ({"entropy_coef": 0.1}, ("advantage_estimator", "entropy_coef")),
        ({"advantage_estimator": "group"}, ("advantage_estimator", "leaves nothing of ppo")),
        ({"multi_objective_aggregation": "normalize_then_sum"}, ("multi_objective_aggregation", "gae")),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_line_with_its_key(given, words):
    if "entropy_coef" in given:  # what TRL's step adds is looked at by the trainer
        from perl.trainer.arguments.argument_checks import check_arguments

        with pytest.raises(RecipeError) as caught:
            check_arguments(PeftRLConfig("run", use_cpu=True, algorithm="ppo", **given), own_loss=False)
        line = str(caught.value)
    else:
        line = refused(algorithm="ppo", **given)
    assert line.startswith(f"{words[0]}: ")
    assert all(word in line for word in words)
    assert "\n" not in line


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("rows", [3, 4])
def test_one_completion_of_a_prompt_is_for_estimators_that_compare_no_group(name, rows):
    given = {"num_generations": 1, "advantage_estimator": name, "per_device_train_batch_size": rows}
    if not ADVANTAGES[name].alone:
        line = refused(**given)
        assert line.startswith("num_generations: must be greater than or equal to 2, not 1")
        assert name in line
        assert all(row.name in line for row in ADVANTAGES.values() if row.alone)
        with pytest.raises(RecipeError, match=r"^train.num_generations: must be greater"):
            load_recipe({"train": {"num_generations": 1, "advantage_estimator": name}})
        return
    found = PeftRLConfig("run", use_cpu=True, **given)
    assert (found.num_generations, found.num_generations_eval, found.generation_batch_size) == (1, None, rows)
    again = PeftRLConfig("run", use_cpu=True, **given, eval_strategy="steps", eval_steps=1, num_generations_eval=2)
    assert (again.num_generations, again.num_generations_eval) == (1, 2)
    recipe = load_recipe({"train": {"num_generations": 1, "advantage_estimator": name, "prompts_per_step": 6}})
    assert (recipe.batch.num_generations, recipe.batch.completions_per_step) == (1, 6)


def test_a_recipes_numbers_are_refused_with_their_line():
    with pytest.raises(RecipeError, match=r"train.gae_lambda: must be less than or equal to 1, not 1.5"):
        load_recipe({"algorithm": "ppo", "train": {"gae_lambda": 1.5}})
    with pytest.raises(RecipeError, match=r"^[^\n]*peft.method: [^\n]*frozen base[^\n]*$"):
        prepare(read_recipe({"algorithm": "ppo", "model": {"name": "sandbox:base"}, "peft": {"method": "full"}}))
