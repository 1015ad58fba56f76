"""Mistakes about publishing: one line each, before anything is trained."""

import pytest

from perl.recipe import load_recipe


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        ("hub: {push: end}", "recipe.yaml:2: hub: push needs repo_id, as in repo_id: user/name"),
        ("hub: {private: true}", "recipe.yaml:2: hub: private needs repo_id, as in repo_id: user/name"),
        (
            "hub: {repo_id: a/b, push: best}",
            "recipe.yaml:2: hub.push: best needs eval.every, the steps between two scores (or push: end)",
        ),
        (
            "hub: {repo_id: a/b, push: end}\npeft: {method: full}",
            "recipe.yaml:2: hub.push: full trains the model itself, there is no adapter to push (hf upload",
        ),
        (
            "hub: {repo_id: a/b, push: every}",
            "recipe.yaml:2: hub.push: must be one of end, every_save, best, not 'every' (did you mean every_save?)",
        ),
    ],
)
def test_a_recipe_that_cannot_be_published_is_refused(mistake, recipe, line):
    assert mistake(recipe=recipe).startswith(line)


def test_a_name_that_is_none_is_refused(mistake):
    assert mistake(recipe="hub: {repo_id: adapter, push: end}").startswith("recipe.yaml:2: hub.repo_id: ")


def test_without_a_login_nothing_is_trained(mistake, hub, tmp_path):
    (tmp_path / "hf-home" / "token").unlink()
    line = mistake(recipe="hub: {repo_id: user/a, push: end}\nmodel: {name: weightless}")
    assert line == "recipe.yaml:2: hub.push: push needs a login to the Hub (hf auth login)"
    assert hub.requests == 0


def test_a_token_that_the_hub_refuses_is_said_before_anything_is_trained(mistake, tmp_path, hub):
    (tmp_path / "hf-home" / "token").write_text("hf_" + "another" * 5)
    line = mistake(recipe="hub: {repo_id: user/a, push: end}")
    assert line == "recipe.yaml:2: hub.push: the Hub refuses your token (hf auth login)"
    assert [request.path for request in hub.log] == ["/api/whoami-v2"]


def test_what_the_recipe_says_of_the_hub_may_change_between_starts(tmp_path):
    from perl.run.folder import open_run

    recipe = {"train": {"output_dir": str(tmp_path / "run")}}
    with open_run(load_recipe(recipe)) as run:
        run.adapter.mkdir()
    hub = {"repo_id": "user/a", "push": "end", "private": True}
    with open_run(load_recipe(recipe | {"hub": hub})) as run:
        assert run.status == "done"
