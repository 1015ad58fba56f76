"""Every mistake in `perl eval` is one line that names the option or the file and what to do, before weights are loaded.

The base has no weights: a mistake that is found only after loading them would not be the one that is reported.
"""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from perl.cli.commands import run
from perl.errors import EXIT_USER_MISTAKE
from perl.sandbox import BASE_FOLDER
from tests.evaluations import results, task_result
from tests.hub.scored import write_scored
from tests.saved_adapters import save_adapter

TASK = ("--tasks", "sandbox:addition")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "lora"
    save_adapter(folder)
    return folder


@pytest.fixture(autouse=True)
def lora(saved):
    shutil.copytree(saved, "lora")


@pytest.fixture
def mistake(capsys):
    """What the command line prints for ``perl eval``, one line."""

    def evaluate(*arguments):
        code = run(["eval", *arguments], "perl")
        printed = capsys.readouterr()
        assert code == EXIT_USER_MISTAKE == 2, printed
        assert printed.out == ""
        [line] = printed.err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return evaluate


@pytest.fixture
def on_weightless(mistake):
    """The same of a sound request but for what is given."""

    def evaluate(*arguments):
        line = mistake("--adapter", "lora", "--base", "weightless", *TASK, *arguments)
        assert "safetensors" not in line
        return line

    return evaluate


def data_file(text: str, folder: str = "data") -> tuple[str, ...]:
    Path(folder).mkdir()
    Path(folder, "aime24.jsonl").write_text(text, encoding="utf-8")
    return ("--base", "weightless", "--tasks", "aime24", "--data", folder)


def test_without_a_mistake_the_weights_are_missed_once_nothing_else_is_wrong(mistake, capsys):
    arguments = ("--adapter", "lora", "--base", "weightless", *TASK)
    assert run(["eval", *arguments, "--dry-run"], "perl") == 0
    capsys.readouterr()
    line = mistake(*arguments, "--quiet")
    assert line.startswith("--base: weightless holds no model that can be loaded: ")
    assert "model.safetensors" in line


def test_nothing_to_evaluate(mistake):
    assert mistake(*TASK) == "--adapter: nothing to evaluate is named (or --base for a base alone)"


def test_an_adapter_without_its_option(mistake):
    assert mistake("runs/mine") == "perl eval has no command 'runs/mine' (perl eval --adapter runs/mine)"


@pytest.mark.parametrize(
    ("tasks", "line"),
    [
        ("sandbox:additon", "--tasks: there is no task 'sandbox:additon' (did you mean sandbox:addition?)"),
        ("aime2024", "--tasks: there is no task 'aime2024' (did you mean aime24?)"),
        ("aime24,aime24", "--tasks: aime24 is named 2 times (once is enough)"),
        (",", "--tasks: none is named (there are: aime24, "),
    ],
)
def test_tasks(mistake, tasks, line):
    assert mistake("--adapter", "lora", "--tasks", tasks).startswith(line)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--preset", "gredy"), "--preset: no preset 'gredy' (did you mean greedy?)"),
        (("--k", "4", "--pass-at", "8"), "--pass-at: pass@8 needs 8 completions a problem, there are 4 (--k 8)"),
        (("--pass-at", "0"), "--pass-at: there is no pass@0 (1 to 16)"),
        (("--pass-at", "3;5"), "--pass-at: '3;5' are not numbers with commas between (as in 3,10)"),
        (("--preset", "greedy", "--k", "4"), "--k: 4 greedy completions of a problem are all the same (1, or a "),
        (("--temperature", "0", "--k", "4"), "--k: 4 greedy completions of a problem are all the same (1, or a "),
        (("--temperature", "-1"), "--temperature: -1 is out of range (0 to 100)"),
        (("--temperature", "nan"), "--temperature: nan is out of range (0 to 100)"),
        (("--top-p", "0"), "--top-p: 0 is out of range (0 to 1, not 0)"),
        (("--k", "0"), "--k: 0 is out of range (1 to 100000)"),
        (("--max-new-tokens", "0"), "--max-new-tokens: 0 is out of range (at least 1)"),
        (("--seed", "-1"), "--seed: -1 is out of range (at least 0)"),
        (("--limit", "0"), "--limit: 0 problems are too few (at least 1)"),
        (("--server", "localhost:8000"), "--server: a server is an address like http://localhost:8000, not 'localhost"),
        (("--backend", "vllm-server"), "--backend: vllm-server needs the address of one (--server http://localhost"),
        (("--backend", "transformers", "--server", "http://a"), "--server: transformers asks no server (leave --back"),
    ],
)
def test_settings(on_weightless, arguments, line):
    assert on_weightless(*arguments).startswith(line)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_not_installed(on_weightless):
    assert on_weightless("--backend", "vllm").startswith("--backend vllm needs the package vllm (pip install 'vllm")


