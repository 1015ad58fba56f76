"""A test writes into a folder of its own, never into the checkout."""

from pathlib import Path

from tests.hub.push_runs import add_best, publishable


def test_what_names_no_folder_is_written_beside_no_source(tmp_path, monkeypatch, checkout):
    monkeypatch.setenv("PERL_TEST", "1")
    monkeypatch.undo()  # some tests do, half-way
    assert Path.cwd() == tmp_path
    add_best(publishable())
    assert (tmp_path / "run" / "best" / "best.json").is_file()
    assert not (checkout / "run").exists()
