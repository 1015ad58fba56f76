"""Every recipe that is shipped says what it is, can be read, and can be planned where its model is at hand."""

import importlib.util
import re

import pytest

from perl.packing.attention import KERNEL_CALL
from perl.recipe.assets import assets_folder, packaged_recipes
from perl.sandbox import is_sandbox
from perl.training.prepare import prepare, read_recipe
from tests.conftest import CHECKOUT

RECIPES = {name: path for name, path in packaged_recipes().items() if "/" not in name}  # others: test_recipe_folders
OF_THE_SANDBOX = [name for name in RECIPES if is_sandbox(read_recipe(name).model.name)]  # no network is needed
FOR_GPUS = [name for name in RECIPES if read_recipe(name).engine.device != "cpu"]


def test_every_recipe_begins_with_a_sentence_and_can_be_read_written_and_read_again(tmp_path):
    assert "quickstart" in RECIPES
    assert OF_THE_SANDBOX
    assert len(packaged_recipes()) == len([path for path in (assets_folder() / "recipes").rglob("*") if path.is_file()])
    for name, path in packaged_recipes().items():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith("# "), name
        assert len(first.split()) >= 5, name
        assert first.endswith("."), name
        recipe = read_recipe(name, on_verl=True)
        assert recipe.name == name.replace("/", "-")
        (tmp_path / "again.yaml").write_text(recipe.to_yaml())
        assert read_recipe(tmp_path / "again.yaml", on_verl=True).as_dict() == recipe.as_dict(), name


@pytest.mark.parametrize("name", ["quickstart", "acquire-levels"])
def test_a_recipe_of_the_sandbox_can_be_planned(name):
    recipe = read_recipe(name)
    plan = prepare(recipe)
    assert plan.steps > 0
    assert 0 < plan.trainable_parameters < plan.total_parameters
    batch = recipe.batch
    processed = batch.per_device_train_batch_size * batch.gradient_accumulation_steps * batch.world_size
    assert batch.completions_per_step == batch.prompts_per_step * batch.num_generations == processed
    assert len(plan.problems.train) >= recipe.batch.completions_per_step // recipe.batch.num_generations
    assert plan.problems.heldout is not None
    assert plan.longest_prompt + recipe.rollout.max_completion_length <= 1024


@pytest.fixture(scope="module")
def plans_of_recipes():
    spec = importlib.util.spec_from_file_location("plan_recipes", CHECKOUT / "docs" / "plan_recipes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(KERNEL_CALL is None or not KERNEL_CALL.grouped, reason="this torch repeats keys and values")
@pytest.mark.parametrize(
    "name", ["node-7b", *(pytest.param(name, marks=pytest.mark.nightly) for name in FOR_GPUS if name != "node-7b")]
)
def test_a_recipe_for_gpus_fits_them_and_has_the_memory_of_its_plan_at_its_head(name, plans_of_recipes):
    ((strategy, column),) = plans_of_recipes.forecast(name).strategies.items()
    assert column.memory.fits
    assert column.memory.least < 0.9 * column.memory.available
    text = RECIPES[name].read_text(encoding="utf-8")
    lines = plans_of_recipes.figures(name)
    assert f"\n#\n{lines}\n" in text
    assert "not run" in lines
    assert plans_of_recipes.with_figures(text, lines) == text
    assert set(re.findall(r"\b\d+ GB", text.partition("\n")[0])) <= set(column.fits)
    recipe = read_recipe(name)
    assert strategy == recipe.engine.strategy == ("fsdp2" if name.startswith("fsdp2") else "ddp")
    assert recipe.rollout.capabilities.needs_servers or not name.startswith(("node-1", "node-7", "fsdp2"))
    if name == plans_of_recipes.SHOWN:
        page = (CHECKOUT / "docs" / "scaling.md").read_text(encoding="utf-8")
        assert plans_of_recipes.block() in page