def test_an_adapter_that_is_not_there(mistake):
    assert mistake("--adapter", "nowhere", *TASK) == (
        "--adapter: nowhere: no such folder, and not a name on the Hub (user/name)"
    )
    assert mistake("--adapter", "./runs/nowhere", *TASK).startswith("--adapter: ./runs/nowhere: no such folder")


@pytest.mark.parametrize("name", ["runs/nowhere", "user/name@0123abc"])
def test_a_name_that_only_the_hub_could_know_while_it_is_not_asked(mistake, name):
    line = mistake("--adapter", name, *TASK)
    assert line.startswith(f"--adapter: {name} cannot be downloaded from the Hub: ")
    assert "HF_HUB_OFFLINE" in line


def test_a_folder_that_holds_no_adapter(mistake):
    Path("empty").mkdir()
    assert mistake("--adapter", "empty", *TASK) == "--adapter: empty holds no adapter: adapter_config.json is absent"
    Path("lora/adapter_model.safetensors").unlink()
    assert (
        mistake("--adapter", "lora", *TASK) == "--adapter: lora holds no adapter: adapter_model.safetensors is absent"
    )


def test_weights_that_cannot_be_read(mistake):
    Path("lora/adapter_model.safetensors").write_bytes(b"x" * 40)
    assert mistake("--adapter", "lora", *TASK).startswith("--adapter: lora cannot be read: ")


def test_a_whole_model_as_adapter_and_an_adapter_as_base(mistake):
    assert mistake("--adapter", "weightless", *TASK) == (
        "--adapter: weightless is a whole model, not an adapter (--base weightless)"
    )
    assert mistake("--base", "lora", *TASK) == "--base: lora is an adapter, no whole model (--adapter lora)"


