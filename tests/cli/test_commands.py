"""Every command prints what it promises, to the right stream, with the right exit code."""

import json
import os
import signal
import subprocess
import sys

import click
import pytest
import yaml
from transformers import AutoModelForCausalLM

import perl as package
from perl.algorithms.named import ALGORITHMS, shown_settings
from perl.cli.commands import commands
from perl.cli.main import COMMANDS
from perl.methods.registry import METHODS
from perl.recipe import load_recipe
from perl.recipe.assets import packaged_recipes
from perl.sandbox import BASE_FOLDER


def test_version_and_help_name_the_package_every_command_and_its_options(printed, perl):
    assert printed("--version") == f"perl-rl, version {package.__version__}\n"
    text = printed("--help")
    listed = text.partition("Commands:")[2].splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in listed if line.startswith("  ") and line[2:3].strip()}
    assert set(COMMANDS) <= set(rows)
    assert all(len(rows[name]) > 2 for name in COMMANDS)
    assert perl().out == text
    helps = {name: printed(name, "--help") for name in COMMANDS}
    assert [name for name, help_ in helps.items() if not help_.startswith(f"Usage: perl {name}")] == []
    for part in ("RECIPE", "[SECTION.KEY=VALUE]", "--output", "--dry-run", "--quiet"):
        assert part in helps["train"]


