"""Follows a run until it ends: a view in a terminal that is drawn anew, or a line a step where nobody looks.

folder -> terminal, exit code
"""

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live

from perl.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, visible
from perl.reports.live_view import BLOCKS, LETTERS, line_of, view_of
from perl.reports.run_log import RunLog, read_run

try:
    import termios
    import tty
except ImportError:  # not on Windows, where a view has no keys
    termios = tty = None  # type: ignore[assignment]

CODES = {"done": EXIT_DONE, "failed": EXIT_FAILED, "interrupted": EXIT_INTERRUPTED, "killed": EXIT_FAILED}
"""Status of a run -> the exit code of who watched it end: that of the run itself."""
_LEAVES = ("q", "Q", "\x1b", "\x03")
_SECONDS = 0.5
_SECONDS_DRAWN = 10


def watch(path: Path, console: Console, say: Callable[[str], None]) -> int:
    """Follows a run.

    Args:
        path: Its folder.
        console: The terminal.
        say: Prints a line, where there is no terminal.

    Returns:
        The run's exit code; 0 where the view was left before it ended.

    Raises:
        RunFolderError: The folder holds no run.
    """
    run = _read(path)
    if not console.is_terminal or console.is_dumb_terminal:
        return _lines(path, run, say)
    with contextlib.suppress(KeyboardInterrupt):
        run = _view(path, run, console)
    say(f"{visible(path.name or str(path))}: {_ended(run)}")
    return CODES.get(run.status, EXIT_DONE)


def _view(path: Path, run: RunLog, console: Console) -> RunLog:
    """Draws until the run ends or a person leaves; the run as it was last seen."""
    blocks = BLOCKS if console.encoding.lower().startswith("utf") else LETTERS
    with Live(console=console, screen=True, auto_refresh=False) as live, _keys() as pressed:
        drawn: tuple[object, ...] = ()
        while True:
            width, height = console.size
            # The age of the last step changes by itself.
            if drawn != (now := (width, height, _stamps(path), round(time.time() / _SECONDS_DRAWN))):
                run, drawn = _read(path), now
                live.update(view_of(run, width, height, blocks=blocks), refresh=True)
            if run.status in CODES or pressed(_SECONDS) in _LEAVES:
                return run


def _lines(path: Path, run: RunLog, say: Callable[[str], None]) -> int:
    """A line for the newest step that there is, and for each that comes; an alarm has its own."""
    told, alarms, stamps = max(0, len(run.rows) - 1), len(run.alarms), _stamps(path)
    try:
        while True:
            for index in range(min(told, len(run.rows)), len(run.rows)):
                say(line_of(run, run.rows[index], run.rows[index - 1] if index else None))
            for alarm in run.alarms[alarms:]:
                say(visible(str(alarm.get("line", ""))))
            told, alarms = len(run.rows), len(run.alarms)
            if run.status in CODES:
                say(_ended(run))
                return CODES[run.status]
            waited = time.monotonic()
            while stamps == (stamps := _stamps(path)) and time.monotonic() - waited < _SECONDS_DRAWN:
                time.sleep(_SECONDS)
            run = _read(path)
    except KeyboardInterrupt:
        return EXIT_DONE


def _ended(run: RunLog) -> str:
    """How it ended, and what it said of it."""
    error = str(run.facts.get("error") or "") if run.status == "failed" else ""
    return visible(f"{run.state}: {error}" if error else run.state)


def _read(path: Path) -> RunLog:
    return read_run(path, begun=False, scored=False)


def _stamps(path: Path) -> tuple[tuple[int, int], ...]:
    """Changes with every file that is written."""
    found = []
    for name in ("metrics.jsonl", "run.json", "alarms.jsonl", "samples.jsonl"):
        with contextlib.suppress(OSError):
            stat = (path / name).stat()
            found.append((stat.st_mtime_ns, stat.st_size))
    return tuple(found)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits for a key so many seconds and says which came; empty: none."""

    def waits(seconds: float) -> str:
        time.sleep(seconds)
        return ""

    if termios is None or not sys.stdin.isatty():
        yield waits
        return

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        if not ready:
            return ""
        try:
            return os.read(descriptor, 1).decode(errors="replace") or _LEAVES[0]
        except OSError:  # the terminal is gone, and so is who looked at it
            return _LEAVES[0]

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
