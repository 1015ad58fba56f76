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


DEFECTS = (
    ("perl-7b-dora", "use_dora false: this is plain LoRA"),
    ("perl-7b-lora-plus", "unless it was run with local edits this is plain LoRA"),
    ("perl-hub-rslora-20251223", "trains plain LoRA whatever method is asked for"),
    ("perl-1.5b-ia3", "trains the type milora"),
    ("perl-1.5b-milora", "the trained model + B0 A0"),
    ("perl-1.5b-vera", "q_proj and v_proj"),
    ("perl-1.5b-lora-fa", "Read off a figure"),
    ("tina-1.5b-open-rs2", "One sample a problem"),
)


def test_reported_entries_claim_nothing_that_nobody_here_has_seen_and_spell_out_their_defects():
    for entry in REPORTED:
        assert entry.source, entry.name
        assert entry.notes, entry.name
        claims = (entry.adapter.sha256, entry.adapter.shipped, entry.recipe, entry.protocol, entry.licence)
        assert not any(claims), entry.name
        assert all(score.stderr is None and score.base_stderr is None for score in entry.scores), entry.name
        if entry.adapter.repo:
            assert "Nobody here has opened the repository" in notes(entry.name), entry.name
    assert [(name, defect) for name, defect in DEFECTS if defect not in notes(name)] == []
