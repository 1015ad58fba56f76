"""Several processes share the completions of an evaluation: the samples are those of one process, whatever happens."""

import json
import re
from pathlib import Path

import pytest

from tests import warm

# 3 problems a batch, of two tasks; 14 completions of each, so that the last round is smaller than the others.
ASKED = ["--tasks", "sandbox:addition,sandbox:chain", "--limit", "7", "--k", "2", "--batch-size", "3"]
USUAL = [*ASKED, "--max-new-tokens", "20", "--no-lighteval", "--no-base-cache", "--threads", "1"]
SHARED = re.compile(r"^(\w+) on (\S+): .* by (\d+) processes: ([\d +]+) completions$", re.MULTILINE)


@pytest.fixture(scope="module")
def alone(adapter, tmp_path_factory) -> Path:
    """The evaluation by one process."""
    folder = tmp_path_factory.mktemp("alone")
    done = warm.run([*warm.COMMAND, *command(adapter)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "eval"


def command(adapter: Path) -> list[str]:
    return ["eval", "--adapter", str(adapter), *USUAL, "--output", "eval"]


def without_times(folder: Path) -> dict:
    found = json.loads((folder / "results.json").read_text())
    found["config_general"].pop("total_evaluation_time_secondes", None)
    found["perl"].pop("seconds")
    return found


@pytest.mark.nightly
def same(folder: Path, alone: Path) -> bool:
    texts = (folder / "samples.jsonl").read_bytes() == (alone / "samples.jsonl").read_bytes()
    return texts and without_times(folder) == without_times(alone)


@pytest.mark.nightly
def test_samples_and_results_of_two_processes_are_those_of_one(adapter, alone, tmp_path):
    done = warm.run_distributed(["-m", "perl", *command(adapter)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert same(tmp_path / "eval", alone)
    counts = {(who, task): counts.split(" + ") for who, task, _, counts in SHARED.findall(done.stderr)}
    assert sorted(counts) == [(w, t) for w in ("adapter", "base") for t in ("sandbox:addition", "sandbox:chain")]
    for each in counts.values():
        assert len(each) == 2
        assert sum(map(int, each)) == 14
        assert min(map(int, each)) >= 6
    assert done.stdout.count("avg@2 base") == 1  # one process prints
