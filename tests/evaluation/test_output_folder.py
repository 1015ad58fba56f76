"""Results of another policy or protocol in a folder are kept, each in a place of its own, and one line says so."""

from dataclasses import replace

from perl.evaluation.scoring.found_results import beside_earlier
from perl.evaluation.scoring.results import read_results
from tests.evaluations import results, task_result

SUMS = task_result("sums", ["1100", "0000"], ["1110", "0100"])
OURS = results(SUMS)
OTHER = results(SUMS, adapter_config_sha256="d" * 64)


def put(new, folder):
    """As an evaluation does."""
    beside_earlier(new, folder).write(folder)


def test_another_policys_results_with_their_files_are_moved_and_said(tmp_path, said):
    OURS.write(tmp_path)
    for name in ("table.md", "problems.png", "samples.jsonl"):
        (tmp_path / name).write_text(f"ours: {name}")
    put(OTHER, tmp_path)
    [place] = (tmp_path / "earlier").iterdir()
    assert place.name.startswith(OURS.subject["policy"][:8])
    assert read_results(place) == OURS
    assert read_results(tmp_path) == OTHER
    assert {path.name for path in place.iterdir()} == {"results.json", "table.md", "problems.png"}
    assert (place / "table.md").read_text() == "ours: table.md"
    assert (tmp_path / "samples.jsonl").exists()
    (line,) = said()
    assert "another policy" in line
    assert str(place) in line


def test_every_one_of_many_results_is_kept_once_even_if_they_take_turns(tmp_path, said):
    hot = replace(OURS, protocol=replace(OURS.protocol, temperature=0.9))
    newer = replace(OURS, verifier="2 (by hand)")
    fewer = results(task_result("sums", ["1100"], ["1110"], protocol_hash="f" * 16))
    faster = replace(OURS, engine={**OURS.engine, "backend": "transformers"})
    many = [OURS, hot, newer, fewer, faster, OTHER, results(SUMS, base_sha256="a" * 64)]
    for one in many:
        put(one, tmp_path)
    found = [read_results(path) for path in (tmp_path / "earlier").glob("*/results.json")]
    assert len(found) == len(many) - 1 == len(said())
    assert read_results(tmp_path) == many[-1]
    assert all(one in found for one in many[:-1])
    for one in many * 2:
        put(one, tmp_path)
    found = [read_results(path) for path in (tmp_path / "earlier").glob("*/results.json")]
    assert len(found) == len(many)
    assert all(one in found for one in many)


def test_results_that_cannot_be_read_are_kept_as_they_are(tmp_path, said):
    for number, text in enumerate(("{", '{"perl": {"version": 1}}')):
        (tmp_path / "results.json").write_text(text)
        put(OURS, tmp_path)
        kept = [path.read_text() for path in (tmp_path / "earlier").glob("unreadable-*/results.json")]
        assert len(kept) == number + 1
        assert text in kept
    assert len(said()) == 2
    assert "version is 1" in said()[1]
