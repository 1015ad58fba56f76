"""The README's commands and code do what they say, and the documents name files that exist."""

import dataclasses
import doctest
import importlib
import importlib.util
import inspect
import json
import math
import pkgutil
import re
import runpy
import tomllib

import pytest
import yaml
from trl import GRPOConfig, GRPOTrainer

import perl
from perl.methods.registry import METHODS
from perl.rollouts.vllm.release import TESTED
from tests.conftest import CHECKOUT

README = (CHECKOUT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_readme_python_block_runs_and_saves_an_adapter(tmp_path):
    (code,) = blocks("python")
    script = tmp_path / "script.py"
    script.write_text(code)
    runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / "runs" / "script" / "adapter" / "adapter_model.safetensors").is_file()


def test_the_readme_recipe_is_valid_and_its_steps_are_as_large_as_it_says(tmp_path):
    (recipe,) = blocks("yaml")
    (tmp_path / "recipe.yaml").write_text(recipe)
    loaded = perl.Recipe.load(tmp_path / "recipe.yaml")
    assert loaded.data.train.name == "sandbox:chain"
    train = loaded.train
    assert loaded.batch.completions_per_step == train["prompts_per_step"] * train["num_generations"] == 64


@pytest.mark.nightly
def test_the_script_with_callbacks_runs_and_leaves_what_the_page_says(tmp_path, monkeypatch):
    page = (CHECKOUT / "docs" / "callbacks.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(code)
    runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
    written = {path.name for path in (tmp_path / "runs" / "script").iterdir()}
    assert {"metrics.jsonl", "samples.jsonl", "plots", "best"} <= written
    named = set(re.findall(r"^\| `(\w+)\(", page, flags=re.MULTILINE))
    assert named == set(perl.callbacks.__all__)


@pytest.mark.nightly
def test_the_script_of_the_api_page_runs(tmp_path, monkeypatch, capsys):
    page = (CHECKOUT / "docs" / "api.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(code)
    runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
    assert "done 8 " in capsys.readouterr().out


def test_the_settings_of_trl_and_ours_that_stand_side_by_side_exist(perl_command):
    page = (CHECKOUT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.split("\n\n")[2].splitlines()[2:]]
    ours = {key for _, recipe, *_ in rows for key in re.findall(r"`([a-z]+\.\w+)", recipe)}
    keys = {setting["name"] for setting in json.loads(perl_command("recipes", "--settings", "--json").stdout)}
    assert len(ours) >= 12
    assert {key for key in ours if key not in keys} == set()
    theirs = {name for _, _, trl, *_ in rows for name in re.findall(r"`(\w+)", trl)}
    of_the_trainer = {*inspect.signature(GRPOTrainer).parameters, "LoraConfig", "target_modules", "trl", "accelerate"}
    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert len(theirs & fields) >= 10
    assert theirs - fields - of_the_trainer == {"max_staleness"}
    asynchronous = importlib.import_module("trl.experimental.async_grpo")
    assert "max_staleness" in {field.name for field in dataclasses.fields(asynchronous.AsyncGRPOConfig)}


def test_the_citation_is_of_this_version_and_says_what_cards_say():
    citation = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text(encoding="utf-8"))
    template = (CHECKOUT / "model_cards" / "templates" / "citation.md.jinja").read_text(encoding="utf-8")
    assert citation["version"] == perl.__version__
    assert citation["license"] == "Apache-2.0"
    assert f"title = {{{citation['title']}}}" in template
    assert [f"author = {{{author['name']}}}" in template for author in citation["authors"]] == [True]
    assert set(citation) >= {"cff-version", "message", "title", "authors", "type"}


def test_the_architecture_names_every_module_and_only_files_and_functions_that_exist():
    text = (CHECKOUT / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = [module.name for module in pkgutil.iter_modules(perl.__path__) if module.name != "__main__"]
    assert len(modules) > 15
    assert [name for name in modules if not re.search(rf"`{name}(\.py|/)", text)] == []
    room, missing = "", []
    files = walked = 0
    for line in text.splitlines():
        if row := re.match(r"\| `(\w+)/` \|", line):
            room = row[1]
        for file, name in re.findall(r"`([\w/.]+\.(?:py|ipynb))`(?: `(\w+)`)?", line):
            places = [CHECKOUT / "src" / "perl" / file, CHECKOUT / file]
            if row:
                places.append(CHECKOUT / "src" / "perl" / room / file)
            found = next((place for place in places if place.is_file()), None)
            files += 1
            walked += bool(name)
            if found is None:
                missing.append(file)
            elif name and not re.search(rf"^(def|class) {name}\b", found.read_text(encoding="utf-8"), re.MULTILINE):
                missing.append(f"{file}: {name}")
    assert missing == []
    assert files >= 70
    assert walked >= 30


def test_the_picture_of_the_rooms_is_the_one_that_is_drawn_now():
    spec = importlib.util.spec_from_file_location("draw_rooms", CHECKOUT / "docs" / "draw_rooms.py")
    draw_rooms = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_rooms)
    graph = draw_rooms.read_graph()
    assert draw_rooms.drawn_graph() == graph, "python docs/draw_rooms.py draws it"
    assert len(graph) >= 15
    assert "errors" in graph["policy"]
    order = list(graph)
    assert all(order.index(room) < order.index(other) for room in graph for other in graph[room])


def test_the_installation_page_says_what_the_metadata_and_the_code_say():
    text = (CHECKOUT / "docs" / "installation.md").read_text(encoding="utf-8")
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert f"Python {', '.join(pythons[:-1])} or {pythons[-1]}" in text
    assert project["requires-python"] == f">={pythons[0]}"
    (torch,) = [needed for needed in project["dependencies"] if needed.startswith("torch>")]
    assert f"torch {torch.removeprefix('torch>=').partition(',')[0]} to " in text
    assert f"'vllm{TESTED}'" in text
    extras = set(project["optional-dependencies"]) - {"dev"}
    assert extras == set(re.findall(r"^\| `perl-rl\[(\w+)\]`", text, flags=re.MULTILINE))


def test_examples_in_docstrings_are_true():
    tried = 0
    for module in pkgutil.walk_packages(perl.__path__, "perl."):
        # Those of lighteval import it, which switches autograd off and has a process of its own; here it would be every
        # later test's. They have no examples.
        if module.name not in ("perl.__main__", "perl.evaluation.tasks.lighteval_process"):
            result = doctest.testmod(importlib.import_module(module.name))
            assert result.failed == 0, module.name
            tried += result.attempted
    assert tried >= 2


def test_the_table_of_methods_says_what_was_measured():
    results = CHECKOUT / "benchmarks" / "results"
    measured = json.loads((results / "methods.json").read_text())
    accuracy = {line["method"]: line for line in measured["summary"]}
    table = (CHECKOUT / "docs" / "methods.md").read_text(encoding="utf-8")
    for name in METHODS:
        line = accuracy[name]
        assert line["seeds"] == 3
        assert line["failed"] == 0
        found = [row["accuracy"] for row in measured["rows"] if row["method"] == name]
        assert line["mean"] == pytest.approx(math.fsum(found) / 3, abs=1e-12)
        assert (line["lowest"], line["highest"]) == (min(found), max(found))
        shown = f"| `{name}` | {line['mean']:.3f} ({line['lowest']:.3f} to {line['highest']:.3f}) |"
        assert shown in table
    properties = json.loads((results / "method_properties.json").read_text())["rows"]
    ours = [row for row in properties if row["trainer"] == "perl"]
    assert len(ours) == 4 * len(METHODS)
    assert all(max(row["reference at 0"], row["reference after 5"], row["reloaded"]) <= 1e-4 for row in ours)
    assert all(row["resumed"] == 0 and row["base unchanged"] for row in ours)


def test_the_table_of_the_training_step_says_what_was_measured():
    rows = json.loads((CHECKOUT / "benchmarks" / "results" / "training_step.json").read_text())["rows"]
    table = (CHECKOUT / "docs" / "training-step.md").read_text(encoding="utf-8")
    assert len(rows) >= 7
    for row in rows:
        theirs, ours = row["trainers"]["TRL"], row["trainers"]["perl"]
        shown = (
            f"| {row['case']['name']} | {row['width']} | {theirs['seconds']:.2f} | {ours['seconds']:.2f} "
            f"| {theirs['seconds'] / ours['seconds']:.1f} | {theirs['efficiency']:.0%} | {ours['efficiency']:.0%} "
            f"| {theirs['memory'] / 2**20:.0f} | {ours['memory'] / 2**20:.0f} | {row['difference']:.1e} |"
        )
        assert shown in table
        assert row["difference"] <= 1e-5
        for one in (theirs, ours):  # each step's fastest turn counts, and the operations that are needed at least
            fastest = [min(times) for times in zip(*one["turns"], strict=True)]
            assert one["seconds"] == pytest.approx(math.fsum(fastest) / row["steps"])
            assert one["efficiency"] == pytest.approx(row["ideal"] / one["executed"])