@pytest.mark.parametrize(
    ("base", "line"),
    [
        (None, "--base: lora does not say in its adapter_config.json which base it belongs to (name it)"),
        ("user/base", "--base: user/base cannot be loaded: "),
    ],
)
def test_the_base_that_an_adapter_names(mistake, base, line):
    config = json.loads(Path("lora/adapter_config.json").read_text())
    Path("lora/adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
    assert mistake("--adapter", "lora", *TASK).startswith(line)


def test_an_adapter_for_another_base(on_weightless):
    config = json.loads(Path("weightless/config.json").read_text())
    Path("weightless/config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    line = on_weightless()
    assert line.startswith("--adapter: lora does not fit this base, it was made for sandbox:base: ")
    assert "is 128 x 4 there, 64 x 4 here" in line


@pytest.mark.parametrize(
    ("base", "line"),
    [
        ("./nowhere", "--base: ./nowhere: no such folder ("),
        ("sandbox:bse", "--base: the sandbox has no model 'sandbox:bse' (did you mean sandbox:base?)"),
        ("user/base@0123abc", "--base: user/base cannot be loaded: "),
        ("empty", "--base: empty has no config.json (the folder of a whole model, or a name on the Hub)"),
    ],
)
def test_a_base_that_is_not_there(mistake, base, line):
    Path("empty").mkdir()
    assert mistake("--base", base, *TASK).startswith(line)


def test_a_run_without_an_adapter(mistake):
    run_folder = Path("runs/mine")
    run_folder.mkdir(parents=True)
    (run_folder / "recipe.yaml").write_text("model: {name: sandbox:base}\n")
    (run_folder / "run.json").write_text(json.dumps({"status": "interrupted"}))
    assert mistake("--adapter", "runs/mine", *TASK) == (
        "runs/mine: has no trained adapter yet, it is interrupted (perl train finishes it)"
    )
    (run_folder / "run.json").write_text("{")
    assert mistake("--adapter", "runs/mine", *TASK).startswith("runs/mine: holds no run: ")


def test_data_that_is_not_there(mistake):
    arguments = ("--base", "weightless", "--tasks", "aime24")
    line = mistake(*arguments)
    assert line.startswith("task aime24: HuggingFaceH4/aime_2024 cannot be loaded: ")
    assert line.endswith("--data DIR with aime24.jsonl)")
    assert mistake(*arguments, "--data", "nowhere") == (
        "task aime24: no such folder: nowhere (the folder that holds aime24.jsonl)"
    )
    Path("empty").mkdir()
    assert mistake(*arguments, "--data", "empty").startswith("task aime24: empty has no file aime24.jsonl (")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "task aime24: aime24.jsonl is empty"),
        ('{"problem": "1+1", "answer": 2}\n{"problem": 2,\n', "task aime24: line 2 of aime24.jsonl is not JSON: "),
        ("[1]\n", "task aime24: line 1 of aime24.jsonl is not a JSON object"),
        (
            '{"text": "1+1", "answer": 2}\n',
            "task aime24: row 1 of aime24.jsonl has no problem or question, it has text",
        ),
        ('{"problem": "1+1", "answer": ""}\n', "task aime24: 1 of 1 rows of aime24.jsonl have no answer, first row 1"),
    ],
)
def test_data_that_is_broken(mistake, text, line):
    assert mistake(*data_file(text)).startswith(line)


def test_a_prompt_longer_than_the_context(mistake):
    rows = [{"id": "short", "problem": "1+1", "answer": 2}, {"id": "long", "problem": "1+" * 700, "answer": 2}]
    line = mistake(*data_file("".join(json.dumps(row) + "\n" for row in rows)))
    assert line.startswith("--tasks: 1 of 2 prompts of aime24 do not fit into the base's 1024 tokens")
    assert "long" in line
    assert line.endswith("(take a base with a longer context)")


@pytest.mark.parametrize(
    ("output", "reason"), [("file", "it is a file"), ("file/below", "Not a directory"), ("/proc/perl", "No such file")]
)
def test_an_output_folder_that_cannot_be_one(on_weightless, output, reason):
    Path("file").write_text("")
    line = on_weightless("--output", output)
    assert line.startswith(f"{output}: cannot be written: {reason}")
    assert line.endswith("(choose another with --output)")
    assert Path("file").read_text() == ""


def compared(tmp_path, name, **protocol) -> str:
    made = results(task_result("sums", ["10"], ["11"]), name=name)
    write_scored(tmp_path / name, replace(made, protocol=replace(made.protocol, k=2, **protocol)), ["10"], ["11"])
    return name


def test_comparing_what_cannot_be_compared(mistake, tmp_path):
    one, two = compared(tmp_path, "one"), compared(tmp_path, "two", temperature=0.25)
    assert mistake("compare", one) == "one: there is nothing to compare it with (name two folders or more)"
    assert mistake("compare", one, "nowhere") == (
        "nowhere: no results: there is no results.json (perl eval writes them)"
    )
    assert mistake("compare", one, two) == (
        "sandbox:addition (held out) was evaluated otherwise in one and in two: temperature 0.6 and 0.25 "
        "(--force compares them all the same)"
    )
    Path("two/results.json").write_text("{}")
    assert mistake("compare", one, two) == "two/results.json: holds no results of perl eval: 'perl' is absent"


def test_the_base_of_these_tests_is_the_sandboxs_without_its_weights():
    names = {path.name for path in BASE_FOLDER.iterdir()} - {path.name for path in Path("weightless").iterdir()}
    assert names == {"model.safetensors"}
