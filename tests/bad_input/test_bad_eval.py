"""Every mistake in `perl eval` is one line that names the option or the file and what to do, before weights are loaded.

The base has no weights: a mistake that is found only after loading them would not be the one that is reported.
"""

import importlib.util
import json
import re
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

CODE = re.compile(r" \[PRL2\d\d\]$")
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
        assert CODE.search(line)
        return CODE.sub("", line.removeprefix("error: "))

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
    names = {path.name for path in BASE_FOLDER.iterdir()} - {path.name for path in Path("weightless").iterdir()}
    assert names == {"model.safetensors"}


def beginnings(mistake, rows):
    """Tries every row: arguments, how the line begins (all of it, where that ends with a line break), how it ends.

    Returned is what is wrong.
    """
    lines = [(start, ends, f"{mistake(*arguments)}\n") for arguments, start, *ends in rows]
    return [row for row in lines if not row[2].startswith(row[0]) or not all(row[2].endswith(f"{e}\n") for e in row[1])]


def test_options_that_name_nothing_an_unknown_task_or_a_number_out_of_range(mistake, on_weightless):
    of = ("--adapter", "lora", "--tasks")
    rows = (
        (TASK, "--adapter: nothing to evaluate is named (or --base for a base alone)\n"),
        (("runs/mine",), "perl eval has no command 'runs/mine' (perl eval --adapter runs/mine)\n"),
        (
            (*of, "sandbox:additon"),
            "--tasks: there is no task 'sandbox:additon' (did you mean sandbox:addition?)",
        ),
        ((*of, "aime2024"), "--tasks: there is no task 'aime2024' (did you mean aime24?)"),
        ((*of, "aime24,aime24"), "--tasks: aime24 is named 2 times (once is enough)"),
        ((*of, ","), "--tasks: none is named (there are: aime24, "),
    )
    assert beginnings(mistake, rows) == []
    rows = [
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
    ]
    if importlib.util.find_spec("vllm") is None:
        rows.append((("--backend", "vllm"), "--backend vllm needs the package vllm (pip install 'vllm"))
    assert beginnings(on_weightless, rows) == []


def test_adapters_that_are_absent_or_unreadable_and_runs_without_one(mistake):
    Path("empty").mkdir()
    shutil.copytree("lora", "headless")
    Path("headless/adapter_model.safetensors").unlink()
    shutil.copytree("lora", "broken")
    Path("broken/adapter_model.safetensors").write_bytes(b"x" * 40)
    rows = (
        ("nowhere", "nowhere: no such folder, and not a name on the Hub (user/name)\n"),
        ("./runs/nowhere", "./runs/nowhere: no such folder"),
        ("runs/nowhere", "runs/nowhere: no such folder (the folder of a run or an adapter; on the Hub: user/name)"),
        ("empty", "empty holds no adapter: adapter_config.json is absent\n"),
        ("headless", "headless holds no adapter: adapter_model.safetensors is absent\n"),
        ("broken", "broken cannot be read: "),
    )
    given = [(("--adapter", name, *TASK), f"--adapter: {start}", *ends) for name, start, *ends in rows]
    assert beginnings(mistake, given) == []
    line = mistake("--adapter", "user/name@0123abc", *TASK)  # which only the Hub could know
    assert line.startswith("--adapter: user/name@0123abc cannot be downloaded from the Hub: ")
    assert "HF_HUB_OFFLINE" in line
    run_folder = Path("runs/mine")
    run_folder.mkdir(parents=True)
    (run_folder / "recipe.yaml").write_text("model: {name: sandbox:base}\n")
    (run_folder / "run.json").write_text(json.dumps({"status": "interrupted"}))
    assert mistake("--adapter", "runs/mine", *TASK) == (
        "runs/mine: has no trained adapter yet, it is interrupted (perl train finishes it)"
    )
    (run_folder / "run.json").write_text("{")
    assert mistake("--adapter", "runs/mine", *TASK).startswith("runs/mine: holds no run: ")


