"""Nothing is taken from a file of samples that can be computed again, and nothing that was drawn otherwise."""

from dataclasses import replace

import pytest

from perl.evaluation.draw import RenderedProblem, TaskRequest
from perl.evaluation.protocol import Protocol
from perl.evaluation.samples import Sample
from perl.evaluation.stored import stored_samples

PROTOCOL = Protocol(k=2, max_new_tokens=8, seed=3)
GOLDS = {"p0": "3", "p1": "4"}
WANTED = TaskRequest("sums", tuple(RenderedProblem(name, (1,), gold) for name, gold in GOLDS.items()), 8, (0,))


def sample(problem="p0", index=0, text="\\boxed{3}", status="right", extracted="3", **changes) -> Sample:
    seed = PROTOCOL.seed_of("sums", problem, index)
    return replace(Sample("sums", problem, index, seed, text, 5, False, status, extracted), **changes)


def stored(*samples):
    return stored_samples({one.place: one for one in samples}, WANTED, PROTOCOL)


def test_what_is_right_as_it_stands_stays_as_it_is():
    good = sample()
    long = sample("p1", 1, "so 4", "no_answer", None, tokens=8, truncated=True)
    empty = sample("p1", 0, "", "no_answer", None, tokens=1)
    found = stored(good, long, empty)
    assert found.samples == {one.place: one for one in (good, long, empty)}
    assert (found.judged_otherwise, list(found.dropped)) == (0, [])


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"status": "wrong"}, ("right", "3")),
        ({"problem": "p1", "status": "right"}, ("wrong", "3")),
        ({"text": "\\boxed{5}"}, ("wrong", "5")),
        ({"extracted": "7"}, ("right", "3")),
        ({"status": "no_answer", "extracted": None}, ("right", "3")),
    ],
)
def test_verdict_and_answer_are_those_of_the_text_whatever_stands_there(written, expected):
    found = stored(sample(**written))
    (again,) = found.samples.values()
    assert (again.status, again.extracted) == expected
    assert found.judged_otherwise == 1


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"tokens": 9},
        {"tokens": -1},
        {"tokens": 0},
        {"tokens": 7, "truncated": True},
        {"tokens": 2**62},
        {"problem": "p7"},
        {"task": "products"},
        {"index": -1},
    ],
    ids=str,
)
def test_what_this_evaluation_cannot_have_drawn_is_dropped(change):
    bad = sample(**change) if set(change) & {"seed", "tokens"} else replace(sample(), **change)
    found = stored(bad, sample("p1", 0, "\\boxed{4}", extracted="4"))
    assert list(found.dropped) == [bad.place]
    assert len(found.samples) == 1


def test_a_place_beyond_k_is_neither_taken_nor_dropped():
    further = replace(sample(), index=5, seed=PROTOCOL.seed_of("sums", "p0", 5))
    found = stored(further)
    assert (dict(found.samples), list(found.dropped)) == ({}, [])
