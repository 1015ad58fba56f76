"""The entries that come with the package: published numbers as they were printed, defects said, nothing claimed."""

import re

import pytest

from perl.zoo.catalogue import open_zoo
from perl.zoo.ranking import rank_task

ZOO = open_zoo()
REPORTED = [entry for entry in ZOO.entries.values() if entry.provenance == "reported"]
PRINTED = {
    ("perl-1.5b-", "perl-average"): {
        **{"full": 44.9, "dora": 46.6, "lora-fa": 45.3, "adalora": 44.2, "lora-plus": 43.9, "miss": 43.4, "lora": 42.5},
        **{"ln-tuning": 41.8, "vera": 40.7, "ia3": 22.3, "milora": 18.0, "pissa": 0.2},
    },
    ("perl-7b-", "perl-average"): {"dora": 55.0, "lora-plus": 55.0, "lora": 54.8},
    ("nora-1.5b-", "perl-average"): {"base": 41.0, "lora": 42.8, "nora": 44.4, "milora": 18.0, "pissa": 0.2},
    ("tina-1.5b-", "tina-average"): {
        **{"still-3": 48.16, "deepscaler": 48.38, "open-rs1": 48.56, "open-rs2": 50.6, "open-rs3": 49.45},
    },
}


def notes(name):
    return " ".join(ZOO.entry(name).notes)


def test_published_numbers_are_there_as_printed_and_an_average_that_is_not_the_mean_is_reported():
    """The means of the printed columns are computed here; where another average is printed, the notes say so."""
    for (prefix, task), printed in PRINTED.items():
        found = {name: entry.score(task) for name, entry in ZOO.entries.items() if name.startswith(prefix)}
        shown = {name.removeprefix(prefix): round(100 * score.adapter, 2) for name, score in found.items() if score}
        assert shown == printed
    # They are of single runs, so that they have no order.
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
