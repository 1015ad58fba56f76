"""Every recipe that is shipped says what it is, can be read, and can be planned where its model is at hand."""

import pytest

from perl.assets import packaged_recipes, recipes_folder
from perl.sandbox import is_sandbox
from perl.training import prepare, read_recipe

RECIPES = packaged_recipes()
every_recipe = pytest.mark.parametrize("name", RECIPES)


def test_every_recipe_is_looked_at():
    assert "quickstart" in RECIPES
    assert len(RECIPES) == len([path for path in recipes_folder().rglob("*") if path.is_file()])


@every_recipe
def test_a_recipe_begins_with_a_sentence_that_says_what_it_is(name):
    first = RECIPES[name].read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert len(first.split()) >= 5
    assert first.endswith(".")


@every_recipe
def test_a_recipe_can_be_read_and_written_and_read_again(name, tmp_path):
    recipe = read_recipe(name)
    assert recipe.name == RECIPES[name].stem
    (tmp_path / "again.yaml").write_text(recipe.to_yaml())
    assert read_recipe(tmp_path / "again.yaml").as_dict() == recipe.as_dict()


@every_recipe
def test_a_recipe_of_the_sandbox_can_be_planned(name):
    recipe = read_recipe(name)
    if not is_sandbox(recipe.model.name):
        pytest.skip("its model is on the Hub")
    plan = prepare(recipe)
    assert plan.steps > 0
    assert 0 < plan.trainable_parameters < plan.total_parameters
    assert len(plan.problems.train) >= recipe.batch.completions_per_step // recipe.batch.num_generations
    assert plan.problems.heldout is not None
    assert plan.longest_prompt + recipe.rollout.max_completion_length <= 1024


def test_some_recipe_can_be_planned_without_a_network():
    assert [name for name in RECIPES if is_sandbox(read_recipe(name).model.name)]
