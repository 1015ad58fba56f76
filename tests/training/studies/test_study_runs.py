"""A study that trains: every cell is a run, and nothing is trained twice."""

import pytest

import perl
from perl.run.files import sha256_of
from perl.run.folder import Run

STUDY = """\
recipe: quickstart
overrides:
  {train.max_steps: 2, train.save_steps: 1, train.prompts_per_step: 4, train.num_generations: 4,
   train.per_device_train_batch_size: 16, eval.limit: 4, eval.k: 1}
grid:
  peft.method: [lora]
  peft.rank: [2]
seeds: {score: [5]}
"""


@pytest.mark.nightly
def test_a_study_trains_its_cells_scores_them_and_trains_nothing_twice(tmp_path):
    (tmp_path / "mine.yaml").write_text(STUDY)
    (row,) = perl.study(tmp_path / "mine.yaml", tmp_path / "out").rows
    run = Run.read(tmp_path / "out" / "cells" / "score" / row.name)
    assert (row.status, row.adapter) == ("done", sha256_of(run.adapter / "adapter_model.safetensors"))
    (task,) = run.facts["eval"].values()
    assert row.score == pytest.approx(task["adapter"])
    assert f"`{row.command}`" in (tmp_path / "out" / "report.md").read_text()
    before = (run.path / "run.json").stat().st_mtime_ns
    assert perl.study(tmp_path / "mine.yaml", tmp_path / "out").rows == [row]
    assert (run.path / "run.json").stat().st_mtime_ns == before
