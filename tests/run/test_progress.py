"""A log hears how much is done, the time left holds, and a run's begin and end are means with their errors."""

import logging
import math
import random
import re
import threading

import pytest

from perl.run import progress as module
from perl.run.logs import ends, ends_text
from perl.run.progress import Progress, Recurring, TimeLeft, progress


def test_a_log_has_lines_with_what_is_done_until_the_end_and_none_where_it_is_quiet(monkeypatch):
    logger, found, come = logging.getLogger("perl"), [], threading.Event()

    class Listener(logging.Handler):
        def emit(self, record):
            found.append(record.getMessage())
            come.set()

    def after_the_next():
        come.clear()
        assert come.wait(60)
        return found[-1]

    def interrupted():
        with progress(2000, "scoring the base on sums", 500) as state:
            assert after_the_next().startswith("scoring the base on sums: 500/2,000 completions in 0:0")
            state.update(750)
            after_the_next()  # which may have been made before
            assert re.search(r": 1,250/2,000 completions in 0:0\d, ETA 0:0", after_the_next())
            raise KeyboardInterrupt

    listener = Listener()
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 0.01)
    logger.setLevel(logging.INFO)
    logger.addHandler(listener)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        logger.setLevel(logging.ERROR)
        with progress(10, "scoring"):
            assert not any(thread.name == "progress" for thread in threading.enumerate())
    finally:
        logger.removeHandler(listener)


@pytest.mark.parametrize(("total", "there", "mean", "spread"), [(1000, 400, 0.3, 0.0), (2000, 500, 0.12, 1.0)])
def test_the_time_left_is_that_of_a_simulated_run(monkeypatch, total, there, mean, spread):
    """Each unit takes a drawn time; what was there before took none. The estimate is as far off as chance allows."""
    draw = random.Random(total)
    durations = [mean * (1 + spread * (2 * draw.random() - 1)) for _ in range(total - there)]
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    state = Progress(total, "scoring", there, "completions")
    assert state.line().endswith(f"scoring: {there:,}/{total:,} completions in 0:00, ETA not known yet")
    for done, seconds in enumerate(durations, start=1):
        clock[0] += seconds
        state.update()
        taken, left = map(seconds_of, re.search(r" in ([\d:]+), ETA ([\d:]+)$", state.line()).groups())
        remaining = math.fsum(durations[done:])
        # The mean of n drawn times has a standard error of s / sqrt(n): five, for what is done and what is left.
        share = mean * spread / math.sqrt(3)
        chance = 5 * share * len(durations[done:]) * math.sqrt(1 / done + 1 / max(1, len(durations[done:])))
        assert abs(taken - math.fsum(durations[:done])) <= 0.5 + 1e-6
        assert abs(left - remaining) <= 0.5 + 1e-6 + chance


def seconds_of(clock):
    """Of a time as on a clock: hours, if any, minutes and seconds."""
    return sum(60**place * int(part) for place, part in enumerate(reversed(clock.split(":"))))


@pytest.mark.parametrize(
    ("evaluation_seconds", "every", "completions", "steps", "off"),
    [
        (60.0, 20, 0, range(21, 180), 0.02),  # one has come
        (60.0, 50, 1920, [10], 0.05),  # none has, and a step samples 64 completions in 2 s
        (0.0, 1000, 0, range(10, 190), 0.01),
    ],
)
def test_the_time_left_of_a_training_counts_evaluations_as_often_as_they_come(
    evaluation_seconds, every, completions, steps, off
):
    time, said, ended, now = TimeLeft((Recurring(every, completions),), 64), {}, {}, 0.0
    assert time.left(0, 200) is None
    for step in range(1, 201):
        took = 30.0 if step == 1 else 2.0  # caches are empty
        now += took
        time.add_step(took)
        ended[step], said[step] = now, time.left(step, 200)
        between = 0.1 + (evaluation_seconds if step % every == 0 else 0.0)
        now += between
        time.add_between(step, between)
    for step in steps:
        true = now - ended[step] - (evaluation_seconds if step % every == 0 else 0.0)
        assert said[step] == pytest.approx(true, rel=off)


@pytest.mark.parametrize(("count", "steps"), [(1, 1), (3, 1), (19, 9), (500, 10)])
def test_ends_are_means_of_up_to_ten_steps_that_do_not_overlap(count, steps):
    values = [math.sin(step) + step / 10 for step in range(count)]
    first, last = ends(values)
    assert (first.steps, last.steps) == (steps, steps)
    for mean, own in ((first, values[:steps]), (last, values[count - steps :])):
        assert mean.value == pytest.approx(sum(own) / steps, rel=1e-12)
        squares = sum((value - mean.value) ** 2 for value in own)
        expected = (squares / (steps - 1) / steps) ** 0.5 if steps > 1 else math.nan
        assert mean.error == pytest.approx(expected, rel=1e-9, nan_ok=True)
    assert ends_text([0.0, 0.5, 1.0, 1.0]) == "0.250 ± 0.250 -> 1.000 ± 0.000 (means of 2 steps)"
