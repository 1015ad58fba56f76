"""Every mistake in `perl eval` is one line that names the option or the file and what to do, before weights are loaded.

The base has no weights: a mistake that is found only after loading them would not be the one that is reported.
"""

import json
import shutil
from pathlib import Path

import pytest

from perl.cli.commands import run
from perl.sandbox import BASE_FOLDER
from tests.saved_adapters import save_adapter

TASK = ("--tasks", "sandbox:addition")
WEIGHTLESS = ("--adapter", "lora", "--base", "weightless", *TASK)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "lora"
    save_adapter(folder)
    return folder


@pytest.fixture(autouse=True)
def lora(saved):
    shutil.copytree(saved, "lora")


@pytest.fixture
def evaluate(refused):
    """What the command line prints for ``perl eval``, one line."""

    def evaluate(*arguments):
        [line] = refused("eval", *arguments)
        return line

    return evaluate


def test_without_a_mistake_the_weights_are_missed_once_nothing_else_is_wrong(evaluate, capsys):
    assert run(["eval", *WEIGHTLESS, "--dry-run"], "perl") == 0
    capsys.readouterr()
    line = evaluate(*WEIGHTLESS, "--quiet")
    assert line.startswith("--base: weightless holds no model that can be loaded: ")
    assert "model.safetensors" in line
    names = {path.name for path in BASE_FOLDER.iterdir()} - {path.name for path in Path("weightless").iterdir()}
    assert names == {"model.safetensors"}


@pytest.mark.parametrize(
    ("arguments", "option", "words"),
    [
        (TASK, "--adapter", "--base for a base alone"),
        (("--adapter", "lora", "--tasks", "sandbox:additon"), "--tasks", "did you mean sandbox:addition?"),
        ((*WEIGHTLESS, "--preset", "gredy"), "--preset", "did you mean greedy?"),
        ((*WEIGHTLESS, "--k", "4", "--pass-at", "8"), "--pass-at", "--k 8"),
        ((*WEIGHTLESS, "--preset", "greedy", "--k", "4"), "--k", "are all the same"),
        ((*WEIGHTLESS, "--temperature", "nan"), "--temperature", "0 to 100"),
        ((*WEIGHTLESS, "--limit", "0"), "--limit", "at least 1"),
        ((*WEIGHTLESS, "--server", "localhost:8000"), "--server", "http://localhost:8000"),
        ((*WEIGHTLESS, "--backend", "vllm-server"), "--backend", "--server http://localhost"),
        ((*WEIGHTLESS, "--backend", "transformers", "--server", "http://a"), "--server", "transformers asks no server"),
        ((*WEIGHTLESS, "--server", "http://a", "--server-timeout", "0"), "--server-timeout", "more than 0 seconds"),
        (("--adapter", "runs/nowhere", *TASK), "--adapter", "runs/nowhere: no such folder"),
        (("--adapter", "empty", *TASK), "--adapter", "adapter_config.json is absent"),
        (("--adapter", "user/name@0123abc", *TASK), "--adapter", "HF_HUB_OFFLINE"),
        (("--adapter", "weightless", *TASK), "--adapter", "--base weightless"),
        (("--base", "lora", *TASK), "--base", "--adapter lora"),
        (("--base", "./nowhere", *TASK), "--base", "./nowhere: no such folder"),
        (("--base", "empty", *TASK), "--base", "has no config.json"),
        (("--base", "sandbox:bse", *TASK), "--base", "did you mean sandbox:base?"),
        (("--base", "weightless", "--tasks", "aime24"), "task aime24", "--data DIR with aime24.jsonl"),
        (("--base", "weightless", "--tasks", "aime24", "--data", "empty"), "task aime24", "no file aime24.jsonl"),
        (
            (*WEIGHTLESS, "--output", "a-file"),
            "a-file",
            "cannot be written: it is a file (choose another with --output)",
        ),
        (("compare", "nowhere"), "nowhere", "perl eval writes them"),
    ],
)
def test_a_mistake_names_its_option_or_place_and_what_to_do(arguments, option, words, evaluate):
    Path("empty").mkdir()
    Path("a-file").write_text("")
    line = evaluate(*arguments)
    assert line.startswith(f"{option}: ")
    assert words in line
    assert "model.safetensors" not in line


def test_an_adapter_that_names_no_base_or_another_or_was_made_for_another_shape(evaluate):
    config = json.loads(Path("lora/adapter_config.json").read_text())
    for named, words in (
        (None, "does not say in its adapter_config.json which base"),
        ("user/base", "user/base cannot"),
    ):
        Path("lora/adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": named}))
        assert evaluate("--adapter", "lora", *TASK).startswith("--base: ")
        assert words in evaluate("--adapter", "lora", *TASK)
    Path("lora/adapter_config.json").write_text(json.dumps(config | {"bias": "all"}))
    line = evaluate(*WEIGHTLESS)
    assert "bias" in line
    assert "model.safetensors" not in line  # before weights are looked for
    Path("lora/adapter_config.json").write_text(json.dumps(config))
    shape = json.loads(Path("weightless/config.json").read_text())
    Path("weightless/config.json").write_text(json.dumps(shape | {"hidden_size": 64}))
    line = evaluate(*WEIGHTLESS)
    assert line.startswith("--adapter: lora does not fit this base, it was made for sandbox:base: ")
    assert "is 128 x 4 there, 64 x 4 here" in line


def test_a_run_without_an_adapter_yet(evaluate):
    run_folder = Path("runs/mine")
    run_folder.mkdir(parents=True)
    (run_folder / "recipe.yaml").write_text("model: {name: sandbox:base}\n")
    (run_folder / "run.json").write_text(json.dumps({"status": "interrupted"}))
    line = evaluate("--adapter", "runs/mine", *TASK)
    assert line.startswith("runs/mine: has no trained adapter yet")
    assert "perl train finishes it" in line


def test_problems_too_long_for_the_context_are_named(evaluate):
    Path("data").mkdir()
    rows = [{"id": "short", "problem": "1+1", "answer": 2}, {"id": "long", "problem": "1+" * 700, "answer": 2}]
    Path("data/aime24.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    line = evaluate("--base", "weightless", "--tasks", "aime24", "--data", "data")
    assert line.startswith("--tasks: 1 of 2 prompts of aime24 do not fit into the base's 1024 tokens")
    assert "long" in line
    assert line.endswith("(take a base with a longer context)")
