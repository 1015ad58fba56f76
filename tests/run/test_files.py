"""Files and folders are there whole or not at all, also for the processes that work together on one."""

import json
import re
from contextlib import nullcontext
from unittest.mock import Mock

import pytest

from perl.run.files import new_folder
from tests import warm


def write(target, weights):
    with new_folder(target) as staged:
        (staged / "config").write_text("{}")
        (staged / "weights").write_text(weights)


def test_a_folder_that_could_not_be_moved_to_its_place_stays_whole_beside_it(tmp_path, monkeypatch):
    target = tmp_path / "adapter"
    for attempt, broken in enumerate((False, True, False)):
        with monkeypatch.context() as changed:
            if broken:
                changed.setattr("perl.run.files.os.replace", Mock(side_effect=OSError("the disk is full")))
            with pytest.raises(OSError, match="full") if broken else nullcontext():
                write(target, str(attempt))
        there = {path.name: (path / "weights").read_text() for path in tmp_path.iterdir()}
        assert there == {".adapter.tmp" if broken else "adapter": str(attempt)}
    with pytest.raises(TypeError):
        write(target, None)
    assert [(path.name, (path / "weights").read_text()) for path in tmp_path.iterdir()] == [("adapter", "2")]


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
