"""What a page is made of: everything that a run wrote, as far as it is, bounded in size, and what differs."""

import itertools
import json
import os
import time

import pytest

from perl.errors import RunFolderError
from perl.reports.completions import read_completions
from perl.reports.curves import MOST_POINTS, Curve, points_each, thinned
from perl.reports.page_data import page_data
from perl.reports.run_log import read_run, read_runs
from tests.reports.written import samples_of, write_rows, write_run


def test_a_run_that_trains_is_shown_as_far_as_it_is(tmp_path):
    folder = write_run(tmp_path / "run", steps=5, planned=12, status="running")
    with (folder / "metrics.jsonl").open("a") as log:
        log.write('{"step": 6, "rew')  # it is being written
    run = read_run(folder)
    assert (run.step, run.planned, run.notes) == (5, 12, ())
    assert run.state == "running, step 5 of 12"
    long_ago = time.time() - 7_200
    os.utime(folder / "metrics.jsonl", (long_ago, long_ago))
    assert read_run(folder).state == "running, step 5 of 12; nothing logged for 2:00:00"


def test_malformed_lines_are_left_out_and_counted(tmp_path):
    folder = write_run(tmp_path / "run", steps=4)
    for name in ("metrics.jsonl", "samples.jsonl", "alarms.jsonl"):
        with (folder / name).open("a") as log:
            log.write('no json\n[1]\n{"step": "x"}\n')
    notes = page_data([read_run(folder)])["runs"][0]["notes"]
    assert [note.split(":")[0] for note in notes] == ["metrics.jsonl", "alarms.jsonl", "samples.jsonl"]
    assert all("3 malformed lines left out" in note for note in notes)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (None, "no such folder"),
        ({}, "holds no run: it has neither run.json nor metrics.jsonl"),
        ({"metrics.jsonl": 'nothing\n{"reward": 1.0}\n'}, "is malformed: none of its 2 lines is a row"),
        ({"run.json": "{", "metrics.jsonl": '{"step": 1}\n'}, "run.json"),
        ({"run.json": '{"status": "running"}'}, "no step is logged yet"),
    ],
)
def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path, files, said):
    folder = tmp_path / "run"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    with pytest.raises(RunFolderError) as error:
        read_run(folder)
    assert said in str(error.value)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_the_folder_of_a_script_has_no_recipe_and_its_steps_are_known_from_a_checkpoint(tmp_path):
    folder = write_run(tmp_path / "script", steps=4, status=None)
    (folder / "checkpoint-4").mkdir()
    (folder / "checkpoint-4" / "trainer_state.json").write_text('{"max_steps": 9}')
    run = read_run(folder)
    assert run.state == "running, step 4 of 9"
    (shown,) = page_data([run])["runs"]
    assert shown["recipe"] is None
    assert "no recipe" in shown["plan"]["note"]
    (folder / "checkpoint-4" / "trainer_state.json").write_text('{"max_steps": 4}')
    assert read_run(folder).state == "done, step 4 of 4"


def test_a_long_curve_keeps_its_ends_and_its_spikes():
    values = [0.0] * 50_000
    values[31_234], values[77] = 9.0, -4.0
    curve = Curve(tuple(range(1, 50_001)), tuple(values))
    short = thinned(curve, MOST_POINTS)
    assert len(short.steps) <= MOST_POINTS
    assert (short.steps[0], short.steps[-1]) == (1, 50_000)
    points = dict(zip(short.steps, short.values, strict=True))
    assert (points[31_235], points[78]) == (9.0, -4.0)
    assert list(short.steps) == sorted(set(short.steps))
    few = Curve((1, 2), (0.5, 0.25))
    assert thinned(few, MOST_POINTS) is few
    assert points_each(20) == MOST_POINTS
    assert 200 <= points_each(450) < 1_000


def test_completions_are_kept_evenly_from_the_first_to_the_last_step(tmp_path):
    log = tmp_path / "samples.jsonl"
    write_rows(log, [row for step in range(1, 401) for row in samples_of(step)])
    whole = read_completions(log, 10_000_000)
    assert (len(whole.groups), whole.steps, whole.left_out) == (400, 400, 0)
    some = read_completions(log, log.stat().st_size // 10)
    steps = [group["step"] for group in some.groups]
    assert 38 <= len(steps) <= 42
    assert (steps[0], steps[-1]) == (1, 400)
    assert len({b - a for a, b in itertools.pairwise(steps[:-1])}) == 1
    (prompt,) = whole.groups[6]["prompts"]
    first, second, *_ = prompt["completions"]
    assert prompt["text"] == "7+1="
    assert first["verdicts"] == {"accuracy": "wrong"}
    assert second["rewards"] == {"accuracy": 1.0, "format": 1.0}
    assert (second["advantage"], second["answers"]) == (1.5, {"accuracy": "8"})
    assert len(second["tokens"]) == len(second["gaps"]) == 4
    assert read_completions(tmp_path / "absent.jsonl", 1).groups == ()


def test_what_differs_is_listed_and_what_is_alike_is_not(tmp_path):
    runs = read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b", method="dora", rate=0.002, steps=8)])
    tables = {table["title"]: table["rows"] for table in page_data(runs)["differences"]}
    recipe = {row["label"]: row["values"] for row in tables["Recipe"]}
    assert recipe == {"peft.method": ["lora", "dora"], "train.learning_rate": ["0.001", "0.002"]}
    assert {row["label"] for row in tables["Run"]} == {"method", "version of torch"}
    outcome = {row["label"]: row["values"] for row in tables["What came out"]}
    assert outcome["state"] == ["done, step 12 of 12", "done, step 8 of 12"]
    assert "±" in outcome["reward"][0]


def test_secrets_of_a_recipe_do_not_reach_the_page(tmp_path):
    folder = write_run(tmp_path / "run", steps=3)
    token = "hf_" + "testTokenOfNobody" * 2
    recipe = (folder / "recipe.yaml").read_text() if (folder / "recipe.yaml").is_file() else ""
    (folder / "recipe.yaml").write_text(f"{recipe}\nrewards:\n  mine:\n    args:\n      api_key: {token}\n")
    facts = json.loads((folder / "run.json").read_text())
    facts |= {"settings": {"their key": token}, "error": f"401 for {token}"}
    (folder / "run.json").write_text(json.dumps(facts))
    other = write_run(tmp_path / "other", steps=3)
    data = json.dumps(page_data(read_runs([folder, other])))
    assert token not in data
    assert "***" in data
