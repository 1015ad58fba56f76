"""MODEL_ZOO.md and zoo.csv say what the entries say, and the committed ones are of the committed entries."""

import csv
import io
import math

import pytest

from perl.zoo.catalogue import open_zoo
from perl.zoo.entry import Location
from perl.zoo.summary import places, rendered, stale
from tests.zoo.entries import OTHER_PROTOCOL, PROTOCOL, reported, score, seeds, theirs, trained, zoo_of


def markdown(tmp_path, *entries):
    return rendered(zoo_of(tmp_path / "zoo", *entries))["MODEL_ZOO.md"]


def rows(zoo):
    return list(csv.DictReader(io.StringIO(rendered(zoo)["zoo.csv"])))


def test_the_committed_files_are_what_the_committed_entries_give(checkout):
    zoo = open_zoo()
    assert stale(zoo) == []
    assert places(zoo) == {
        "MODEL_ZOO.md": checkout / "MODEL_ZOO.md",
        "zoo.csv": checkout / "model_cards" / "zoo" / "zoo.csv",
    }
    lines = rows(zoo)
    scored = {(line["name"], line["task"]): line for line in lines if line["task"]}
    assert len(scored) == sum(len(entry.scores) for entry in zoo.entries.values())
    for name, entry in zoo.entries.items():
        for score_ in entry.scores:
            line = scored[name, score_.task]
            assert float(line["score"]) == pytest.approx(score_.adapter, rel=1e-12)
            assert float(line["base_score"] or "nan") == pytest.approx(
                math.nan if score_.base is None else score_.base, rel=1e-12, nan_ok=True
            )


def test_what_is_stale_is_said_with_its_line(tmp_path):
    zoo = zoo_of(tmp_path / "zoo", trained("a", score(0.5)))
    assert stale(zoo) == [f"{tmp_path}/zoo/MODEL_ZOO.md: is absent", f"{tmp_path}/zoo/zoo.csv: is absent"]
    for name, text in rendered(zoo).items():
        places(zoo)[name].write_text(text)
    assert stale(zoo) == []
    page = places(zoo)["MODEL_ZOO.md"]
    page.write_text(page.read_text().replace("50.0 ± 1.0", "99.0 ± 1.0") + "more\n")
    [line] = stale(zoo)
    assert line.startswith(f"{page}:")
    assert "99.0" in line
    page.write_text(rendered(zoo)["MODEL_ZOO.md"] + "more\n")
    assert [line.endswith("is 'more', should be absent") for line in stale(zoo)] == [True]


def test_a_protocol_has_a_table_of_its_own_with_the_best_first_and_its_notes_below(tmp_path):
    text = markdown(
        tmp_path / "protocols",
        trained("a-low", score(0.5)),
        trained("b-high", score(0.6), seeds=seeds(0.8)),
        trained("c-hot", score(0.9, protocol_hash=OTHER_PROTOCOL)),
    )
    tables = text.split("### ")[1:]
    assert [table.splitlines()[0] for table in tables] == [
        f"sandbox:base, protocol of sums {PROTOCOL}",
        f"sandbox:base, protocol of sums {OTHER_PROTOCOL}",
    ]
    assert tables[0].splitlines()[2:] == [
        "| name | method | sums | tokens | parameters | size |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| `b-high` | lora | 60.0 ± 1.0 (seeds ± 14.1) | 123,456 | 19,456 | 81.2 kB |",
        "| `a-low` | lora | 50.0 ± 1.0 | 123,456 | 19,456 | 81.2 kB |",
        "",
        "Base: sandbox:base; sums 40.0 ± 1.2.",
        "",
        "",
    ]
    # Notes are numbered once, and tables with scores come first.
    text = markdown(
        tmp_path / "notes",
        reported("a", theirs(0.5), notes=["One seed.", "Its own."]),
        reported("b", theirs(0.4), notes=["One seed."]),
        reported("z", source="Somewhere", notes=["One seed."], adapter=Location(repo="user/all", subfolder="run|1")),
    )
    assert "| `a` [1, 2] | dora |" in text
    assert "| `b` [1] | dora |" in text
    assert text.count("1. One seed.") == 2
    assert "2. Its own." in text
    assert r"| `z` [1] | dora | user/all/run\|1 |" in text
    text = markdown(tmp_path / "order", reported("a", source="A folder"), reported("b", theirs(0.5), source="Paper"))
    assert text.index("### Paper") < text.index("### A folder")


def test_markdown_of_others_means_itself(tmp_path):
    for number, hostile in enumerate(("<script>x</script>", "[x](javascript:x)", "a|b", "line\nbreak")):
        entry = reported("a", theirs(0.5), method=hostile, source=hostile, notes=[hostile])
        text = markdown(tmp_path / f"{number}", entry)
        assert hostile not in text
        assert sum(line.startswith("| ") for line in text.splitlines()) == 3, hostile


def test_the_csv_has_a_line_for_each_score_with_its_values_unrounded(tmp_path):
    entries = [
        trained("a", score(0.123456), score(0.2, "products")),
        reported("b"),
    ]
    first, second, third = rows(zoo_of(tmp_path / "zoo", *entries))
    known = {name: value for name, value in first.items() if value}
    assert known == {
        "name": "a",
        "provenance": "trained-here",
        "base": "sandbox:base",
        "method": "lora",
        "algorithm": "dapo",
        "seed": "0",
        "steps": "50",
        "tokens": "123456",
        "trainable_parameters": "19456",
        "size": "81234",
        "task": "sums",
        "metric": "avg@4",
        "k": "4",
        "n": "500",
        "score": "0.123456",
        "stderr": "0.01",
        "base_score": "0.4",
        "base_stderr": "0.012",
        "protocol": PROTOCOL,
        "weights_sha256": "a" * 64,
        "notes": "0",
    }
    assert second["task"] == "products"
    assert (third["name"], third["task"], third["score"]) == ("b", "", "")
    [row] = rows(zoo_of(tmp_path / "seeds", trained("a", score(0.5), seeds=seeds(0.6, 0.7))))
    assert row["seeds"] == "1:0.6 2:0.7"
