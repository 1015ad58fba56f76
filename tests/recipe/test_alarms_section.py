"""A recipe's section ``alarms``: what may stand in it, what a saved recipe holds, and that a run may go on anyway."""

import pytest

from perl.errors import RecipeError
from perl.recipe import load_recipe
from perl.run.folder import differences


def test_names_are_checked_and_the_nearest_is_said():
    assert load_recipe({"alarms": {"stop": ["kl_explosion"]}}).alarms.stop == ["kl_explosion"]
    assert load_recipe({}, ["alarms.stop=[rewards_flat, gradient_zero]"]).alarms.acts
    with pytest.raises(RecipeError) as caught:
        load_recipe({"alarms": {"stop": ["kl_explosoin"]}})
    (line,) = str(caught.value).splitlines()
    assert line.startswith("alarms.stop[0]: must be one of samples_masked, ")
    assert line.endswith(", not 'kl_explosoin' (did you mean kl_explosion?)")
    with pytest.raises(RecipeError, match=r"^alarms.stop: must be a list, not 'kl_explosion'$"):
        load_recipe({"alarms": {"stop": "kl_explosion"}})
    with pytest.raises(RecipeError, match=r"^alarms.stpo: unknown key \(did you mean stop\?\)$"):
        load_recipe({"alarms": {"stpo": []}})


def test_a_recipe_that_stops_for_nothing_is_saved_as_before_and_another_is_loaded_again():
    assert "alarms" not in load_recipe({}).as_dict()
    recipe = load_recipe({"alarms": {"stop": ["rewards_flat"]}})
    assert recipe.as_dict()["alarms"] == {"stop": ["rewards_flat"]}
    assert load_recipe(recipe.as_dict()) == recipe
    assert load_recipe(recipe, ["alarms.stop=[]"]).alarms.stop == []


def test_a_run_may_go_on_with_other_alarms():
    plain, stops = (load_recipe({}, [f"alarms.stop={names}"]).as_dict() for names in ("[]", "[learning_rate]"))
    assert differences(plain, stops) == differences(stops, plain) == []
    assert differences(plain, {**stops, "train": {"beta": 0.5}})
