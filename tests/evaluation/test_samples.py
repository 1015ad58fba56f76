"""Samples outlive a kill at any byte, belong to one policy and end up in order; nothing else is taken from them."""

import json
from dataclasses import replace

import pytest

from perl.evaluation.drawing.drawn_samples import stored_samples
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.samples import Sample, SampleFile
from perl.evaluation.tasks.draw import RenderedProblem, TaskRequest

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


PROTOCOL = Protocol(k=2, max_new_tokens=8, seed=3)
GOLDS = {"p0": "3", "p1": "4"}
WANTED = TaskRequest("sums", tuple(RenderedProblem(name, (1,), gold) for name, gold in GOLDS.items()), 8, (0,))


def sample(problem="p0", index=0, text="\\boxed{3}", status="right", extracted="3", **changes) -> Sample:
    seed = PROTOCOL.seed_of("sums", problem, index)
    return replace(Sample("sums", problem, index, seed, text, 5, False, status, extracted), **changes)


def stored(*samples):
    return stored_samples({one.place: one for one in samples}, WANTED, PROTOCOL)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({}, ("right", "3")),  # as it stands
        ({"problem": "p1", "index": 1, "text": "so 4", "status": "no_answer", "extracted": None, "tokens": 8}, None),
        ({"status": "wrong"}, ("right", "3")),
        ({"problem": "p1", "status": "right"}, ("wrong", "3")),
        ({"text": "\\boxed{5}"}, ("wrong", "5")),
        ({"extracted": "7"}, ("right", "3")),
    ],
    ids=str,
)
def test_verdict_and_answer_are_those_of_the_text_whatever_stands_there(written, expected):
    one = sample(**written, truncated=written.get("tokens") == 8)
    expected = expected or ("no_answer", None)
    found = stored(one)
    assert found.samples == {one.place: replace(one, status=expected[0], extracted=expected[1])}
    assert found.judged_otherwise == ((one.status, one.extracted) != expected)
    assert list(found.dropped) == []


@pytest.mark.parametrize(
    ("change", "dropped"),
    [
        ({"seed": 1}, True),
        ({"tokens": 9}, True),
        ({"tokens": 0}, True),
        ({"tokens": 7, "truncated": True}, True),
        ({"problem": "p7"}, True),
        ({"index": -1}, True),
        # Beyond k it is neither taken nor dropped: it is another, larger evaluation's.
        ({"index": 5, "seed": PROTOCOL.seed_of("sums", "p0", 5)}, False),
    ],
    ids=str,
)
def test_what_this_evaluation_cannot_have_drawn_is_dropped(change, dropped):
    bad, good = replace(sample(), **change), sample("p1", 0, "\\boxed{4}", extracted="4")
    found = stored(bad, good)
    assert list(found.dropped) == [bad.place] * dropped
    assert found.samples == {good.place: good}


def test_samples_of_problems_beyond_a_limit_stay_where_they_are():
    wanted = replace(WANTED, asked=WANTED.asked[:1], further=WANTED.asked[1:])
    asked, beyond, forged = sample(), sample("p1"), sample("p1", 1, tokens=9)
    found = stored_samples({one.place: one for one in (asked, beyond, forged)}, wanted, PROTOCOL)
    assert found.samples == {asked.place: asked}
    assert list(found.dropped) == [forged.place]