def test_recipes_are_listed_searched_and_printed(printed, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    packaged = packaged_recipes()
    shown = [line.split()[0] for line in printed("recipes").splitlines()]
    alone = [name for name in packaged if "/" not in name]
    assert shown == [*alone, *sorted({f"{name.partition('/')[0]}/" for name in packaged if "/" in name})]
    inside = [name for name in packaged if name.startswith("prml/")]
    assert [line.split()[0] for line in printed("recipes", "prml").splitlines()] == inside
    found = json.loads(printed("recipes", "--search", "COUNTDOWN ppo", "--json"))
    assert {(row["name"], row["folder"]) for row in found} >= {("countdown/ppo", "countdown")}
    rows = json.loads(printed("recipes", "--json"))
    assert [row["name"] for row in rows] == list(packaged)
    assert all(packaged[row["name"]].read_text().splitlines()[0] == f"# {row['summary']}" for row in rows)
    (tmp_path / "mine.yaml").write_text(printed("recipes", "quickstart"))
    assert load_recipe(tmp_path / "mine.yaml").as_dict() == load_recipe("quickstart").as_dict()


def test_methods_are_listed_with_settings_reference_sync_serving_and_what_is_refused(printed):
    heading, *lines = printed("methods").partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == list(METHODS)
    assert heading.split()[:4] == ["method", "rank", "alpha", "rate"]
    rows = {row["name"]: row for row in json.loads(printed("methods", "--json"))}
    for name, method in METHODS.items():
        assert rows[name]["settings"] == json.loads(json.dumps(dict(method.settings)))
        assert rows[name]["learning_rate"] == pytest.approx(1e-5 * method.rate)
        assert (rows[name]["summary"], rows[name]["source"]) == (method.summary, method.source)
    quantised = {name: [rows[name][way] for way in ("nf4", "int8", "fp8")] for name in ("lora", "pissa", "full")}
    assert quantised == {"lora": ["yes"] * 3, "pissa": ["no", "yes", "yes"], "full": ["no"] * 3}
    method, text = METHODS["slicefine"], printed("methods", "slicefine")
    for part in (method.summary, method.source, *method.settings, *method.options, *method.defaults):
        assert part in text


def test_what_a_method_trains_of_a_model_is_counted(printed):
    model = AutoModelForCausalLM.from_pretrained(BASE_FOLDER)
    layers = [layer for name, layer in model.named_modules() if name.endswith("_proj")]
    lora = 16 * sum(layer.in_features + layer.out_features for layer in layers)
    for name, trained in (("lora", lora), ("full", model.num_parameters())):
        (row,) = json.loads(printed("methods", name, "--model", "sandbox:base", "--json"))
        assert row["trainable"] == trained
        assert row["share"] == pytest.approx(trained / model.num_parameters(), rel=1e-12)
    assert f"{lora:,} parameters" in printed("methods", "lora", "--model", "sandbox:base")


def test_algorithms_are_listed_and_one_is_explained(printed):
    heading, *lines = printed("algorithms").partition("\n\n")[0].splitlines()
    assert heading.split() == ["algorithm", "title", "sets", "source"]
    assert [line.split()[0] for line in lines] == list(ALGORITHMS)
    rows = {row["name"]: row for row in json.loads(printed("algorithms", "--json"))}
    assert {name: row["sets"] for name, row in rows.items()} == {name: row.sets for name, row in ALGORITHMS.items()}
    row, text = ALGORITHMS["gspo"], printed("algorithms", "gspo")
    for part in (row.title, row.equation, row.advantage, row.constants, row.differs, row.source, row.paper.title):
        assert part in text


def commands_of(group=commands, above=()):
    """Every command that there is, those within others too."""
    with click.Context(group) as context:
        for name in group.list_commands(context):
            one = group.get_command(context, name)
            yield (*above, name), one
            if isinstance(one, click.Group):
                yield from commands_of(one, (*above, name))


def test_an_option_or_command_that_there_is_not_is_one_line_with_the_nearest(mistake):
    for path, one in commands_of():
        if one.context_settings.get("ignore_unknown_options"):  # an answer may begin with a dash
            continue
        names = [name for option in one.params for name in option.opts if name.startswith("--")]
        slips = {f"{name}x": f"did you mean {name}?" for name in ("--help", *names)} | {"--zebra": " --help)"}
        for slip, hint in slips.items():
            line = mistake(*path, slip)
            assert line.startswith(f"error: perl {' '.join(path)}: no such option '{slip}' ("), line
            assert hint in line
            assert line.endswith(" [PRL206]")
        if isinstance(one, click.Group) and not one.invoke_without_command:
            assert "no such command 'zebra' (there are: " in mistake(*path, "zebra")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("trian",), "no such command 'trian' (did you mean train?) [PRL206]"),
        (("eval", "user/name"), "no such command 'user/name' (an adapter is named by --adapter user/name; there are: "),
        (("train",), "missing argument 'RECIPE'"),
        (("methods", "lora", "extra"), "unexpected extra argument"),
        (("methods", "lorra"), "did you mean lora?"),
        (("algorithms", "gsop"), "did you mean gspo?"),
        (("recipes", "quikstart"), "did you mean quickstart?"),
        (("train", "absent.yaml"), "no such file"),
        (("train", "quickstart", "max_steps"), "is not an override"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_nothing_is_begun(arguments, words, mistake, tmp_path):
    assert words in mistake(*arguments)
    assert not any(tmp_path.iterdir())


def test_a_dry_run_prints_a_recipe_that_loads_again_and_the_plan_and_starts_nothing(printed, tmp_path):
    overrides = ("train.max_steps=3", "peft.rank=4", "algorithm=gspo", "train.beta=0.01")
    text = printed("train", "quickstart", *overrides, "--dry-run")
    assert list(tmp_path.iterdir()) == []
    asked = load_recipe("quickstart", overrides)
    assert yaml.safe_load(text) == asked.as_dict()
    (tmp_path / "printed.yaml").write_text(text)
    assert load_recipe(tmp_path / "printed.yaml").as_dict() == asked.as_dict()
    plan = dict(line[2:].split(maxsplit=1) for line in text.splitlines() if line.startswith("# "))
    planned = [
        "model",
        "adapter",
        "algorithm",
        "trained",
        "data",
        "prompt",
        "tokens",
        "rewards",
        "batch",
        "steps",
        "output",
    ]
    assert list(plan) == [*planned, "needs", "time"]
    assert plan["adapter"].startswith("lora (rank 4, ")
    settings = shown_settings(ALGORITHMS["gspo"].settings)
    assert plan["algorithm"] == f"gspo: {settings}; overridden: beta 0.01"
    completions = asked.train["max_steps"] * asked.batch.completions_per_step
    assert plan["steps"] == f"3 ({completions} completions in all)" == "3 (192 completions in all)"


def test_a_reader_that_left_is_no_failure_and_no_traceback():
    """As in ``perl recipes | head -0``: the pipe has no reader when the first line is written."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "perl", "methods"]
    try:
        result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write_end)
    assert result.stderr == ""
    assert result.returncode in (0, -signal.SIGPIPE)  # 1 would say that the command failed
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() != ""  # one that takes one line gets it
    process.stdout.close()
    process.wait()
    assert process.stderr.read() == ""
    process.stderr.close()
