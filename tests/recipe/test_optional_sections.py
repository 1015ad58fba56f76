"""A recipe's sections for a teacher and for alarms: what may stand in them, what they need, what is saved."""

import pytest

from perl.errors import RecipeError
from perl.recipe import load_recipe
from perl.recipe.plain_yaml import dump
from perl.recipe.recipe import DEFAULT_REWARDS
from perl.recipe.sections import TeacherSection
from perl.run.folder import differences


def lines_of(values, overrides=()):
    with pytest.raises(RecipeError) as caught:
        load_recipe(values, overrides)
    return str(caught.value).splitlines()


def test_a_teacher_stands_in_its_section_or_as_fields_of_train():
    in_section = load_recipe({"teacher": {"adapter": "some/run", "hint": "h", "weight": 0.5, "top_k": 3}})
    fields = {"teacher_adapter": "some/run", "teacher_hint": "h", "teacher_weight": 0.5, "teacher_top_k": 3}
    assert load_recipe({"train": fields}).teacher == in_section.teacher
    assert load_recipe({}, [f"teacher.{key}={value}" for key, value in in_section.teacher if value]) == in_section
    assert in_section.teacher.acts
    assert in_section.teacher.changes_prompts
    assert not TeacherSection().acts
    assert not TeacherSection(adapter="x").changes_prompts


def test_a_recipe_without_a_teacher_is_saved_as_before_and_one_with_it_is_loaded_again():
    assert "teacher" not in load_recipe({}).as_dict()
    for values in ({"teacher": {"hint": "h"}}, {"algorithm": "opd", "teacher": {"adapter": "a", "system_prompt": "s"}}):
        recipe = load_recipe(values)
        again = load_recipe(recipe.as_dict())
        assert again == recipe
        assert again.to_yaml() == recipe.to_yaml() == dump(recipe.as_dict())


def test_the_name_needs_no_rewards_and_any_other_teacher_may_go_without():
    assert load_recipe({"algorithm": "opd"}).rewards == {}
    assert load_recipe({"teacher": {"hint": "h"}}).rewards == DEFAULT_REWARDS
    named = {"algorithm": "opd", "rewards": {"format": 0.5}}
    assert list(load_recipe(named).rewards) == ["format"]
    assert load_recipe(named, ["rewards.format=null"]).rewards == {}
    assert load_recipe({"teacher": {"hint": "h"}, "rewards": {"accuracy": None}}).rewards == {}
    assert load_recipe({"teacher": {"hint": "h"}, "rewards": {}}).rewards == {}
    assert lines_of({"rewards": {}}) == ["rewards: no reward is left (rewards: {accuracy: 1.0})"]


def test_a_weight_without_a_teacher_and_impossible_values_are_one_line_each():
    assert lines_of({"teacher": {"weight": 2.0}}) == [
        "teacher.weight: needs a teacher: an adapter, a hint or a system_prompt"
    ]
    for key, value, word in (("weight", 0.0, "greater than 0"), ("top_k", -1, "greater"), ("adaptr", "x", "adapter?")):
        (line,) = lines_of({"teacher": {"hint": "h", key: value}})
        assert line.startswith(f"teacher.{key}: ")
        assert word in line
    (line,) = lines_of({"teacher": {"hint": "h"}, "train": {"teacher_hint": "other"}})
    assert "write it once, as teacher.hint" in line


def test_a_word_in_braces_that_is_meant_for_another_is_one_line():
    meant = {"{question}": "{prompt}", "it is {solution}": "{answer}", "{Answer}": "{answer}", "{promt}": "{prompt}"}
    for text, name in meant.items():
        for key in ("hint", "system_prompt"):
            (line,) = lines_of({"teacher": {key: text}})
            assert line.startswith(f"teacher.{key}: ")
            assert f"did you mean {name}?" in line
    (line,) = lines_of({"teacher": {"system_prompt": "Solve {prompt}"}})
    assert "teacher.hint" in line
    theirs = [r"\boxed{solution}", r"\frac{a}{question}", "x^{solution}"]
    theirs += ["{{question}}", "{x}", '{"answer": 1}', "{}", "{step_1}"]
    for text in [*theirs, "{answer}", "x{prompt} {other}"]:
        assert load_recipe({"teacher": {"hint": text}}).teacher.hint == text


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
