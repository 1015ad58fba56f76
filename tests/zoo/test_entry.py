"""An entry says what is known and nothing else, and a zoo is a folder of them."""

import json

import pytest

from perl.errors import PerlError
from perl.zoo.catalogue import VARIABLE, open_zoo
from perl.zoo.entry import Entry, Location, read_entry
from tests.zoo.entries import CURVE, OTHER_PROTOCOL, reported, score, seeds, theirs, trained, zoo_of

GOOD = trained("good", score(0.5), seeds=seeds(0.6))


def written(tmp_path, **changes):
    path = tmp_path / "good.json"
    path.write_text(json.dumps({**json.loads(GOOD.to_json()), **changes}))
    return path


def test_an_entry_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "good.json"
    path.write_text(GOOD.to_json())
    found = read_entry(path)
    assert found == GOOD
    assert found.curve == CURVE
    assert found.to_json() == GOOD.to_json()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nmae": "x"}, "nmae: Extra inputs are not permitted"),
        ({"base": None}, "base: Input should be a valid string"),
        ({"tokens": "many"}, "tokens: "),
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
    ],
)
def test_a_wrong_entry_is_one_line_that_names_the_field(tmp_path, changes, said):
    path = written(tmp_path, **changes)
    with pytest.raises(PerlError) as caught:
        read_entry(path)
    assert str(caught.value).startswith(f"{path}: is not an entry of a zoo: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": NaN}', "\x00", '{"recipe": ' + "[" * 100_000])
def test_a_file_that_is_no_entry_is_refused(tmp_path, text):
    path = tmp_path / "good.json"
    path.write_text(text)
    with pytest.raises(PerlError, match="is not an entry of a zoo"):
        read_entry(path)


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_numbers_that_are_none_are_refused(tmp_path, value):
    path = tmp_path / "good.json"
    path.write_text(GOOD.to_json().replace('"seconds": null', f'"seconds": {value}'))
    with pytest.raises(PerlError, match="seconds: "):
        read_entry(path)


def test_a_huge_file_is_not_read(tmp_path):
    path = tmp_path / "good.json"
    path.write_text(" " * 1_000_001)
    with pytest.raises(PerlError, match="1,000,001 bytes"):
        read_entry(path)


def test_a_file_is_named_as_its_entry(tmp_path):
    path = tmp_path / "other.json"
    path.write_text(GOOD.to_json())
    with pytest.raises(PerlError, match=r"holds the entry 'good' \(name the file good.json\)"):
        read_entry(path)


def test_scores_may_be_compared_within_a_protocol_or_a_metric_of_a_source():
    def how(entry):
        return entry.comparable_as(entry.scores[0])

    assert how(trained("a", score(0.1))) == how(trained("b", score(0.2), method="dora"))
    assert how(trained("a", score(0.1))) != how(trained("b", score(0.1, protocol_hash=OTHER_PROTOCOL)))
    assert how(reported("a", theirs(0.1))) == how(reported("b", theirs(0.2)))
    assert how(reported("a", theirs(0.1))) != how(reported("b", theirs(0.1), source="Another"))
    assert how(reported("a", theirs(0.1))) != how(reported("b", theirs(0.1, metric="pass@32")))


def test_a_gain_has_no_noise_of_subtraction():
    assert score(0.444, base=0.41).gain == 0.034
    assert theirs(0.4).gain is None


def test_a_zoo_is_found_by_name_with_or_without_prefix(tmp_path):
    zoo = zoo_of(tmp_path / "zoo", GOOD, reported("a-paper"))
    assert list(zoo.entries) == ["a-paper", "good"]
    assert zoo.entry("zoo:good") == zoo.entry("good") == GOOD
    assert zoo.shipped_folder(GOOD) == tmp_path / "zoo" / "adapters" / "good"
    with pytest.raises(PerlError, match=r"the zoo has no 'goud' \(did you mean good\?\)"):
        zoo.entry("goud")


def test_a_name_far_from_all_others_is_told_where_they_are(tmp_path):
    zoo = zoo_of(tmp_path, *(reported(f"entry-{number}") for number in range(50)))
    with pytest.raises(PerlError, match=r"\(perl zoo list\)"):
        zoo.entry("zzz")


def test_the_environment_names_another_zoo(tmp_path, monkeypatch):
    zoo_of(tmp_path / "zoo", GOOD)
    assert "good" not in open_zoo().entries
    monkeypatch.setenv(VARIABLE, str(tmp_path / "zoo"))
    assert list(open_zoo().entries) == ["good"]
    with pytest.raises(PerlError, match="is not a zoo"):
        open_zoo(tmp_path / "absent")


def test_an_adapter_may_lie_nowhere_only_if_it_is_reported():
    assert reported("a").adapter == Location()
    with pytest.raises(ValueError, match="names the adapter's files"):
        Entry(name="a", provenance="reproduced", base="b", method="lora")
