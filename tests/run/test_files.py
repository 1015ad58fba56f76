"""Files and folders are there whole or not at all."""

from contextlib import nullcontext
from unittest.mock import Mock

import pytest

from perl.run.files import new_folder


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
