"""Nothing is taken from a file of samples that can be computed again, and nothing that was drawn otherwise."""

from dataclasses import replace

import pytest

from perl.evaluation.drawing.drawn_samples import stored_samples
from perl.evaluation.scoring.protocol import Protocol
from perl.evaluation.scoring.samples import Sample
from perl.evaluation.tasks.draw import RenderedProblem, TaskRequest

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
