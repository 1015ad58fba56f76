"""A log hears every so often how much is done, also while nothing new is; a terminal and a quiet process do not."""

import logging
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


def test_a_log_has_lines_with_what_is_done_and_how_long_it_takes_yet(lines):
    _, after_the_next = lines
    with progress(2000, "scoring the base on sums", 500) as state:
        assert after_the_next().startswith("scoring the base on sums: 500/2,000 completions in 0:0")
        assert after_the_next().endswith(", ETA not known yet")
        state.update(750)
        after_the_next()  # which may have been made before
        assert ": 1,250/2,000 completions in 0:0" in after_the_next()
        assert "ETA 0:0" in after_the_next()


@pytest.mark.parametrize(
    ("total", "there", "done", "seconds"),
    [(1000, 400, 200, 60.0), (2000, 500, 750, 90.0), (90, 0, 1, 3.5), (500_000, 1000, 17, 4321.0), (64, 63, 1, 2.0)],
)
def test_the_time_left_is_judged_by_what_was_done_here(monkeypatch, total, there, done, seconds):
    """What is left takes as long as what was done since the start; what was there before took no time."""
    clock = iter([100.0, 100.0 + seconds])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    state = Progress(total, "scoring", there, "completions")
    state.update(done)
    line = state.line()
    taken, left = map(seconds_of, re.search(r" in ([\d:]+), ETA ([\d:]+)$", line).groups())
    assert line.startswith(f"scoring: {there + done:,}/{total:,} completions in ")
    assert abs(taken - seconds) <= 0.5
    assert abs(left - (total - there - done) * seconds / done) <= 0.5


def seconds_of(clock):
    """Of a time as on a clock: hours, if any, minutes and seconds."""
    return sum(60**place * int(part) for place, part in enumerate(reversed(clock.split(":"))))


def test_no_line_comes_after_the_end_or_where_the_log_is_quiet(lines):
    found, after_the_next = lines

    def interrupted():
        with progress(10, "scoring"):
            after_the_next()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    count = len(found)
    assert not any(thread.name == "progress" for thread in threading.enumerate())
    logging.getLogger("perl").setLevel(logging.ERROR)
    with progress(10, "scoring"):
        assert not any(thread.name == "progress" for thread in threading.enumerate())
    assert len(found) == count


def test_an_evaluation_says_of_whom_and_on_which_task(lines, tmp_path):
    found, _ = lines
    save_adapter(tmp_path / "adapter")
    chosen = EvalSettings(limit=4, max_new_tokens=40, lighteval=False, device="cpu", batch_size=2)
    perl.evaluate(tmp_path / "adapter", None, ["sandbox:addition"], 2, output="out", settings=chosen)
    said = [line for line in found if "/8 completions in " in line]
    for who in ("base", "adapter"):
        assert any(line.startswith(f"scoring the {who} on sandbox:addition: ") for line in said)
