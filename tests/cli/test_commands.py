"""Every command prints what it promises, to the right stream, with the right exit code."""

import json
import os
import signal
import subprocess
import sys

import pytest
import yaml

import perl
from perl.assets import packaged_recipes
from perl.cli.main import COMMANDS
from perl.methods.registry import METHODS
from perl.recipe import load_recipe


def test_the_version_is_the_packages(perl_command):
    result = perl_command("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"perl-rl, version {perl.__version__}\n"


def test_help_names_every_command_with_a_sentence(perl_command):
    result = perl_command("--help")
    assert (result.returncode, result.stderr) == (0, "")
    listed = result.stdout.partition("Commands:")[2].splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in listed if line.startswith("  ") and line[2:3].strip()}
    assert set(COMMANDS) <= set(rows)
    assert all(len(rows[name]) > 2 for name in COMMANDS)


def test_no_arguments_print_the_help(perl_command):
    result = perl_command(input="")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == perl_command("--help").stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(perl_command, name):
    result = perl_command(name, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: python -m perl {name}")


def test_the_help_of_train_names_its_options_and_overrides(perl_command):
    text = perl_command("train", "--help").stdout
    for part in ("RECIPE", "[SECTION.KEY=VALUE]", "--output", "--dry-run", "--quiet"):
        assert part in text


def test_recipes_lists_every_packaged_recipe_with_its_summary(perl_command):
    result = perl_command("recipes", env={**os.environ, "COLUMNS": "200"})
    assert (result.returncode, result.stderr) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert list(rows) == list(packaged_recipes())


def test_recipes_as_json(perl_command):
    result = perl_command("recipes", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    rows = json.loads(result.stdout)
    assert [row["name"] for row in rows] == list(packaged_recipes())
    for row in rows:
        assert packaged_recipes()[row["name"]].read_text().splitlines()[0] == f"# {row['summary']}"


def test_recipes_quickstart_prints_the_file_to_start_from(perl_command, tmp_path):
    result = perl_command("recipes", "quickstart")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == packaged_recipes()["quickstart"].read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(result.stdout)
    assert load_recipe(tmp_path / "mine.yaml").as_dict() == load_recipe("quickstart").as_dict()


def test_an_unknown_recipe_is_the_users_mistake(perl_command):
    result = perl_command("recipes", "quikstart")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: no recipe named 'quikstart' (did you mean quickstart?)\n"


def test_methods_lists_every_method_with_defaults_and_source(perl_command):
    result = perl_command("methods")
    assert (result.returncode, result.stderr) == (0, "")
    for method in METHODS.values():
        assert f"\n{method.name} " in f"\n{result.stdout}"
        assert method.summary in result.stdout
        assert method.source in result.stdout


def test_methods_as_json(perl_command):
    result = perl_command("methods", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert list(rows) == list(METHODS)
    for name, method in METHODS.items():
        assert rows[name]["defaults"] == json.loads(json.dumps(dict(method.defaults)))
        assert (rows[name]["summary"], rows[name]["source"]) == (method.summary, method.source)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--recipe",), "No such option"),
        (("trian",), "No such command 'trian'"),
        (("train",), "Missing argument 'RECIPE'"),
        (("train", "quickstart", "--fast"), "No such option '--fast'"),
        (("recipes", "--yaml"), "No such option '--yaml'"),
        (("methods", "extra"), "unexpected extra argument"),
        (("train", "quickstrat"), "did you mean quickstart?"),
        (("train", "absent.yaml"), "no such file"),
        (("train", "quickstart", "peft.rnak=4"), "did you mean rank?"),
        (("train", "quickstart", "peft.method=lroa"), "did you mean lora?"),
        (("train", "quickstart", "max_steps"), "is not an override"),
    ],
)
def test_a_mistake_is_said_on_stderr_with_exit_code_2(perl_command, tmp_path, arguments, said):
    result = perl_command(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_every_mistake_of_a_recipe_is_said_at_once(perl_command):
    result = perl_command("train", "quickstart", "peft.rnak=4", "train.learning_rate=-1", "eval.k=0")
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error: command line: ") for line in lines)
    assert {line.split(": ")[2] for line in lines} == {"peft.rnak", "train.learning_rate", "eval.k"}


def test_a_dry_run_prints_a_recipe_that_loads_again_and_the_plan_and_starts_nothing(perl_command, tmp_path):
    overrides = ("train.max_steps=3", "peft.rank=4")
    result = perl_command("train", "quickstart", *overrides, "--dry-run")
    assert (result.returncode, result.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
    asked = load_recipe("quickstart", overrides)
    assert yaml.safe_load(result.stdout) == asked.as_dict()
    (tmp_path / "printed.yaml").write_text(result.stdout)
    assert load_recipe(tmp_path / "printed.yaml").as_dict() == asked.as_dict()
    plan = dict(line[2:].split(maxsplit=1) for line in result.stdout.splitlines() if line.startswith("# "))
    assert list(plan) == ["model", "adapter", "trained", "data", "tokens", "rewards", "batch", "steps", "output"]
    assert plan["model"].startswith("sandbox:base, ")
    assert plan["adapter"].startswith("lora (rank 4, ")
    assert plan["steps"] == "3 (192 completions in all)"


@pytest.mark.parametrize("arguments", [("recipes",), ("recipes", "quickstart"), ("methods",), ("--help",)])
def test_a_reader_that_left_is_no_failure_and_no_traceback(arguments):
    """As in ``perl recipes | head -0``: the pipe has no reader when the first line is written."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "perl", *arguments], stdout=write_end, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(write_end)
    assert result.stderr == ""
    assert result.returncode in (0, -signal.SIGPIPE)  # 1 would say that the command failed


def test_a_reader_that_takes_one_line_gets_it():
    process = subprocess.Popen(
        [sys.executable, "-m", "perl", "methods"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() != ""
    process.stdout.close()
    process.wait()
    assert process.stderr.read() == ""
    process.stderr.close()


def test_every_setting_of_a_recipe_is_listed_with_a_sentence(perl_command):
    result = perl_command("recipes", "--settings", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    sentences = {row["name"]: row["summary"] for row in json.loads(result.stdout)}
    sections = load_recipe("quickstart").as_dict()
    expected = {
        f"{name}.{key}" for name in ("model", "peft", "rollout", "eval", "hub", "engine") for key in sections[name]
    }
    expected |= {
        "extends",
        "data.train.name",
        "data.train.columns.prompt",
        "rewards.NAME.weight",
        "train.learning_rate",
    }
    assert expected <= set(sentences)
    assert len(sentences) > 150
    assert all(sentences[name] for name in expected)
    assert not any(name.startswith("train.peft_") for name in sentences)
    assert "train.use_cpu" not in sentences
    plain = perl_command("recipes", "--settings")
    assert (plain.returncode, plain.stderr) == (0, "")
    assert [line.split()[0] for line in plain.stdout.splitlines()] == list(sentences)