def test_bases_that_are_absent_or_adapters_or_of_another_size_and_adapters_that_are_bases(mistake, on_weightless):
    Path("empty").mkdir()
    rows = [
        (("--base", "./nowhere"), "--base: ./nowhere: no such folder ("),
        (("--base", "sandbox:bse"), "--base: the sandbox has no model 'sandbox:bse' (did you mean sandbox:base?)"),
        (("--base", "user/base@0123abc"), "--base: user/base cannot be loaded: "),
        (("--base", "empty"), "--base: empty has no config.json (the folder of a whole model, or a name on the Hub)"),
    ]
    rows = [((*arguments, *TASK), start) for arguments, start in rows]
    assert mistake("--adapter", "weightless", *TASK) == (
        "--adapter: weightless is a whole model, not an adapter (--base weightless)"
    )
    assert mistake("--base", "lora", *TASK) == "--base: lora is an adapter, no whole model (--adapter lora)"
    unnamed = "does not say in its adapter_config.json which base it belongs to (name it)"
    for name, named, line in (
        ("baseless", None, f"--base: baseless {unnamed}"),
        ("of-another", "user/base", "--base: user/base cannot be loaded: "),
    ):
        shutil.copytree("lora", name)
        config = json.loads(Path(name, "adapter_config.json").read_text())
        Path(name, "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": named}))
        rows.append((("--adapter", name, *TASK), line))
    assert beginnings(mistake, rows) == []
    config = json.loads(Path("weightless/config.json").read_text())
    Path("weightless/config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    line = on_weightless()
    assert line.startswith("--adapter: lora does not fit this base, it was made for sandbox:base: ")
    assert "is 128 x 4 there, 64 x 4 here" in line


def test_data_that_is_absent_or_malformed_or_too_long_for_the_context(mistake):
    Path("empty").mkdir()
    texts = (
        ("", "aime24.jsonl is empty"),
        ('{"problem": "1+1", "answer": 2}\n{"problem": 2,\n', "line 2 of aime24.jsonl is not JSON: "),
        ("[1]\n", "line 1 of aime24.jsonl is not a JSON object"),
        ('{"text": "1+1", "answer": 2}\n', "row 1 of aime24.jsonl has no problem or question, it has text"),
        ('{"problem": "1+1", "answer": ""}\n', "1 of 1 rows of aime24.jsonl have no answer, first row 1"),
    )
    asked = ("--base", "weightless", "--tasks", "aime24")
    rows = (
        (asked, "HuggingFaceH4/aime_2024 cannot be loaded: ", "--data DIR with aime24.jsonl)"),
        (
            (*asked, "--data", "nowhere"),
            "no such folder: nowhere (the folder that holds aime24.jsonl)\n",
        ),
        ((*asked, "--data", "empty"), "empty has no file aime24.jsonl ("),
        *((data_file(text, f"data{i}"), start) for i, (text, start) in enumerate(texts)),
    )
    rows = [(arguments, f"task aime24: {start}", *ends) for arguments, start, *ends in rows]
    assert beginnings(mistake, rows) == []
    rows = [{"id": "short", "problem": "1+1", "answer": 2}, {"id": "long", "problem": "1+" * 700, "answer": 2}]
    line = mistake(*data_file("".join(json.dumps(row) + "\n" for row in rows), "long"))
    assert line.startswith("--tasks: 1 of 2 prompts of aime24 do not fit into the base's 1024 tokens")
    assert "long" in line
    assert line.endswith("(take a base with a longer context)")


def test_an_output_folder_that_cannot_be_one(on_weightless):
    Path("file").write_text("")
    outputs = (("file", "it is a file"), ("file/below", "Not a directory"), ("/proc/perl", "No such file"))
    rows = [
        (("--output", output), f"{output}: cannot be written: {reason}", "(choose another with --output)")
        for output, reason in outputs
    ]
    assert beginnings(on_weightless, rows) == []
    assert Path("file").read_text() == ""


def compared(tmp_path, name, **protocol) -> str:
    made = results(task_result("sums", ["10"], ["11"]), name=name)
    write_scored(tmp_path / name, replace(made, protocol=replace(made.protocol, k=2, **protocol)), ["10"], ["11"])
    return name


def test_comparing_what_cannot_be_compared(mistake, tmp_path):
    one, two = compared(tmp_path, "one"), compared(tmp_path, "two", temperature=0.25)
    assert mistake("compare", one) == (
        "one: holds the results of one evaluation, and a comparison needs two (name another folder too)"
    )
    assert mistake("compare", one, "nowhere") == (
        "nowhere: no results: there is no results.json (perl eval writes them)"
    )
    assert mistake("compare", one, two) == (
        "sandbox:addition (held out) was evaluated otherwise in one and in two: temperature 0.6 and 0.25 "
        "(--force compares them all the same)"
    )
    Path("two/results.json").write_text("{}")
    assert mistake("compare", one, two) == "two/results.json: holds no results of perl eval: 'perl' is absent"
