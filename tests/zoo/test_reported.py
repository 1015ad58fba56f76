"""The entries that come with the package claim nothing that nobody here has seen, and say their defects."""

import re

import pytest

from perl.zoo.catalogue import open_zoo
from perl.zoo.ranking import rank_task

ZOO = open_zoo()
REPORTED = [entry for entry in ZOO.entries.values() if entry.provenance == "reported"]


def notes(name):
    return " ".join(ZOO.entry(name).notes)


def test_single_runs_have_no_order_and_a_printed_average_that_is_not_the_mean_is_said_to_be_none():
    """The means of the printed columns are computed here; where another average is printed, the notes say so."""
    ranking = rank_task(list(ZOO.entries.values()), "perl-average")
    assert {row["rank"].text for row in ranking.rows} == {"1-12"}
    assert sorted(len(names) for names in ranking.others.values()) == [3, 5]
    for name in ("base", "lora", "nora", "milora", "pissa"):
        *columns, average = ZOO.entry(f"nora-1.5b-{name}").scores
        mean = sum(score.adapter for score in columns) / len(columns)
        assert abs(mean - average.adapter) > 0.0005
        said = re.search(r"not the mean of the six printed columns \(that is ([\d.]+)\)", notes(f"nora-1.5b-{name}"))
        assert float(said[1]) == pytest.approx(100 * mean, abs=0.051)


def test_reported_entries_claim_nothing_that_nobody_here_has_seen_and_have_notes():
    for entry in REPORTED:
        assert entry.source, entry.name
        assert entry.notes, entry.name
        claims = (entry.adapter.sha256, entry.adapter.shipped, entry.recipe, entry.protocol, entry.licence)
        assert not any(claims), entry.name
        assert all(score.stderr is None and score.base_stderr is None for score in entry.scores), entry.name
        if entry.adapter.repo:
            assert "Nobody here has opened the repository" in notes(entry.name), entry.name
