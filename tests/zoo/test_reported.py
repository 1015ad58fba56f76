"""The entries that come with the package: published numbers as they were printed, defects said, nothing claimed."""

import re

import pytest

from perl.zoo.catalogue import open_zoo
from perl.zoo.ranking import rank_task

ZOO = open_zoo()
REPORTED = [entry for entry in ZOO.entries.values() if entry.provenance == "reported"]


def averages(prefix, task):
    found = {name: entry.score(task) for name, entry in ZOO.entries.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): round(100 * score.adapter, 2) for name, score in found.items() if score}


def notes(name):
    return " ".join(ZOO.entry(name).notes)


def test_published_numbers_are_there_as_printed_and_an_average_that_is_not_the_mean_is_reported():
    """The means of the printed columns are computed here; where another average is printed, the notes say so."""
    assert averages("perl-1.5b-", "perl-average") == {
        "full": 44.9,
        "dora": 46.6,
        "lora-fa": 45.3,
        "adalora": 44.2,
        "lora-plus": 43.9,
        "miss": 43.4,
        "lora": 42.5,
        "ln-tuning": 41.8,
        "vera": 40.7,
        "ia3": 22.3,
        "milora": 18.0,
        "pissa": 0.2,
    }
    assert averages("perl-7b-", "perl-average") == {"dora": 55.0, "lora-plus": 55.0, "lora": 54.8}
    assert averages("nora-1.5b-", "perl-average") == {
        "base": 41.0,
        "lora": 42.8,
        "nora": 44.4,
        "milora": 18.0,
        "pissa": 0.2,
    }
    assert averages("tina-1.5b-", "tina-average") == {
        "still-3": 48.16,
        "deepscaler": 48.38,
        "open-rs1": 48.56,
        "open-rs2": 50.6,
        "open-rs3": 49.45,
    }
    # They are of single runs, so that they have no order.
    ranking = rank_task(list(ZOO.entries.values()), "perl-average")
    assert {found.rank for found in ranking.ranked} == {"1-12"}
    assert sorted(len(names) for names in ranking.others.values()) == [3, 5]
    printed = {
        "lora": [28.0, 23.1, 68.0, 10.3, 81.3, 30.1],
        "milora": [4.2, 0.0, 19.6, 0.0, 44.5, 11.7],
        "base": [24.3, 20.4, 64.8, 9.9, 80.9, 27.8],
    }
    for name in ("base", "lora", "nora", "milora", "pissa"):
        *columns, average = ZOO.entry(f"nora-1.5b-{name}").scores
        if name in printed:
            assert [score.task for score in columns] == ["aime24", "aime25", "amc23", "hmmt", "math_500", "minerva"]
            assert [score.k for score in columns] == [32, 32, 32, 32, 4, 4]
            assert [round(100 * score.adapter, 1) for score in columns] == printed[name]
        mean = sum(score.adapter for score in columns) / len(columns)
        assert abs(mean - average.adapter) > 0.0005
        said = re.search(r"not the mean of the six printed columns \(that is ([\d.]+)\)", notes(f"nora-1.5b-{name}"))
        assert float(said[1]) == pytest.approx(100 * mean, abs=0.051)


DEFECTS = (
    ("perl-7b-dora", "use_dora false: this is plain LoRA"),
    ("perl-hub-7b-dora", "Plain LoRA: its adapter_config.json says use_dora false"),
    ("perl-7b-lora-plus", "unless it was run with local edits this is plain LoRA"),
    ("perl-hub-7b-lora-plus-20251218", "trains plain LoRA whatever method is asked for"),
    ("perl-hub-adalora-20251212", "trains plain LoRA whatever method is asked for"),
    ("perl-hub-rslora-20251223", "trains plain LoRA whatever method is asked for"),
    ("perl-1.5b-adalora", "fixed rank of 32"),
    ("perl-1.5b-ia3", "trains the type milora"),
    ("perl-hub-ia3-20251128", "trains the type milora"),
    ("perl-1.5b-milora", "the trained model + B0 A0"),
    ("perl-hub-milora-20251126", "the trained model + B0 A0"),
    ("perl-1.5b-pissa", "randomised SVD"),
    ("perl-1.5b-vera", "q_proj and v_proj"),
    ("perl-1.5b-miss", "q_proj and v_proj"),
    ("perl-1.5b-lora", "rank 16 and alpha 32"),
    ("perl-1.5b-lora-fa", "Read off a figure"),
    ("perl-hub-lora-r32-20251129", "a rate of 5e-6"),
    ("tina-1.5b-open-rs2", "One sample a problem"),
    ("tina-1.5b-open-rs2", "The checkpoint was picked by its score"),
)


def test_reported_entries_claim_nothing_that_nobody_here_has_seen_and_spell_out_their_defects():
    """Of every run that it had one seed; of those dated after the dispatch broke that they are."""
    for entry in REPORTED:
        assert entry.source, entry.name
        assert entry.notes, entry.name
        claims = (entry.adapter.sha256, entry.adapter.shipped, entry.recipe, entry.protocol, entry.licence)
        assert not any(claims), entry.name
        assert all(score.stderr is None and score.base_stderr is None for score in entry.scores), entry.name
        if entry.adapter.repo:
            assert "Nobody here has opened the repository" in notes(entry.name), entry.name
    missing = [(name, defect) for name, defect in DEFECTS if defect not in notes(name)]
    assert missing == []
    scored = [entry for entry in REPORTED if entry.name.startswith("perl-") and entry.scores]
    assert len(scored) == 15
    assert all("One run with seed 42 and no error bars" in " ".join(entry.notes) for entry in scored)
    dated = {entry.name: entry.name[-8:] for entry in REPORTED if re.search(r"-2025\d{4}$", entry.name)}
    after = {name for name, date in dated.items() if date > "20251209"}
    assert after == {name for name in dated if "Dated after 2025-12-09" in notes(name)}
    assert len(dated) > 15
