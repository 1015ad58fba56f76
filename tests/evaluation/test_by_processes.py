"""``perl eval --processes N`` starts processes that are asked for the same, and what ends one of them is said."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perl.errors import PerlError
from perl.evaluation.drawing.by_processes import start_several, to_start
from perl.evaluation.drawing.request import EvalSettings, plan_evaluation


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
