"""A score belongs to one policy: whatever is edited in its folder or in its samples, the score is the true one."""

import json
import logging
import shutil
from pathlib import Path

import pytest

import perl
from perl.evaluation.request import EvalSettings
from perl.evaluation.results import read_results
from tests.saved_adapters import save_adapter

TASK = "sandbox:addition"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "lora"
    save_adapter(folder)
    return folder


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger="perl")
    return lambda: [record.getMessage() for record in caplog.records]


def evaluate(adapter, output="out", **settings):
    chosen = {"limit": 4, "max_new_tokens": 48, "lighteval": False, "device": "cpu", "with_base": False, **settings}
    return perl.evaluate(adapter, tasks=[TASK], k=1, output=output, settings=EvalSettings(**chosen))


def samples(folder="out") -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "samples.jsonl").read_text().splitlines()]


def write(rows: list[dict], folder="out") -> None:
    (Path(folder) / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def scored(results) -> tuple:
    found = results.task(TASK)
    return found.adapter, found.problems


@pytest.fixture(scope="module")
def done(saved, tmp_path_factory) -> Path:
    """The folder of an evaluation."""
    folder = tmp_path_factory.mktemp("done") / "out"
    evaluate(saved, output=folder)
    return folder


@pytest.fixture
def out(done) -> Path:
    """An evaluation that a test may edit."""
    return Path(shutil.copytree(done, "out"))


def edit(folder, **changes) -> None:
    file = Path(folder) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_config_that_was_edited_is_another_policy_whose_completions_are_drawn(saved, out, said):
    shutil.copytree(saved, "lora")
    first = read_results(out)
    edit("lora", lora_alpha=1e-4)
    second = evaluate("lora")
    assert not [line for line in said() if "there already" in line]
    assert scored(second) == scored(evaluate("lora", output="fresh"))
    assert [row["text"] for row in samples() if row["policy"] in second.task(TASK).samples.values()] != [
        row["text"] for row in samples() if row["policy"] in first.task(TASK).samples.values()
    ]
    assert first.subject["adapter_sha256"] == second.subject["adapter_sha256"]
    assert first.subject["policy"] != second.subject["policy"]
    assert read_results(Path("out", "earlier", first.subject["policy"][:8])).tasks == first.tasks


@pytest.mark.usefixtures("out")
def test_what_only_says_where_the_base_lies_is_the_same_policy(saved, said):
    shutil.copytree(saved, "lora")
    edit("lora", inference_mode=False, peft_version="0.1")
    evaluate("lora")
    assert len([line for line in said() if "4 of 4 completions are there already" in line]) == 1


def flip(row):
    row["status"] = "wrong" if row["status"] == "right" else "right"


def reword(row):
    row["text"] = "It is \\boxed{123456}"


@pytest.mark.parametrize(
    ("change", "drawn_again"),
    [
        (flip, 0),
        (lambda row: row.update(extracted="7"), 0),
        (lambda row: row.update(seed=row["seed"] + 1), 1),
        (lambda row: row.update(tokens=10_000), 1),
        (lambda row: row.update(tokens=0), 1),
        (lambda row: row.update(tokens="many"), 1),
        (lambda row: row.update(extracted=5), 1),
        (lambda row: row.update(problem=["p"]), 1),
        (lambda row: row.update(problem="none of them"), 1),
        (lambda row: row.pop("seed"), 1),
    ],
    ids=["status", "answer", "seed", "long", "no tokens", "many", "number", "list", "unknown", "no seed"],
)
def test_edited_samples_change_no_score_and_are_said(saved, out, change, drawn_again, said):
    expected = scored(read_results(out)), samples()
    rows = samples()
    change(rows[1])
    write(rows)
    again = evaluate(saved)
    assert (scored(again), samples()) == expected
    assert f"adapter on {TASK}: {4 - drawn_again} of 4 completions are there already" in said()
    assert len([line for line in said() if "dropped" in line or "others now" in line or "malformed lines" in line]) == 1


@pytest.mark.usefixtures("out")
def test_an_edited_text_is_judged_by_what_it_says_now(saved):
    rows = samples()
    for row in rows:
        reword(row)
        row["status"] = "right"
    write(rows)
    assert evaluate(saved).task(TASK).adapter.accuracy == 0.0
    assert {row["status"] for row in samples()} == {"wrong"}


def test_verdicts_of_another_verifier_are_given_again_and_both_are_kept(saved, out, said):
    first, file = read_results(out), out / "results.json"
    facts = json.loads(file.read_text())
    facts["perl"]["verifier"] = "0 (of old)"
    file.write_text(json.dumps(facts))
    again = evaluate(saved)
    assert again.tasks == first.tasks
    assert len([line for line in said() if "0 (of old)" in line]) == 1
    assert [read_results(path).verifier for path in Path("out/earlier").glob("*/results.json")] == ["0 (of old)"]
