"""A study that is killed and gone on with: every cell is the run that its command trains alone."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from perl.policy.mapped_base import MappedBase, mapped, write_mapped_base
from perl.policy.model import base_fingerprint, base_identity, load_base
from perl.recipe.sections import ModelSection
from perl.run.folder import Run, sha256_of
from perl.training.studies.carry_out import carry_out
from perl.training.studies.cells import Candidate, cells_of
from perl.training.studies.choose import score_of
from perl.training.studies.conduct import Conduct, usage_rows
from perl.training.studies.crew import crew

STUDY = """\
recipe: quickstart
overrides:
  train: {max_steps: 4, save_steps: 1, prompts_per_step: 4, num_generations: 4, per_device_train_batch_size: 16}
  eval: {limit: 8, k: 1}
grid:
  peft.method: [lora, ln_tuning]
  peft.rank: [2]
  train.learning_rate: [1e-3, 1e-2]
seeds: {choose: [0], score: [5]}
baseline: {peft.method: lora}
halving: {at: [0.5], keep: 0.5}
at_once: 2
"""


def command(folder, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "study.log").open("a") as log:
        line = [sys.executable, "-m", "perl", *arguments]
        return subprocess.Popen(line, cwd=folder, env=environment, stdout=log, stderr=log)


def until(seen, process, what):
    end = time.monotonic() + 1200.0
    while not seen():
        assert time.monotonic() < end, what
        assert process.poll() is None, f"ended before {what}"
        time.sleep(0.1)


def working(folder):
    """Processes that hold a log of the study open."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder) in os.readlink(place / "fd" / "2"):
                found.append(int(place.name))
    return found


