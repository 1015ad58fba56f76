"""A log hears every so often how much is done, also while nothing new is; a terminal and a quiet process do not."""

import logging
import math
import random
import re
import threading

import pytest

import perl
from perl.evaluation.request import EvalSettings
from perl.run import progress as module
from perl.run.progress import Progress, progress
from tests.saved_adapters import save_adapter


@pytest.fixture
def lines(monkeypatch):
    """The logger's lines as they come; one each hundredth of a second, if it is given."""
    logger, found, come = logging.getLogger("perl"), [], threading.Event()

    class Listener(logging.Handler):
        def emit(self, record):
            found.append(record.getMessage())
            come.set()

    listener = Listener()
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 0.01)
    logger.setLevel(logging.INFO)
    logger.addHandler(listener)

    def after_the_next():
        come.clear()
        assert come.wait(60)
        return found[-1]

    yield found, after_the_next
    logger.removeHandler(listener)


def test_a_log_has_lines_with_what_is_done_until_the_end_and_none_where_it_is_quiet(lines):
    found, after_the_next = lines

    def interrupted():
        with progress(2000, "scoring the base on sums", 500) as state:
            assert after_the_next().startswith("scoring the base on sums: 500/2,000 completions in 0:0")
            assert after_the_next().endswith(", ETA not known yet")
            state.update(750)
            after_the_next()  # which may have been made before
            assert ": 1,250/2,000 completions in 0:0" in after_the_next()
            assert "ETA 0:0" in after_the_next()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    count = len(found)
    assert not any(thread.name == "progress" for thread in threading.enumerate())
    logging.getLogger("perl").setLevel(logging.ERROR)
    with progress(10, "scoring"):
        assert not any(thread.name == "progress" for thread in threading.enumerate())
    assert len(found) == count


@pytest.mark.parametrize(
    ("total", "there", "mean", "spread"),
    [(1000, 400, 0.3, 0.0), (2000, 500, 0.12, 1.0), (90, 0, 3.5, 0.5), (64, 63, 2.0, 0.0), (9000, 8000, 61.7, 1.0)],
)
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
        assert f"{there + done:,}/{total:,} completions in " in state.line()
        assert abs(taken - math.fsum(durations[:done])) <= 0.5 + 1e-6
        assert abs(left - remaining) <= 0.5 + 1e-6 + chance


def seconds_of(clock):
    """Of a time as on a clock: hours, if any, minutes and seconds."""
    return sum(60**place * int(part) for place, part in enumerate(reversed(clock.split(":"))))


def test_an_evaluation_says_of_whom_and_on_which_task(lines, tmp_path):
    found, _ = lines
    save_adapter(tmp_path / "adapter")
    chosen = EvalSettings(limit=4, max_new_tokens=40, lighteval=False, device="cpu", batch_size=2)
    perl.evaluate(tmp_path / "adapter", None, ["sandbox:addition"], 2, output="out", settings=chosen)
    said = [line for line in found if "/8 completions in " in line]
    for who in ("base", "adapter"):
        assert any(line.startswith(f"scoring the {who} on sandbox:addition: ") for line in said)
