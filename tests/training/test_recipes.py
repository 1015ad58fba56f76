"""Every recipe that is shipped says what it is, can be read, and can be planned where its model is at hand."""

import importlib.util
import json
import re

import pytest
from transformers import AutoTokenizer, Qwen2Config

from perl.packing.attention import KERNEL_CALL
from perl.policy.model import load_empty_base
from perl.recipe.assets import packaged_recipes, recipes_folder
from perl.recipe.quantisations import QUANTISATIONS
from perl.sandbox import BASE_FOLDER, is_sandbox
from perl.training.decoder import Types, cached_bytes, decoder_of
from perl.training.forecast import Question, answer
from perl.training.forecast_text import plan_lines
from perl.training.stages import prepare, read_recipe
from tests.conftest import CHECKOUT

RECIPES = {name: path for name, path in packaged_recipes().items() if "/" not in name}  # others: test_recipe_folders
OF_THE_SANDBOX = [name for name in RECIPES if is_sandbox(read_recipe(name).model.name)]  # no network is needed


def test_every_recipe_begins_with_a_sentence_and_can_be_read_written_and_read_again(tmp_path):
    assert "quickstart" in RECIPES
    assert OF_THE_SANDBOX
    assert len(packaged_recipes()) == len([path for path in recipes_folder().rglob("*") if path.is_file()])
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
    "name",
    [
        name if name == "node-7b" else pytest.param(name, marks=pytest.mark.nightly)
        for name in RECIPES
        if name not in OF_THE_SANDBOX
    ],
)
def test_a_recipe_for_gpus_fits_them_and_has_the_memory_of_its_plan_at_its_head(name, plans_of_recipes, tmp_path):
    sizes, gpu = plans_of_recipes.HEADED[name]
    ((strategy, column), *_) = plans_of_recipes.forecast(name, sizes, gpu, tmp_path).strategies.items()
    assert column.memory.fits
    assert column.memory.least < 0.9 * column.memory.available
    text = RECIPES[name].read_text(encoding="utf-8")
    lines = plans_of_recipes.figures(name, tmp_path)
    assert f"\n#\n{lines}\n" in text
    assert "not run" in lines
    assert plans_of_recipes.with_figures(text, lines) == text
    assert set(re.findall(r"\b\d+ GB", text.partition("\n")[0])) <= set(column.fits)
    recipe = read_recipe(name)
    assert strategy == recipe.engine.strategy == ("fsdp2" if name.startswith("fsdp2") else "ddp")
    assert recipe.rollout.capabilities.needs_servers or not name.startswith(("node-1", "node-7", "fsdp2"))
    if name == plans_of_recipes.SHOWN:
        page = (CHECKOUT / "docs" / "scaling.md").read_text(encoding="utf-8")
        assert plans_of_recipes.block(tmp_path) in page


def stand_ins(name, folder):
    """Overrides: a tiny model without weights, and files with the columns that the recipe's data sets have."""
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32768,
    )
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(folder)
    overrides = [f"model.name={folder}", "train.fp16=false", "model.dtype=auto", "engine.device=cpu"]
    for part, source in (("train", read_recipe(name).data.train), ("eval", read_recipe(name).data.eval)):
        questions = [f"{part} {i} + {i} = ?" for i in range(64)]
        working = "So it is.\n#### " if source.name == "openai/gsm8k" else ""
        answers = [f"{working}{2 * i}" for i in range(64)]
        columns = source.columns.model_dump()
        rows = [{columns["prompt"]: q, columns["answer"]: a} for q, a in zip(questions, answers, strict=True)]
        file = folder / f"{part}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        written = ", ".join(f"{ours}: {theirs}" for ours, theirs in columns.items())
        overrides.append(f"data.{part}={{name: {file}, columns: {{{written}}}}}")
    return overrides


@pytest.mark.parametrize("name", ["t4-1.5b-nf4", "a100-7b-vllm", "fsdp2-32b"])
def test_a_recipe_for_gpus_is_dry_run_with_a_tiny_model_and_files_of_its_columns(name, tmp_path, monkeypatch):
    monkeypatch.setattr("perl.recipe.engines.Capabilities.installed", property(lambda _: True))  # vLLM is not here
    recipe = read_recipe(name)
    if recipe.model.quantization is not None:
        pytest.importorskip(QUANTISATIONS[recipe.model.quantization].package.modules[0])
    tiny = read_recipe(name, stand_ins(name, tmp_path))
    for kept in ("peft", "rollout", "eval"):
        assert getattr(tiny, kept) == getattr(recipe, kept)
    plan = prepare(tiny)
    assert plan.steps == recipe.train["max_steps"]
    assert next(plan_lines(plan)).startswith("model")
    assert plan.problems.heldout is not None
    assert len(plan.problems.train) == 64
    assert recipe.batch.completions_per_step == recipe.batch.prompts_per_step * recipe.batch.num_generations
    found = answer(tiny, Question(gpu="H100"))
    assert all(column.memory.fits for column in found.strategies.values())


@pytest.mark.parametrize(("processes", "said"), [(1, []), (8, ["strategy fsdp2"])])
def test_the_plan_says_what_several_processes_share(processes, said):
    overrides = [f"engine.processes={processes}", "engine.strategy=fsdp2"]
    lines = list(plan_lines(prepare(read_recipe("quickstart", overrides))))
    assert [line for line in lines if line.startswith("strategy")] == said


@pytest.mark.parametrize("further", [[], ["train.steps_per_generation=4"]], ids=["", "several steps"])
def test_a_cache_holds_what_a_process_writes_at_once(further):
    overrides = ["engine.device=auto", "engine.threads=null", "train.per_device_train_batch_size=null", *further]
    recipe = read_recipe("quickstart", [*overrides, "engine.processes=8", "engine.strategy=zero2"])
    memory = answer(recipe, Question(gpu="L4")).strategies["zero2"].memory
    passes = 4 if further else recipe.batch.gradient_accumulation_steps
    one = cached_bytes(decoder_of(load_empty_base(recipe.model).config), Types())
    written = recipe.batch.per_device_train_batch_size * passes
    assert memory.cache == written * memory.longest_row * one
    assert further or written == recipe.batch.completions_per_step // 8
