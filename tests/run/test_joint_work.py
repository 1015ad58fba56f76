"""What processes do together: a failure is told once, and a file that the main process wrote is waited for."""

import json
import re

import pytest

from tests import warm


@pytest.mark.nightly
def test_a_failure_is_told_once_and_a_file_is_waited_for(tmp_path):
    done = warm.run_distributed(["-m", "tests.run.distributed_failures", str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr
    main, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert main["one"]
    assert other["one"]
    for which in ("told", "again"):
        assert other[which] == ["1", "too little of everything"]
        told, error = main[which]
        assert told == "1"
        assert re.fullmatch(r"rank 1 \(pid \d+ on \S+\): too little of everything", error)
    expected = [f"both {b'of 0'.hex()}", f"deep/0 {bytes(range(10)).hex()}", f"deep/1 {bytes(range(1, 13)).hex()}"]
    assert main["carried"] == [*expected, "empty-0 ", "empty-1 ", "IsADirectoryError", "0"]
    assert other["carried"] == [*expected, "empty-0 ", "empty-1 ", "ProcessError", "0"]
    assert main["seen"] == ["0"]
    looks, error = other["seen"]
    assert looks == "4"
    assert "rank 1 (pid " in error
    assert "does not see a as rank 0 does: 1 bytes long (all processes need one folder" in error
