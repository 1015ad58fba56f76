"""What a plan predicts is near what a real step takes, and a base in shards is never whole in one process."""

import json
import subprocess
import sys

import pytest

from tests.conftest import CHECKOUT


def run(script: str, output, *arguments: str) -> list[dict]:
    command = [sys.executable, str(CHECKOUT / "benchmarks" / script), *arguments, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text())["rows"]


@pytest.mark.nightly
def test_memory_and_flops_of_a_step_are_near_those_that_are_planned(tmp_path):
    (row,) = run("plan.py", tmp_path / "plan.json", "--quick")
    assert abs(row["flops_error"]) < 0.03
    assert abs(row["memory_error"]) < 0.2
    assert row["planned"]["seconds"][0] > 0


@pytest.mark.nightly
def test_processes_that_share_a_base_hold_their_parts(tmp_path):
    rows = run("sharded_memory.py", tmp_path / "sharded.json", "--quick")
    assert [row["processes"] for row in rows] == [1, 2, 4]
    for row in rows:
        assert len(row["ranks"]) == row["processes"]
        assert row["planned"]["part"] == row["base"] / row["processes"]
