"""Samples outlive a kill at any byte, belong to one policy each, and end up in order."""

import json
from dataclasses import replace

import pytest

from perl.evaluation.scoring.samples import Sample, SampleFile

ONE = Sample("sums", "p1", 0, 7, "It is \\boxed{3}.\nSo — 3\u2028", 12, False, "right", "3")
TWO = replace(ONE, index=1, status="no_answer", extracted=None, text="", truncated=True)
OTHER = replace(ONE, problem="p0")


@pytest.fixture
def file(tmp_path):
    return SampleFile(tmp_path / "samples.jsonl")


def test_samples_come_back_as_they_were(file):
    file.append("policy", [ONE])
    file.append("policy", [TWO, OTHER])
    assert file.read("policy") == {sample.place: sample for sample in (ONE, TWO, OTHER)}
    assert len(file.path.read_text(encoding="utf-8").split("\n")) == 4  # a line each, whatever the text holds


def test_a_policys_samples_are_its_own_and_of_two_of_a_place_the_later_counts(file):
    file.append("old weights", [ONE])
    file.append("new weights", [replace(ONE, status="wrong")])
    assert file.read("old weights") == {ONE.place: ONE}
    assert not file.read("new weights")[ONE.place].right
    assert file.read("other weights") == {}
    again = replace(ONE, status="wrong")
    file.append("old weights", [again])
    assert file.read("old weights") == {ONE.place: again}
    file.put_first(["old weights"], [ONE.place])
    assert file.read("old weights") == {ONE.place: again}
    assert file.path.read_text(encoding="utf-8").count("\n") == 2


def test_a_kill_at_any_byte_costs_the_last_sample_only(file):
    file.append("policy", [ONE])
    whole = file.path.stat().st_size
    file.append("policy", [TWO])
    content = file.path.read_bytes()
    cuts = range(whole, len(content))
    assert len(cuts) > 100
    for cut in cuts:
        file.path.write_bytes(content[:cut])
        expected = {ONE.place: ONE}
        if cut == len(content) - 1:  # only the line's end is missing
            expected |= {TWO.place: TWO}
        assert file.read("policy") == expected
        file.append("policy", [OTHER])
        assert file.read("policy") == expected | {OTHER.place: OTHER}


def test_lines_of_something_else_are_passed_over(file):
    file.append("policy", [ONE])
    with file.path.open("a") as lines:
        lines.write('\n[1]\n3\n"text"\nnull\n{"policy": "policy", "task": "sums"}\n{"task": "sums"}\n')
    file.append("policy", [TWO])
    assert set(file.read("policy")) == {ONE.place, TWO.place}


def test_what_a_result_stands_on_comes_first_in_order_and_the_rest_stays_after_it(file):
    file.append("adapter", [TWO, ONE])
    file.append("another", [TWO, ONE])
    file.append("base", [OTHER, replace(ONE, task="products"), ONE])
    with file.path.open("a") as lines:
        lines.write('{"policy": "base", "task"')
    file.put_first(["base", "adapter"], [OTHER.place, ONE.place, TWO.place])
    lines = [json.loads(line) for line in file.path.read_text(encoding="utf-8").split("\n")[:-1]]
    kept = [(line["policy"], line["task"], line["problem"], line["index"]) for line in lines]
    first = [("base", "p0", 0), ("base", "p1", 0), ("adapter", "p1", 0), ("adapter", "p1", 1)]
    assert kept[:4] == [(policy, "sums", problem, index) for policy, problem, index in first]
    assert kept[4:] == [("another", "sums", "p1", 1), ("another", "sums", "p1", 0), ("base", "products", "p1", 0)]
    assert file.read("adapter") == {ONE.place: ONE, TWO.place: TWO}
    assert file.read("another") == {ONE.place: ONE, TWO.place: TWO}
    assert [path.name for path in file.path.parent.iterdir()] == ["samples.jsonl"]
    content = file.path.read_text()
    file.put_first([], [])  # nothing is first, nothing is lost
    assert file.path.read_text() == content
