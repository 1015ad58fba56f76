"""``perl eval --processes N`` starts processes that are asked for the same, and what ends one of them is said."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import click
import pytest

import perl
from perl.cli.eval import _columns, _numbers, _numbers_of_tasks, command
from perl.errors import PerlError
from perl.evaluation.by_processes import arguments_of, to_start
from perl.evaluation.request import EvalSettings
from tests.saved_adapters import save_adapter

OTHERS = EvalSettings(
    preset="greedy",
    temperature=0.5,
    top_p=0.9,
    top_k=20,
    min_p=0.1,
    repetition_penalty=1.1,
    max_new_tokens=20,
    system_prompt="Think --hard, 'twice'",
    chat_template="a template.jinja",
    thinking=False,
    seed=3,
    limit={"aime24": 5, "gsm8k": 7},
    few_shot=3,
    columns={"prompt": "question", "answer": "gold"},
    scorer="exact",
    scorer_timeout=30.0,
    pass_at=(2, 3),
    newest_data=True,
    with_base=False,
    base_cache=False,
    predict_only=True,
    lighteval=False,
    backend="vllm-server",
    servers=("http://one:1,key_env=KEY", "http://two:2"),
    server_timeout=9.5,
    sync_folder="some where",
    device="cpu",
    dtype="float32",
    quantization="none",
    attention="eager",
    device_map="balanced",
    batch_size=3,
    threads=2,
)


def parsed(arguments: list[str]) -> dict:
    return command.make_context("eval", arguments, resilient_parsing=False).params


@pytest.mark.parametrize("settings", [EvalSettings(), OTHERS], ids=["the usual", "all others"])
def test_a_started_process_is_asked_for_the_same(settings):
    usual = EvalSettings()
    changed = {f.name for f in fields(EvalSettings) if getattr(settings, f.name) != getattr(usual, f.name)}
    assert changed in (set(), {field.name for field in fields(EvalSettings)})
    given = parsed(arguments_of(["zoo:a", "b"], "base@r1", ["aime24", "gsm8k"], 4, "da ta", Path("out"), settings))
    named = {f.name: given.get(f.name) for f in fields(EvalSettings)}
    named |= {"with_base": not given["no_base"], "lighteval": not given["no_lighteval"]}
    named["base_cache"] = not given["no_base_cache"]
    named |= {"pass_at": _numbers(named["pass_at"]), "columns": _columns(named["columns"])}
    named |= {"limit": _numbers_of_tasks(named["limit"], ""), "few_shot": _numbers_of_tasks(named["few_shot"], "") or 0}
    assert EvalSettings(**named) == settings
    asked = ("adapters", "base", "tasks", "k", "data", "output")
    assert [given[name] for name in asked] == [("zoo:a", "b"), "base@r1", "aime24,gsm8k", 4, "da ta", "out"]


@pytest.mark.parametrize(("thinking", "option"), [(True, ["--thinking"]), (False, ["--no-thinking"]), (None, [])])
def test_a_switch_is_handed_on_as_it_stands(thinking, option):
    given = arguments_of([], "base", ["aime24"], None, None, None, EvalSettings(thinking=thinking))
    assert given == ["--base=base", "--tasks=aime24", *option]
    assert parsed(given)["thinking"] is thinking


def test_processes_are_started_only_where_no_launcher_did(monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert [to_start(number) for number in (None, 1, 2)] == [0, 0, 2]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert [to_start(number) for number in (None, 2)] == [0, 0]
    with pytest.raises(PerlError, match="2 processes were started, and 3 are asked for"):
        to_start(3)


def test_a_base_that_is_spread_over_all_gpus_is_of_one_process(adapter):
    settings = EvalSettings(limit=1, max_new_tokens=4, device="cpu", device_map="auto", lighteval=False)
    with pytest.raises(PerlError, match=r"^--device-map: spreads the base over all GPUs, of which each of 2 processes"):
        perl.evaluate(adapter, tasks=["sandbox:addition"], k=1, output="out", settings=settings, processes=2)
    assert perl.evaluate(adapter, tasks=["sandbox:addition"], k=1, output="out", settings=settings).tasks


def test_less_than_one_process_is_refused():
    with pytest.raises(click.BadParameter, match="not in the range"):
        parsed(["--processes", "0"])


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "lora"
    save_adapter(folder)
    return folder


@pytest.mark.nightly
def test_a_call_with_processes_gives_what_one_without_gives(adapter, tmp_path):
    settings = EvalSettings(max_new_tokens=16, limit=5, batch_size=2, lighteval=False, pass_at=(2,))
    tasks = ["sandbox:addition"]
    alone = perl.evaluate(adapter, tasks=tasks, k=2, output=tmp_path / "one", settings=settings)
    several = perl.evaluate(adapter, tasks=tasks, k=2, output=tmp_path / "two", settings=settings, processes=2)
    assert several.tasks == alone.tasks
    assert (tmp_path / "one" / "samples.jsonl").read_bytes() == (tmp_path / "two" / "samples.jsonl").read_bytes()


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_an_evaluation_that_was_stopped_goes_on(adapter, tmp_path, how):
    asked = [
        "--tasks",
        "sandbox:chain",
        "--k",
        "1",
        "--batch-size",
        "2",
        "--max-new-tokens",
        "16",
        "--no-lighteval",
        "--limit",
        "60",
    ]
    call = [sys.executable, "-m", "perl", "eval", "--adapter", str(adapter), *asked, "--no-base"]
    file = tmp_path / "two" / "samples.jsonl"
    first = subprocess.Popen(
        [*call, "--output", "two", "--processes", "2"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    while first.poll() is None and not (file.is_file() and file.read_bytes().count(b"\n") > 20):
        time.sleep(0.1)
    if how == "interrupted":
        first.send_signal(signal.SIGINT)
    else:
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
    _, said = first.communicate(timeout=300)
    assert first.returncode == (130 if how == "interrupted" else 1), said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    assert re.search(r"\(the same command goes on\) \[PRL21[58]\]$", errors[0])
    assert ("rank 1" in errors[0] and "SIGKILL" in errors[0]) == (how == "killed")
    kept = file.read_text().splitlines()
    again = subprocess.run([*call, "--output", "two", "--processes", "2"], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert f"{len(kept)} of 60 completions are there already" in again.stderr
    alone = subprocess.run([*call, "--output", "one"], cwd=tmp_path, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    assert file.read_bytes() == (tmp_path / "one" / "samples.jsonl").read_bytes()
