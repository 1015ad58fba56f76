"""Every command prints what it promises, to the right stream, with the right exit code."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys

import click
import pytest
import yaml
from transformers import AutoModelForCausalLM

import perl
from perl.algorithms.named import ALGORITHMS, shown_settings
from perl.cli.commands import commands, run
from perl.cli.main import COMMANDS
from perl.errors import EXIT_USER_MISTAKE
from perl.methods.registry import METHODS, REFUSED_TYPES
from perl.recipe import load_recipe
from perl.recipe.assets import packaged_recipes
from perl.sandbox import BASE_FOLDER


@pytest.fixture
def printed(perl_command):
    """What a command prints that succeeds and complains of nothing."""

    def run(*arguments, **options):
        result = perl_command(*arguments, **options)
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout

    return run


def test_version_and_help_name_the_package_every_command_and_its_options(printed):
    assert printed("--version") == f"perl-rl, version {perl.__version__}\n"
    text = printed("--help")
    listed = text.partition("Commands:")[2].splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in listed if line.startswith("  ") and line[2:3].strip()}
    assert set(COMMANDS) <= set(rows)
    assert all(len(rows[name]) > 2 for name in COMMANDS)
    assert printed(input="") == text
    helps = {name: printed(name, "--help") for name in COMMANDS}
    assert [name for name, help_ in helps.items() if not help_.startswith(f"Usage: python -m perl {name}")] == []
    for part in ("RECIPE", "[SECTION.KEY=VALUE]", "--output", "--dry-run", "--quiet"):
        assert part in helps["train"]
    listed = helps["reward"].partition("Commands:")[2].splitlines()
    sentences = {line.split()[0]: line.split()[1:] for line in listed if line.strip()}
    assert set(sentences) == {"try", "check"}
    assert all(len(sentence) > 2 for sentence in sentences.values())


def test_recipes_lists_every_packaged_recipe_and_every_setting_and_prints_one(printed, tmp_path):
    plain = printed("recipes", env={**os.environ, "COLUMNS": "200"})
    shown = dict(line.split(maxsplit=1) for line in plain.splitlines())
    alone = [name for name in packaged_recipes() if "/" not in name]
    folders = sorted({name.partition("/")[0] for name in packaged_recipes() if "/" in name})
    assert list(shown) == [*alone, *(f"{folder}/" for folder in folders)]
    assert "recipes: PRML's best design" in shown["prml/"]
    inside = [name for name in packaged_recipes() if name.startswith("prml/")]
    assert [line.split()[0] for line in printed("recipes", "prml").splitlines()] == inside
    assert [row["name"] for row in json.loads(printed("recipes", "prml/", "--json"))] == inside
    found = json.loads(printed("recipes", "--search", "COUNTDOWN ppo", "--json"))
    assert {(row["name"], row["folder"]) for row in found} >= {("countdown/ppo", "countdown")}
    assert json.loads(printed("recipes", "gsm8k", "--search", "tinylora", "--json"))[0]["name"] == "gsm8k/tinylora-7b"
    assert printed("recipes", "prml/clip") == packaged_recipes()["prml/clip"].read_text(encoding="utf-8")
    rows = json.loads(printed("recipes", "--json"))
    assert [row["name"] for row in rows] == list(packaged_recipes())
    for row in rows:
        assert packaged_recipes()[row["name"]].read_text().splitlines()[0] == f"# {row['summary']}"
    quickstart = printed("recipes", "quickstart")
    assert quickstart == packaged_recipes()["quickstart"].read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(quickstart)
    assert load_recipe(tmp_path / "mine.yaml").as_dict() == load_recipe("quickstart").as_dict()
    sentences = {row["name"]: row["summary"] for row in json.loads(printed("recipes", "--settings", "--json"))}
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
    assert [line.split(": ")[0] for line in printed("recipes", "--settings").splitlines()] == list(sentences)


def test_methods_lists_every_method_with_defaults_and_how_it_is_referenced_synced_and_served(printed):
    heading, *lines = printed("methods").partition("\n\n")[0].splitlines()
    titles = list(re.finditer(r"\S+(?: \S+)*", heading))
    names, starts = [title[0] for title in titles], [title.start() for title in titles]
    cells = [[line[a:b].strip() for a, b in itertools.pairwise([*starts, None])] for line in lines]
    assert names == [
        "method",
        "rank",
        "alpha",
        "rate",
        "reference",
        "rollout sync",
        "serving",
        "nf4",
        "int8",
        "fp8",
        "tested",
    ]
    rows = {row[0]: dict(zip(names, row, strict=True)) for row in cells}
    assert list(rows) == list(METHODS)
    assert all(all(row.values()) for row in rows.values())
    for name, method in METHODS.items():
        assert rows[name]["rank"] == str(method.settings.get("rank", "-"))
        assert rows[name]["alpha"] == str(method.settings.get("alpha", "-"))
        assert float(rows[name]["rate"]) == method.rate
    quantised = {name: [rows[name][way] for way in ("nf4", "int8", "fp8")] for name in ("lora", "pissa", "full")}
    assert quantised == {"lora": ["yes"] * 3, "pissa": ["no", "yes", "yes"], "full": ["no"] * 3}
    assert (rows["lora"]["rollout sync"], rows["lora"]["serving"]) == ("adapter", "vLLM LoRA")
    assert (rows["dora"]["rollout sync"], rows["dora"]["serving"]) == ("merged targets", "merged")
    assert (rows["full"]["reference"], rows["vera"]["reference"]) == ("copy of the base", "adapter off")


def test_methods_as_json_and_the_page_of_a_method_hold_settings_options_source_and_why_others_are_refused(printed):
    rows = {row["name"]: row for row in json.loads(printed("methods", "--json"))}
    assert list(rows) == list(METHODS)
    for name, method in METHODS.items():
        assert rows[name]["settings"] == json.loads(json.dumps(dict(method.settings)))
        assert rows[name]["options"] == {**method.defaults, **method.options}
        assert rows[name]["learning_rate"] == pytest.approx(1e-5 * method.rate)
        assert (rows[name]["summary"], rows[name]["source"]) == (method.summary, method.source)
    for name in ("lora", "slicefine", "vera", "full"):
        method, text = METHODS[name], printed("methods", name)
        assert text.splitlines()[0] == f"{name}: {method.summary}"
        for part in (method.source, *method.settings, *method.options, *method.defaults, f"{1e-5 * method.rate:g}"):
            assert part in text, name
        assert json.loads(printed("methods", name, "--json"))[0]["name"] == name
    rows = {row["name"]: row for row in json.loads(printed("methods", "--all", "--json"))}
    types = {name.removeprefix("type: "): row for name, row in rows.items() if name not in METHODS}
    assert {"C3A", *REFUSED_TYPES} <= set(types)
    assert not {"LORA", "VERA", "ADALORA"} & set(types)
    for name, row in types.items():
        assert row["refused"] == REFUSED_TYPES.get(name, "")
        assert (row["reference"] == "refused") is (name in REFUSED_TYPES)
        assert row["tested"] == "no"


def test_algorithms_lists_every_row_and_says_everything_about_one(printed):
    heading, *lines = printed("algorithms").partition("\n\n")[0].splitlines()
    assert heading.split() == ["algorithm", "title", "sets", "source"]
    assert [line.split()[0] for line in lines] == list(ALGORITHMS)
    rows = {row["name"]: row for row in json.loads(printed("algorithms", "--json"))}
    assert list(rows) == list(ALGORITHMS)
    for name, row in ALGORITHMS.items():
        assert rows[name]["sets"] == row.sets
        (line,) = [line for line in lines if line.split()[0] == name]
        assert shown_settings(row.settings) in line
        assert line.endswith(row.source)
    row, text = ALGORITHMS["gspo"], printed("algorithms", "gspo")
    for part in (row.title, row.equation, row.advantage, row.constants, row.differs, row.source, row.paper.title):
        assert part in text
    assert [found["name"] for found in json.loads(printed("algorithms", "gspo", "--json"))] == ["gspo"]


def test_the_methods_of_a_model_are_listed_with_what_they_train_of_it(printed):
    rows = {row["name"]: row for row in json.loads(printed("methods", "--model", "sandbox:base", "--json"))}
    assert list(rows) == list(METHODS)
    model = AutoModelForCausalLM.from_pretrained(BASE_FOLDER)
    total, sides = model.num_parameters(), 0
    for name, layer in model.named_modules():
        sides += layer.in_features + layer.out_features if name.endswith("_proj") else 0
    trainable = {name: row["trainable"] for name, row in rows.items()}
    ranks = {"lora": 16, "shira": 32}  # which trains as many numbers as a LoRA of twice the rank
    assert {name: trainable[name] for name in ranks} == {name: rank * sides for name, rank in ranks.items()}
    assert trainable["full"] == total == 804_224
    for name, row in rows.items():
        assert trainable[name] > 0, name
        assert row["share"] == pytest.approx(trainable[name] / total, rel=1e-12), name
    percent = 100 * trainable["lora"] / total
    assert f"{trainable['lora']:,} ({percent:.2f}%)" in printed("methods", "--model", "sandbox:base")


MISTAKES = (
    (("--recipe",), "no such option"),
    (("trian",), "no such command 'trian' (did you mean train?) [PRL206]"),
    (("train",), "missing argument 'RECIPE'"),
    (("train", "quickstart", "--fast"), "no such option '--fast'"),
    (("recipes", "--yaml"), "no such option '--yaml'"),
    (("methods", "lora", "extra"), "unexpected extra argument"),
    (("methods", "lorra"), "did you mean lora?"),
    (("algorithms", "gsop"), "did you mean gspo?"),
    (("train", "quickstart", "algorithm=gsop"), "algorithm: no algorithm 'gsop' (did you mean gspo?)"),
    (("train", "quickstrat"), "did you mean quickstart?"),
    (("train", "absent.yaml"), "no such file"),
    (("train", "quickstart", "peft.rnak=4"), "did you mean rank?"),
    (("train", "quickstart", "peft.method=lorra"), "did you mean lora?"),
    (("train", "quickstart", "peft.method=ia3", "peft.rank=4"), "peft.rank: ia3 has no rank (leave it out)"),
    (("train", "quickstart", "peft.type=PREFIX_TUNING"), "peft.type: PREFIX_TUNING cannot be trained: its virtual"),
    (("train", "quickstart", "train.reference=rolling:0"), "train.reference: must be base, initial, or rolling:N"),
    (("train", "quickstart", "max_steps"), "is not an override"),
    (("recipes", "quikstart"), "error: no recipe named 'quikstart' (did you mean quickstart?) [PRL201]\n"),
)


def commands_of(group=commands, above=()):
    """Every command that there is, those within others too."""
    with click.Context(group) as context:
        for name in group.list_commands(context):
            one = group.get_command(context, name)
            yield (*above, name), one
            if isinstance(one, click.Group):
                yield from commands_of(one, (*above, name))


def test_an_option_or_command_that_there_is_not_is_one_line_with_the_nearest(capsys):
    found = dict(commands_of())
    assert len(found) > len(COMMANDS)
    for path, one in found.items():
        if one.context_settings.get("ignore_unknown_options"):  # an answer may begin with a dash
            continue
        names = [name for option in one.params for name in option.opts if name.startswith("--")]
        slips = {f"{name}x": f"did you mean {name}?" for name in ("--help", *names)} | {"--zebra": " --help)"}
        for slip, hint in slips.items():
            assert run([*path, slip], "perl") == EXIT_USER_MISTAKE, path
            printed = capsys.readouterr()
            assert printed.out == ""
            [line] = printed.err.splitlines()
            assert line.startswith(f"error: perl {' '.join(path)}: no such option '{slip}' ("), line
            assert hint in line
            assert line.endswith(" [PRL206]")
        if isinstance(one, click.Group) and not one.invoke_without_command:
            assert run([*path, "zebra"], "perl") == EXIT_USER_MISTAKE
            [line] = capsys.readouterr().err.splitlines()
            assert "no such command 'zebra' (there are: " in line


def test_a_mistake_is_reported_on_stderr_with_exit_code_2(perl_command, tmp_path):
    offenders = []
    for arguments, words in MISTAKES:
        result = perl_command(*arguments)
        right = (result.returncode, result.stdout) == (2, "") and words in result.stderr
        if not right or "Traceback" in result.stderr or any(tmp_path.iterdir()):
            offenders.append((arguments, result))
    assert offenders == []
    assert perl_command("recipes", "quikstart").stderr == MISTAKES[-1][1]  # and no more
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
    planned = ["model", "adapter", "trained", "data", "tokens", "rewards", "batch", "steps", "output"]
    assert list(plan) == [*planned, "needs", "time"]
    assert plan["model"].startswith("sandbox:base, ")
    assert plan["adapter"].startswith("lora (rank 4, ")
    completions = asked.train["max_steps"] * asked.batch.prompts_per_step * asked.batch.num_generations
    assert plan["steps"] == f"3 ({completions} completions in all)" == "3 (192 completions in all)"
    step, steps = asked.batch.completions_per_step, int(plan["steps"].split()[0])
    assert step * steps == completions


def test_the_plan_says_what_a_name_sets_what_overrides_it_and_which_names_coincide(perl_command):
    def lines(*overrides):
        result = perl_command("train", "quickstart", *overrides, "--dry-run")
        assert (result.returncode, result.stderr) == (0, "")
        plan = dict(line[2:].split(maxsplit=1) for line in result.stdout.splitlines() if line.startswith("# "))
        asked = load_recipe("quickstart", overrides)
        assert yaml.safe_load(result.stdout) == asked.as_dict()
        return plan

    plan = lines("algorithm=gspo")
    assert plan["algorithm"] == f"gspo: {shown_settings(ALGORITHMS['gspo'].settings)}"
    assert plan["on-policy"].endswith("the same update as sapo, icepop, gmpo")
    plan = lines("algorithm=gspo", "train.beta=0.01", "train.num_iterations=2")
    assert plan["algorithm"].endswith("; overridden: beta 0.01")
    assert "on-policy" not in plan
    assert "on-policy" not in lines("algorithm=gspo", "train.steps_per_generation=2")


def test_a_reader_that_left_is_no_failure_and_no_traceback():
    """As in ``perl recipes | head -0``: the pipe has no reader when the first line is written."""
    for arguments in (("recipes",), ("recipes", "quickstart"), ("methods",), ("--help",)):
        read_end, write_end = os.pipe()
        os.close(read_end)
        command = [sys.executable, "-m", "perl", *arguments]
        try:
            result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
        finally:
            os.close(write_end)
        assert result.stderr == "", arguments
        assert result.returncode in (0, -signal.SIGPIPE), arguments  # 1 would say that the command failed
    process = subprocess.Popen(
        [sys.executable, "-m", "perl", "methods"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() != ""  # one that takes one line gets it
    process.stdout.close()
    process.wait()
    assert process.stderr.read() == ""
    process.stderr.close()
