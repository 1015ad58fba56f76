"""Mistakes about publishing: one line each, before anything is trained."""


def test_a_recipe_that_cannot_be_published_is_refused(refuses):
    needed = "needs hub.repo_id, as in repo_id: user/name"
    refuses([
        ("hub: {push: end}", f"recipe.yaml:2: hub.push: {needed}"),
        ("hub: {private: true}", f"recipe.yaml:2: hub.private: {needed}"),
        ("hub: {repo_id: a/b, push: best}",
         "recipe.yaml:2: hub.push: best needs eval.every, the steps between two scores (or push: end)"),
        ("hub: {repo_id: a/b, push: end}\npeft: {method: full}",
         "recipe.yaml:2: hub.push: full trains the model itself, there is no adapter to push (hf upload"),
        ("hub: {repo_id: a/b, push: every}",
         "recipe.yaml:2: hub.push: must be one of end, every_save, best, not 'every' (did you mean every_save?)"),
        ("hub: {repo_id: adapter, push: end}", "recipe.yaml:2: hub.repo_id: "),
    ])  # fmt: skip


def test_a_token_that_is_absent_or_refused_is_reported_before_anything_is_trained(mistake, hub, tmp_path):
    recipe = "hub: {repo_id: user/a, push: end}"
    token = tmp_path / "hf-home" / "token"
    token.unlink()
    line = mistake(recipe=f"{recipe}\nmodel: {{name: weightless}}")
    assert line == "recipe.yaml:2: hub.push: push needs a login to the Hub (hf auth login)"
    assert hub.requests == 0
    token.write_text("hf_" + "another" * 5)
    assert mistake(recipe=recipe) == "recipe.yaml:2: hub.push: the Hub refuses your token (hf auth login)"
    assert [request.path for request in hub.log] == ["/api/whoami-v2"]
