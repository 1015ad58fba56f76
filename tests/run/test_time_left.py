"""The time left holds from the tenth step on: a warm-up, evaluations that come now and then, one that has not come."""

import pytest

from perl.run.time_left import Recurring, TimeLeft


def simulated(steps, step_seconds, evaluation_seconds, every, completions=0, per_step=0):
    """What is said after each step, and what was really left."""
    time, said, now = TimeLeft((Recurring(every, completions),), per_step), {}, 0.0
    ends = {}
    for step in range(1, steps + 1):
        took = step_seconds(step)
        now += took
        time.add_step(took)
        ends[step] = now
        said[step] = time.left(step, steps)
        between = 0.1 + (evaluation_seconds if step % every == 0 else 0.0)
        now += between
        time.add_between(step, between)
    return {step: (said[step], now - ends[step] - (evaluation_seconds if step % every == 0 else 0.0)) for step in said}


def test_it_holds_from_the_tenth_step_though_the_first_ones_are_slow():
    left = simulated(200, lambda step: 30.0 if step == 1 else 2.0, 0.0, 1000)
    for step in range(10, 190):
        said, true = left[step]
        assert said == pytest.approx(true, rel=0.01)


def test_evaluations_are_counted_as_often_as_they_come():
    left = simulated(200, lambda _: 2.0, 60.0, 20)
    for step in range(21, 180):  # one has come
        said, true = left[step]
        assert said == pytest.approx(true, rel=0.02)


def test_one_that_has_not_come_is_judged_by_what_a_step_samples():
    """64 completions a step take 2 s, so the 1,920 of an evaluation take about 60."""
    left = simulated(200, lambda _: 2.0, 60.0, 50, completions=1920, per_step=64)
    said, true = left[10]
    assert said == pytest.approx(true, rel=0.05)


def test_nothing_is_said_before_a_step_was_timed():
    assert TimeLeft().left(0, 10) is None
    assert TimeLeft().step_seconds is None
