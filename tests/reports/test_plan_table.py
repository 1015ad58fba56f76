"""``perl.plan`` is what ``perl plan`` prints, and a table in a notebook."""

import json
import re

import perl
from perl.cli import commands


def test_a_plan_prints_as_the_command_does_and_is_a_table_in_a_notebook(capsys):
    found = perl.plan("quickstart", ["train.num_generations=16", "train.per_device_train_batch_size=128"], gpu="A100")
    overrides = ("train.num_generations=16", "train.per_device_train_batch_size=128")
    assert commands.run(["plan", "quickstart", *overrides, "--gpu", "A100"], "perl") == 0
    assert str(found) == repr(found) == capsys.readouterr().out.rstrip("\n")
    assert json.loads(json.dumps(found.values))["completions_per_step"] == 128
    shown = found._repr_html_()
    assert shown.count("<table>") == shown.count("</table>") == 2
    rows = re.findall(r"<tr>(.*?)</tr>", shown)
    assert {row.count("<t") for row in rows} == {3}  # a label and two strategies
    assert "<script" not in shown


def test_what_a_recipe_names_is_text_in_the_table():
    recipe = {"model": {"name": "sandbox:base"}, "data": {"train": "sandbox:addition"}, "rewards": {"accuracy": 1.0}}
    found = perl.plan({**recipe, "train": {"max_steps": 3}})
    object.__setattr__(found.forecast.plan.recipe.model, "name", "<img src=x>")
    assert "<img" not in found._repr_html_()
    assert "&lt;img src=x&gt;" in found._repr_html_()