@pytest.fixture(scope="module")
def killed_study(tmp_path_factory):
    """The folder of a study that was killed while two cells trained, and then finished."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "mine.yaml").write_text(STUDY)
    first = command(folder, "study", "mine.yaml", "-o", "out")
    until(lambda: len(list(folder.glob("out/cells/*/*/metrics.jsonl"))) >= 2, first, "two cells train")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert working(folder)  # they still finish their steps, on the base that they map, while the next one begins
    again = command(folder, "study", "mine.yaml", "-o", "out")
    assert again.wait() == 0, (folder / "study.log").read_text()
    return folder


def test_a_killed_study_goes_on_and_every_cell_has_its_end(killed_study):
    found = json.loads((killed_study / "out" / "results.json").read_text())
    cells = found["cells"]
    choosing = [cell for cell in cells if cell["stage"] == "choose"]
    assert sorted(cell["status"] for cell in choosing) == ["done", "done", "ended early", "ended early"]
    assert [cell["status"] for cell in cells if cell["stage"] == "score"] == ["done"] * (len(cells) - 4)
    for cell in cells:
        folder = killed_study / "out" / "cells" / cell["stage"] / cell["name"]
        if cell["status"] == "done":
            assert cell["score"] == pytest.approx(score_of(folder), abs=0)
        else:
            assert Run.read(folder).status == "interrupted"
            assert len((folder / "metrics.jsonl").read_text().splitlines()) >= 2  # more of one that was killed
    rates = {title: chosen["settings"]["train.learning_rate"] for title, chosen in found["chosen"].items()}
    scored = {(c["arm"], c["settings"]["train.learning_rate"]) for c in cells if c["stage"] == "score"}
    assert scored == {*rates.items(), ("ln_tuning", rates["lora, rank 2"])}
    assert sum(row["cpu"] for row in usage_rows(killed_study / "out")) > 0
    assert not list((killed_study / "out").glob(".base*"))


def test_a_cell_is_bit_by_bit_the_run_of_its_command(killed_study):
    """The one that has most against it: shared base, forked process, killed, paused beside others, gone on with."""
    found = json.loads((killed_study / "out" / "results.json").read_text())["cells"]
    cell = next(one for one in found if one["stage"] == "choose" and one["status"] == "done")
    words = shlex.split(cell["command"])
    assert words[:3] == ["OMP_NUM_THREADS=1", "perl", "train"]
    alone = command(killed_study, *words[2:], "-o", "alone")
    assert alone.wait() == 0
    here, there = killed_study / "alone", killed_study / "out" / "cells" / cell["stage"] / cell["name"]
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert sha256_of(here / "adapter" / name) == sha256_of(there / "adapter" / name)
    (mine, its) = ([json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in (here, there))
    for key in ("reward", "loss", "grad_norm", "kl"):
        assert [row.get(key) for row in mine] == [row.get(key) for row in its]
    assert Run.read(here).facts["eval"] == Run.read(there).facts["eval"]
    assert Run.read(here).facts["base"] == Run.read(there).facts["base"]


def test_the_command_of_a_study_that_is_done_trains_nothing(killed_study):
    before = (killed_study / "out" / "usage.jsonl").read_text()
    again = command(killed_study, "study", "mine.yaml", "-o", "out")
    assert again.wait() == 0
    assert (killed_study / "out" / "usage.jsonl").read_text() == before


def test_a_cell_that_is_killed_is_begun_once_more_and_takes_no_other(tmp_path):
    small = ("train.max_steps=3", "train.prompts_per_step=4", "eval.limit=8", "eval.k=1")
    cells = cells_of([Candidate({"peft.method": name}) for name in ("lora", "ia3")], [0], "score")
    conduct = Conduct(tmp_path, "quickstart", small, at_once=2)
    ended = {}

    def work():
        with crew(conduct) as hire:
            ended.update(carry_out(conduct, hire, cells))

    thread = threading.Thread(target=work)
    thread.start()
    log = conduct.log_of(cells[0])
    end = time.monotonic() + 1200.0
    while not (victims := [pid for pid in working(tmp_path) if os.readlink(f"/proc/{pid}/fd/2") == str(log)]):
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(min(victims), signal.SIGKILL)
    thread.join()
    assert [ended[cell.name].status for cell in cells] == ["done", "done"]
    assert [row["code"] for row in usage_rows(tmp_path) if row["name"] == cells[0].name] == [-9, 0]


def test_a_done_cell_that_has_lost_its_score_is_scored_again_and_changed_results_are_seen(killed_study):
    out = killed_study / "out"
    results = json.loads((out / "results.json").read_text())
    cell = next(one for one in results["cells"] if one["stage"] == "score")
    run = out / "cells" / "score" / cell["name"]
    facts = json.loads((run / "run.json").read_text())
    before = sha256_of(run / "adapter" / "adapter_model.safetensors")
    (run / "run.json").write_text(json.dumps({**facts, "eval": {}}))
    cell["score"] = 1.0
    (out / "results.json").write_text(json.dumps(results))
    again = command(killed_study, "study", "mine.yaml", "-o", "out")
    assert again.wait() == 0
    assert "results.json was changed by hand" in (killed_study / "study.log").read_text()
    assert Run.read(run).facts["eval"] == facts["eval"]
    scores = {one["name"]: one["score"] for one in json.loads((out / "results.json").read_text())["cells"]}
    assert scores[cell["name"]] == pytest.approx(score_of(run), abs=0)
    assert sha256_of(run / "adapter" / "adapter_model.safetensors") == before


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_mapped_base_is_the_base_and_none_of_it_is_copied(tmp_path, dtype):
    section, cpu = ModelSection(dtype=dtype), torch.device("cpu")
    own = load_base(section, cpu)
    size = write_mapped_base(own, tmp_path / "base")
    assert size == pytest.approx(sum(p.nbytes for p in own.parameters()), rel=1e-2)
    with mapped(MappedBase(tmp_path / "base", section)):
        shared = load_base(section, cpu)
        other = load_base(ModelSection(dtype="float16"), cpu)
    assert next(other.parameters()).dtype == torch.float16
    assert base_fingerprint(shared) == base_fingerprint(own)
    assert base_identity(shared) == base_identity(own)
    assert shared.config.to_dict() == own.config.to_dict()
    ids = torch.arange(3, 60)[None]
    torch.testing.assert_close(shared(ids).logits, own(ids).logits, rtol=0, atol=0)
    pages = (tmp_path / "base" / "numbers.bin").stat().st_ino
    lines = Path("/proc/self/maps").read_text().splitlines()
    held = [line for line in lines if line.split()[4:5] == [str(pages)]]
    assert len(held) >= 1
    with torch.no_grad():
        next(shared.parameters()).zero_()  # which nothing may do; then it is this process's own page
    assert base_fingerprint(own) != base_fingerprint(shared)
    with mapped(MappedBase(tmp_path / "base", section)):
        assert base_fingerprint(load_base(section, cpu)) == base_fingerprint(own)
