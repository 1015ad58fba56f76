"""Processes share the completions of an evaluation, whose samples are those of one; what ends one is said."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perl.errors import PerlError
from perl.evaluation.drawing.by_processes import start_several, to_start
from perl.evaluation.drawing.request import EvalSettings, plan_evaluation
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
    plan = plan_evaluation(str(adapter), None, ["sandbox:addition"], 1, None, "out", settings)
    with pytest.raises(PerlError, match=r"^--device-map: spreads the base over all GPUs, of which each of 2 processes"):
        start_several(plan, [], 2)


@pytest.mark.nightly
def test_an_evaluation_of_which_a_process_was_killed_goes_on(adapter, tmp_path):
    asked = ["--tasks", "sandbox:chain", "--k", "1", "--batch-size", "2", "--max-new-tokens", "16", "--limit", "60"]
    call = [sys.executable, "-m", "perl", "eval", "--adapter", str(adapter), *asked, "--no-base", "--no-lighteval"]
    file = tmp_path / "two" / "samples.jsonl"
    first = subprocess.Popen(
        [*call, "--output", "two", "--processes", "2"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    while first.poll() is None and not (file.is_file() and file.read_bytes().count(b"\n") > 20):
        time.sleep(0.1)
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, said = first.communicate(timeout=300)
    assert first.returncode == 1, said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    assert errors[0].endswith("(the same command goes on) [PRL215]")
    assert "rank 1" in errors[0]
    assert "SIGKILL" in errors[0]
    kept = file.read_text().splitlines()
    again = subprocess.run([*call, "--output", "two", "--processes", "2"], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert f"{len(kept)} of 60 completions are there already" in again.stderr
    alone = subprocess.run([*call, "--output", "one"], cwd=tmp_path, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    assert file.read_bytes() == (tmp_path / "one" / "samples.jsonl").read_bytes()
