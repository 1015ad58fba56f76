"""Completions that were drawn first and judged later score as those that were judged at once."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import perl
from perl.cli.eval import command
from perl.errors import PerlError
from perl.evaluation.drawing.request import EvalSettings
from perl.evaluation.rescore import rescore
from perl.evaluation.scoring.results import read_results
from tests.oracles.counted_scores import check_scores

TASKS = ("sandbox:addition", "sandbox:chain")
N, K = 4, 2


def evaluate(adapter, output, tasks=TASKS, k=K, **settings):
    usual = {"limit": N, "max_new_tokens": 24, "lighteval": False, "device": "cpu"}
    found = perl.evaluate(adapter, None, tasks, k, output=output, settings=EvalSettings(**{**usual, **settings}))
    return check_scores(found, output)


@pytest.fixture(scope="module")
def judged(adapter, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("judged") / "out"
    evaluate(adapter, folder)
    return folder


@pytest.fixture(scope="module")
def drawn(adapter, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drawn") / "out"
    evaluate(adapter, folder, predict_only=True)
    return folder


def facts(folder) -> dict:
    found = json.loads((Path(folder) / "results.json").read_text())["perl"]
    return {name: value for name, value in found.items() if name != "seconds"}


@pytest.mark.usefixtures("no_model")
def test_drawn_and_judged_later_is_judged_at_once(drawn, judged):
    assert {path.name for path in drawn.iterdir()} - {".lock"} == {"results.json", "samples.jsonl"}
    lines = [json.loads(line) for line in (drawn / "samples.jsonl").read_text().splitlines()]
    assert {line["status"] for line in lines} == {"not_judged"}
    shutil.copytree(drawn, "out")
    found = rescore("out", lighteval=False)
    assert facts("out") == facts(judged)
    assert found.tasks == read_results(judged).tasks
    assert Path("out/samples.jsonl").read_bytes() == (judged / "samples.jsonl").read_bytes()
    assert Path("out/table.md").read_text() == (judged / "table.md").read_text()


def test_the_evaluation_itself_judges_what_was_drawn_and_draws_nothing(drawn, judged, adapter, monkeypatch):
    shutil.copytree(drawn, "out")
    monkeypatch.setattr("perl.rollouts.hf_engine.TransformersEngine.start", None)
    evaluate(adapter, "out")
    assert facts("out") == facts(judged)


@pytest.mark.usefixtures("no_model")
def test_what_a_task_lacks_is_one_line(drawn, judged):
    shutil.copytree(drawn, "out")
    lines = Path("out/samples.jsonl").read_text().splitlines(keepends=True)
    Path("out/samples.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(PerlError, match=r"1 of 8 completions of the base on sandbox:addition are missing .*perl eval"):
        rescore("out")
    with pytest.raises(PerlError, match=r"no results: there is no results\.json"):
        rescore("nowhere")
    with pytest.raises(PerlError, match="sandbox:addition was not scored, perl eval rescore judges"):
        read_results("out")
    shutil.copytree(judged, "other")
    results = json.loads(Path("other/results.json").read_text())
    results["perl"]["tasks"][TASKS[0]]["data"]["sha256"] = "0" * 64
    Path("other/results.json").write_text(json.dumps(results))
    with pytest.raises(PerlError, match="the problems of sandbox:addition in sandbox:addition are not those that were"):
        rescore("other")
    with pytest.raises(PerlError, match=r"--pass-at: there is no pass@3 of 2 completions"):
        rescore(judged, pass_at=[3])
    shutil.copytree(judged, "third")
    assert set(rescore("third", pass_at=[1, 2], lighteval=False).tasks[0].base.pass_at) == {1, 2}


def test_the_command_prints_where_completions_are_and_then_one_table(adapter):
    asked = ["--adapter", str(adapter), "--tasks", TASKS[0], "--limit", "2", "--k", "1", "--max-new-tokens", "8"]
    done = CliRunner().invoke(command, [*asked, "--predict-only", "-q", "-o", "out"])
    assert done.exit_code == 0, done.output
    assert "judge    perl eval rescore out" in done.output
    shown = CliRunner().invoke(command, ["rescore", "out", "-q", "--no-lighteval"])
    assert shown.exit_code == 0, shown.output
    assert "avg@1 base" in shown.output
