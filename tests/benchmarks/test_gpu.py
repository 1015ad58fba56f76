"""``benchmarks/gpu.py``: its stages run small on a CPU, and planted defects are found."""

import json
import subprocess
import sys

import gpu
import pytest
import torch
from gpu_stages import attention_cases

from perl.packing.attention import packed_attention

CPU = torch.device("cpu")


@pytest.mark.nightly
def test_all_stages_run_small_on_a_cpu_and_all_checks_hold(tmp_path):
    names = ["doctor", "correct", "step", "memory", "train"]
    command = [sys.executable, gpu.__file__, *names, "--tiny", "--device", "cpu", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "all checks hold" in done.stdout
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert results.keys() == set(names)
    rows = {row["case"]: row for result in results.values() for row in result["rows"]}
    assert [row for row in rows.values() if "error" in row or row.get("ok") is False] == []
    assert rows["pass float32 compiled"]["gradient"] < 1e-5
    assert rows["step beside TRL's, float32"]["difference"] < 1e-5


def wrong_scale(query, key, value, layout, **_):
    return packed_attention(1.05 * query, key, value, layout)


def no_gradient_of_keys(query, key, value, layout, **_):
    return packed_attention(query, key + 0.1 * (key - key.detach()), value, layout)


@pytest.mark.parametrize("wrong", [wrong_scale, no_gradient_of_keys])
def test_attention_that_is_wrong_is_found(wrong, monkeypatch):
    layout = attention_cases.layout_of(attention_cases.SHORT_LENGTHS["shared"], CPU)
    assert attention_cases.compare(CPU, layout, "float32", 64, (8, 2))["ok"]
    monkeypatch.setattr(attention_cases, "packed_attention", wrong)
    assert not attention_cases.compare(CPU, layout, "float32", 64, (8, 2))["ok"]
