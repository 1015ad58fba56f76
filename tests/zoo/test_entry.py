"""An entry says what is known and nothing else, and a zoo is a folder of them."""

import itertools
import json
from decimal import Decimal

import pytest

from perl.errors import PerlError
from perl.zoo.catalogue import VARIABLE, open_zoo
from perl.zoo.entry import Entry, Location, read_entry
from tests.zoo.entries import CURVE, OTHER_PROTOCOL, reported, score, seeds, theirs, trained, zoo_of

GOOD = trained("good", score(0.5), seeds=seeds(0.6))


WRONG_FIELDS = [
    ({"nmae": "x"}, "nmae: Extra inputs are not permitted"),
    ({"base": None}, "base: Input should be a valid string"),
    ({"tokens": -1}, "tokens: "),
    ({"provenance": "guessed"}, "provenance: "),
    ({"curve": [[1, "x"]]}, "curve.0.1: "),
    ({"name": "../good"}, "name: "),
    ({"adapter": {"repo": "a/b/c", "sha256": {"x": "y"}}}, "adapter.repo: "),
    ({"adapter": {}}, "names the adapter's files"),
    ({"provenance": "reported"}, "a reported entry names its source"),
    ({"provenance": "reported", "source": "a paper"}, "a reported score has no protocol hash"),
    ({"scores": [json.loads(score(0.1).model_dump_json())] * 2}, "it has two scores on sums"),
    ({"scores": [{"task": "sums", "metric": "avg@4", "adapter": 46.6}]}, "scores.0.adapter: "),
    ({"scores": [{"task": "sums", "metric": "avg@4", "adapter": 0.4}]}, "the protocol of each score"),
]
NO_ENTRY = [
    *((text, "") for text in ("", "[]", "{", '{"a": NaN}', "\x00", '{"recipe": ' + "[" * 100_000)),
    *((GOOD.to_json().replace('"seconds": null', f'"seconds": {v}'), "seconds: ") for v in ("NaN", "Infinity")),
]


def test_an_entry_is_read_as_it_was_written_or_refused_in_a_line_that_names_file_and_field(tmp_path):
    path = tmp_path / "good.json"
    path.write_text(GOOD.to_json())
    found = read_entry(path)
    assert (found, found.curve, found.to_json()) == (GOOD, CURVE, GOOD.to_json())
    assert reported("a").adapter == Location()  # only what is reported may lie nowhere
    with pytest.raises(ValueError, match="names the adapter's files"):
        Entry(name="a", provenance="trained-here", base="b", method="lora")
    texts = [(json.dumps({**json.loads(GOOD.to_json()), **changes}), part) for changes, part in WRONG_FIELDS]
    for text, part in [*texts, *NO_ENTRY]:
        path.write_text(text)
        with pytest.raises(PerlError) as caught:
            read_entry(path)
        assert str(caught.value).startswith(f"{path}: is not an entry of a zoo: "), (text[:80], part)
        assert part in str(caught.value)
        assert "\n" not in str(caught.value), (text[:80], part)
    other = tmp_path / "other.json"
    other.write_text(GOOD.to_json())
    with pytest.raises(PerlError, match=r"holds the entry 'good' \(name the file good.json\)"):
        read_entry(other)


def test_scores_may_be_compared_within_a_protocol_or_a_metric_of_a_source():
    def how(entry):
        return entry.comparable_as(entry.scores[0])

    assert how(trained("a", score(0.1))) == how(trained("b", score(0.2), method="dora"))
    assert how(trained("a", score(0.1))) != how(trained("b", score(0.1, protocol_hash=OTHER_PROTOCOL)))
    assert how(reported("a", theirs(0.1))) == how(reported("b", theirs(0.2)))
    assert how(reported("a", theirs(0.1))) != how(reported("b", theirs(0.1), source="Another"))
    assert how(reported("a", theirs(0.1))) != how(reported("b", theirs(0.1, metric="pass@32")))


def test_a_gain_is_the_difference_of_the_printed_decimals():
    for adapter, base in itertools.product(range(0, 1000, 37), range(0, 1000, 41)):
        exact = Decimal(adapter - base) / 1000
        assert Decimal(repr(score(adapter / 1000, base=base / 1000).gain)) == exact
    assert theirs(0.4).gain is None


def test_an_entry_is_found_by_name_in_the_named_zoo_or_the_absence_of_either_is_reported(tmp_path, monkeypatch):
    zoo = zoo_of(tmp_path / "zoo", GOOD, reported("a-paper"))
    assert list(zoo.entries) == ["a-paper", "good"]
    assert zoo.entry("zoo:good") == zoo.entry("good") == GOOD
    assert zoo.shipped_folder(GOOD) == tmp_path / "zoo" / "adapters" / "good"
    many = zoo_of(tmp_path / "many", *(reported(f"entry-{number}") for number in range(50)))
    for where, name, said in (
        (zoo, "goud", r"the zoo has no 'goud' \(did you mean good\?\)"),
        (many, "zzz", r"\(perl zoo list\)"),
    ):
        with pytest.raises(PerlError, match=said):
            where.entry(name)
    assert "good" not in open_zoo().entries
    monkeypatch.setenv(VARIABLE, str(tmp_path / "zoo"))
    assert list(open_zoo().entries) == ["a-paper", "good"]
    (tmp_path / "zoo" / "entries" / "odd.json").write_text("{")  # the others are there all the same
    assert list(open_zoo().entries) == ["a-paper", "good"]
    with pytest.raises(PerlError, match=r"odd.json: is not an entry of a zoo"):
        open_zoo().entry("odd")
    with pytest.raises(PerlError, match="is not a zoo"):
        open_zoo(tmp_path / "absent")


def test_the_entries_of_an_installed_package_lie_in_one_file(tmp_path):
    """As ``hatch_build.py`` packs them: the same entries, with the line of a malformed one."""
    files = sorted((open_zoo().folder / "entries").glob("*.json"))
    assert len(files) > 60
    packed = tmp_path / "entries.jsonl"
    packed.write_text("".join(json.dumps(json.loads(file.read_text())) + "\n" for file in files))
    assert open_zoo(tmp_path).entries == open_zoo().entries
    packed.write_text(packed.read_text() + "{}\n")
    found = open_zoo(tmp_path)
    assert found.entries == open_zoo().entries
    assert f"entries.jsonl:{len(files) + 1}: is not an entry of a zoo" in str(found.malformed[str(len(files) + 1)])
