"""``benchmarks/gpu.py``: its rows run small on a CPU, a row that fails costs itself alone, defects are found."""

import json
import subprocess
import sys
import time

import gpu
import pytest
import torch
from gpu_rows import async_grpo, correct
from gpu_rows.setting import Setting

from perl.packing import attention

ROWS_THAT_FAIL = """
import os, signal, time

def fine(setting):
    return {"says": "fine"}

def wrong(setting):
    raise ValueError("wrong\\nin two lines")

def crash(setting):
    os.kill(os.getpid(), signal.SIGKILL)

def hang(setting):
    time.sleep(600)
"""


@pytest.mark.nightly
def test_all_rows_run_small_on_a_cpu_and_all_checks_hold(tmp_path):
    command = [sys.executable, gpu.__file__, "first", "rest", "--tiny", "--device", "cpu", "--minutes", "9"]
    done = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"first.json", "first.log"}
    rows = json.loads((tmp_path / "first.json").read_text())["rows"]
    assert [row["row"] for row in rows] == [row.name for name in ("first", "rest") for row in gpu.GROUPS[name]]
    assert not any("skipped" in row for row in rows)


@pytest.mark.nightly
def test_a_row_that_fails_crashes_or_hangs_costs_itself_alone(tmp_path, monkeypatch):
    (tmp_path / "rows_that_fail.py").write_text(ROWS_THAT_FAIL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ["fine", "wrong", "crash", "hang", "fine"]
    rows = [gpu.Row(name, 1.0 if name == "hang" else 20.0, f"rows_that_fail.{name}") for name in names]
    results, log = tmp_path / "rows.json", tmp_path / "rows.log"
    found = gpu.run_rows(rows, gpu.Options("cpu", True, None, time.monotonic() + 120, results, log))
    assert json.loads(results.read_text())["rows"] == found
    assert [row["row"] for row in found] == names
    said = [row.get("error", row.get("says")) for row in found]
    told = ["fine", "ValueError: wrong in two lines", "ended by SIGKILL", "killed at its limit of 1 s", "fine"]
    assert said == told
    assert "Traceback" in log.read_text()


def wrong_scale(query, key, value, layout, scores):
    return RIGHT(1.05 * query, key, value, layout, scores)


def no_gradient_of_keys(query, key, value, layout, scores):
    return RIGHT(query, key + 0.1 * (key - key.detach()), value, layout, scores)


RIGHT = attention.packed_attention


@pytest.mark.parametrize("wrong", [wrong_scale, no_gradient_of_keys])
def test_attention_that_is_wrong_is_found(wrong, monkeypatch, tmp_path):
    setting = Setting(torch.device("cpu"), True, tmp_path)
    assert correct.passes(setting, "float32", "segment")["ok"]
    monkeypatch.setattr(attention, "packed_attention", wrong)
    assert not correct.passes(setting, "float32", "segment")["ok"]


def test_attention_given_to_trl_s_packing_is_causal_within_a_path():
    query, key, value = (torch.randn(length, heads, 8) for length, heads in ((5, 4), (7, 2), (7, 2)))
    queries, keys = torch.tensor([0, 3, 5]), torch.tensor([0, 3, 7])  # two tokens that see two others and themselves
    found = async_grpo.attend(query, key, value, queries, keys, 3, 4, softmax_scale=None)
    k, v = (x[3:7].repeat_interleave(2, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query[3:5], k) / 8**0.5
    scores[:, 0, 3] = -torch.inf
    torch.testing.assert_close(found[3:5], torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
