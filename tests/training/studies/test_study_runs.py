"""Studies that train: every cell is the run that its command trains alone, whatever was killed."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import perl
from perl.run.files import sha256_of
from perl.run.folder import Run

STUDY = """\
recipe: quickstart
overrides:
  {train.max_steps: 4, train.save_steps: 1, train.prompts_per_step: 4, train.num_generations: 4,
   train.per_device_train_batch_size: 16, eval.limit: 8, eval.k: 1}
grid:
  peft.method: [lora]
  peft.rank: [2]
  train.learning_rate: [1e-3, 1e-2]
seeds: {choose: [0], score: [5]}
halving: {at: [0.5], keep: 0.5}
at_once: 2
"""


def command(folder, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "study.log").open("a") as log:
        line = [sys.executable, "-m", "perl", *arguments]
        return subprocess.Popen(line, cwd=folder, env=environment, stdout=log, stderr=log)


def test_a_study_trains_its_cells_scores_them_and_trains_nothing_twice(tmp_path):
    (tmp_path / "mine.yaml").write_text(STUDY[: STUDY.index("  train.learning_rate")] + "seeds: {score: [5]}\n")
    (row,) = perl.study(tmp_path / "mine.yaml", tmp_path / "out").rows
    run = Run.read(tmp_path / "out" / "cells" / "score" / row.name)
    assert (row.status, row.adapter) == ("done", sha256_of(run.adapter / "adapter_model.safetensors"))
    (task,) = run.facts["eval"].values()
    assert row.score == pytest.approx(task["adapter"])
    assert f"`{row.command}`" in (tmp_path / "out" / "report.md").read_text()
    before = (run.path / "run.json").stat().st_mtime_ns
    assert perl.study(tmp_path / "mine.yaml", tmp_path / "out").rows == [row]
    assert (run.path / "run.json").stat().st_mtime_ns == before


@pytest.mark.nightly
def test_of_a_killed_study_every_cell_ends_as_its_command_alone_does(tmp_path):
    """The study and a cell are killed; the other cell goes on by itself, is paused beside it, and one of them ends."""
    (tmp_path / "mine.yaml").write_text(STUDY)
    first = command(tmp_path, "study", "mine.yaml", "-o", "out")
    end = time.monotonic() + 1200.0
    while len(list(tmp_path.glob("out/cells/*/*/metrics.jsonl"))) < 2:
        assert time.monotonic() < end
        assert first.poll() is None
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    os.kill(_at_work(tmp_path)[0], signal.SIGKILL)
    again = command(tmp_path, "study", "mine.yaml", "-o", "out")
    assert again.wait() == 0, (tmp_path / "study.log").read_text()
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    choosing = [row for row in rows if row["stage"] == "choose"]
    assert sorted(row["status"] for row in choosing) in (["done", "ended early"], ["done", "done"])
    assert [row["status"] for row in rows if row["stage"] == "score"] == ["done"]
    cell = next(row for row in choosing if row["status"] == "done")
    words = shlex.split(cell["command"])
    assert words[:3] == ["OMP_NUM_THREADS=1", "perl", "train"]
    alone = command(tmp_path, *words[2:], "-o", "alone")
    assert alone.wait() == 0
    here, there = tmp_path / "alone", tmp_path / "out" / "cells" / "choose" / cell["name"]
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert sha256_of(here / "adapter" / name) == sha256_of(there / "adapter" / name)
    assert Run.read(here).facts["eval"] == Run.read(there).facts["eval"]


def _at_work(folder):
    """Ids of the processes of the study's cells."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.startswith(b"out/cells/") for word in words) and Path(os.readlink(place / "cwd")) == folder:
            found.append(int(place.name))
    return found
