"""Which answers that never came are chance, and which something between cuts off: played through without a clock."""

import random

import pytest

from perl.rollouts.vllm.lost_answers import CUTS, MOST_IN_A_ROW, LostAnswers

SLOTS = 16


def play(seconds_of, becomes, requests=400):
    """Requests in SLOTS at once, each asked again until it is answered; what is known of the server, and the answers.

    Args:
        seconds_of: How long an answer takes.
        becomes: Given how long it takes, after how long it is lost; None: it comes.
        requests: How many are asked.
    """
    known, waiting, came = LostAnswers(), list(range(requests)), []
    under_way = []
    now = 0.0
    while (waiting or under_way) and known.cut_after_seconds is None:
        while waiting and len(under_way) < SLOTS:
            takes = seconds_of()
            lost_after = becomes(takes)
            ends = now + (takes if lost_after is None else lost_after)
            under_way.append((ends, now, waiting.pop(0), lost_after is not None))
        under_way.sort()
        now, began, number, is_lost = under_way.pop(0)
        if is_lost:
            known.lost(began, now)
            waiting.insert(0, number)
        else:
            known.came(began, now)
            came.append(now - began)
    return known, came


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["equal lengths", "unequal lengths", "broken at any time"])
def test_answers_that_are_lost_by_chance_are_never_taken_for_a_timeout(seed, kind):
    chance = random.Random(seed)
    if kind == "equal lengths":
        known, came = play(lambda: 30 + 0.01 * chance.random(), lambda takes: takes if chance.random() < 0.1 else None)
    else:
        share, until = (0.1, lambda: 1) if kind == "unequal lengths" else (0.2, chance.random)
        known, came = play(
            lambda: chance.lognormvariate(3, 0.7), lambda takes: until() * takes if chance.random() < share else None
        )
    assert known.cut_after_seconds is None
    assert len(came) == 400


@pytest.mark.parametrize("seed", range(20))
def test_a_timeout_is_found_before_many_short_answers_have_taken_the_place_of_long_ones(seed):
    chance = random.Random(seed)
    known, came = play(
        lambda: chance.lognormvariate(3, 0.7), lambda takes: 60.0 + 0.2 * chance.random() if takes > 60 else None
    )
    assert known.cut_after_seconds == pytest.approx(60, rel=0.01)
    assert len(came) < 200


def test_a_proxy_that_is_restarted_takes_all_at_once_and_that_counts_once():
    known = LostAnswers()
    for began in range(20):
        known.lost(float(began), 30.0 + 0.01 * began)
    assert known.in_a_row == 1
    for again in range(1, MOST_IN_A_ROW):
        known.lost(31.0 * again, 31.0 * again + 1)
    assert known.in_a_row == MOST_IN_A_ROW
    known.came(100.0, 101.0)
    assert known.in_a_row == 0


def test_a_longer_answer_that_came_clears_the_suspicion():
    known = LostAnswers()
    for again in range(CUTS - 1):
        known.lost(100.0 * again + 1, 100.0 * again + 31)
    known.came(500.0, 560.0)
    known.lost(600.0, 630.0)
    assert known.cut_after_seconds is None
