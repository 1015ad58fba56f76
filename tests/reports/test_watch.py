"""``perl watch`` in a real terminal and in a pipe: it follows a run to its end and steers nothing."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
from filelock import FileLock
from rich.console import Console

from perl.cli import commands
from perl.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from perl.reports.run_log import read_run
from perl.reports.watch import line_of, seconds_left, view_of
from tests.reports.written import alarm, samples_of, write_rows, write_run

BLOCKS = "▁▂▃▄▅▆▇█"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
COMMAND = [sys.executable, "-m", "perl", "watch"]


def drawn(run, width=100, height=30) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(view_of(run, width, height))
    return console.file.getvalue()


def set_status(folder, status):
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "status": status}))


def test_a_view_has_step_time_left_values_alarms_and_the_newest_completion(tmp_path):
    folder = write_run(tmp_path / "run", steps=5, status="running", alarms=(alarm(3),))
    text = drawn(read_run(folder))
    assert "run  running, step 5 of 12  ETA 0:07" in text
    for name in ("reward", "reward format", "length", "entropy", "KL", "tokens/s", "chain avg@4"):
        assert re.search(rf"^{re.escape(name)} .*[{BLOCKS}]", text, re.MULTILINE), name
    assert re.search(r"^tokens/s +2,000", text, re.MULTILINE)
    assert "PRL401 step 3: entropy fell to 0.010 nats" in text
    assert "step 5, accuracy 0.000, format 1.000, wrong" in text
    assert "Step 5, place 3" in text


def test_text_of_a_model_steers_no_terminal(tmp_path):
    evil = "\x1b]0;owned\x07\x1b[2J\u202e[bold red]x[/]"
    folder = write_run(tmp_path / "run", steps=3, status="running", alarms=(alarm(2, line=evil),))
    write_rows(folder / "samples.jsonl", samples_of(3, 1, prompt=evil, completion=evil, rewards={evil: 1.0}))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    write_rows(
        folder / "metrics.jsonl", [{**row, f"rewards/{evil}/mean": 1.0, f"eval/{evil}/avg@1": 0.5} for row in rows]
    )
    run = read_run(folder)
    for text in (drawn(run), line_of(run, run.rows[-1], None)):
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "[bold red]x[/]" in drawn(run)


def test_time_left_is_judged_by_the_last_steps_without_the_slowest(tmp_path):
    run = read_run(write_run(tmp_path / "run", steps=4, planned=10, status="running"))
    assert seconds_left(run) == pytest.approx(6.0)
    rows = [{"step": step, "step_time": 100.0 if step == 3 else 2.0} for step in range(1, 5)]
    write_rows(run.path / "metrics.jsonl", rows)
    assert seconds_left(read_run(run.path)) == pytest.approx(12.0)


@pytest.mark.parametrize(
    ("status", "code"), [("done", EXIT_DONE), ("failed", EXIT_FAILED), ("interrupted", EXIT_INTERRUPTED)]
)
def test_a_pipe_gets_the_newest_step_and_how_the_run_ended(tmp_path, capsys, status, code):
    folder = write_run(tmp_path / "run", status=status, error="AlarmError: the KL \x1b[2J explodes")
    assert commands.run(["watch", str(folder)], "perl") == code
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("step 12/12  reward 0.9")
    assert "2,000 tokens/s" in first
    assert last.startswith(f"{status}, step 12 of 12")
    assert ("AlarmError: the KL" in last) == (status == "failed")
    assert "\x1b[2J" not in last


class Terminal:
    """``perl watch`` in a terminal of its own."""

    def __init__(self, folder):
        self.text = ""
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.process = subprocess.Popen(
            [*COMMAND, str(folder)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C is a signal only in one's own
        )
        os.close(theirs)

    def until(self, wanted, seconds=60):
        """Reads until a text is there, escapes left out."""
        end = time.monotonic() + seconds
        while wanted not in ESCAPES.sub("", self.text):
            assert time.monotonic() < end, ESCAPES.sub("", self.text)[-2_000:]
            ready, _, _ = select.select([self.ours], [], [], 0.5)
            with contextlib.suppress(OSError):  # it has ended
                self.text += os.read(self.ours, 65_536).decode(errors="replace") if ready else ""


@pytest.fixture
def terminal():
    started = []

    def start(folder):
        started.append(Terminal(folder))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        os.close(one.ours)


@pytest.mark.nightly
def test_a_terminal_is_drawn_anew_until_the_run_ends_or_ctrl_c_leaves_it(tmp_path, terminal):
    folder = write_run(tmp_path / "run", steps=2, planned=4, status="running")
    rows = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").unlink()
    screen, left = terminal(folder), terminal(folder)
    screen.until("running, step 0 of 4")
    assert "\x1b[?1049h" in screen.text  # a screen of its own, which leaves what was there
    (folder / "metrics.jsonl").write_text(rows + '{"step": 3, "reward": 0.75, "num_tokens": 8000, "step_time": 1.0}\n')
    screen.until("running, step 3 of 4")
    left.until("Ctrl-C ends this view")
    os.write(left.ours, b"\x03")
    left.until("run: running, step 3 of 4")
    assert left.process.wait(30) == EXIT_DONE
    assert "Traceback" not in left.text
    set_status(folder, "failed")
    screen.until("run: failed, step 3 of 4")
    assert screen.process.wait(30) == EXIT_FAILED


def test_a_run_that_was_killed_is_told_and_ends_the_watch(tmp_path, capsys):
    """A kill leaves no time to write how the run ended; but nobody holds its folder any more."""
    folder = write_run(tmp_path / "run", steps=2, planned=4, status="running")
    (folder / ".lock").touch()
    long_ago = time.time() - 60
    os.utime(folder / "metrics.jsonl", (long_ago, long_ago))
    with FileLock(folder / ".lock"):
        assert read_run(folder).state.startswith("running, step 2 of 4")
    assert commands.run(["watch", str(folder)], "perl") == EXIT_FAILED
    assert "killed, step 2 of 4; its process is gone, and the same command goes on" in capsys.readouterr().out
