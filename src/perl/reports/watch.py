"""Follows a run until it ends: a view in a terminal that is drawn anew, or a line a step where nobody looks.

folder -> terminal, exit code

What a model wrote may hold anything: a terminal is sent only what :func:`perl.errors.visible` leaves.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from perl.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, visible
from perl.reports.completions import newest_completion, text_of
from perl.reports.curves import curves_of, reward_of, task_of
from perl.reports.run_log import METRICS, RunLog, number, read_run
from perl.run.progress import duration
from perl.run.tables import plain

CODES = {"done": EXIT_DONE, "failed": EXIT_FAILED, "interrupted": EXIT_INTERRUPTED, "killed": EXIT_FAILED}
"""Status of a run -> the exit code of who watched it end: that of the run itself."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_FEWEST_LINES = 14
_FEWEST_OF_TEXT = 4
_MOST_ALARMS = 3
_STATES = {"running": "cyan", "done": "green", "failed": "red", "interrupted": "yellow"}
# Steps of which the time left is judged.
_JUDGED = 20
_SECONDS, _SECONDS_DRAWN = 0.5, 10.0
_NAMED = {
    "reward": "reward",
    "teacher/kl": "KL to the teacher",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "truncated",
    "entropy": "entropy",
    "kl": "KL",
    "grad_norm": "gradient norm",
    "sampling/sampling_logp_difference/mean": "engine's gap",
}
_IN_A_LINE = ("reward", "teacher/kl", "completions/mean_length", "entropy", "kl")


def watch(path: Path, console: Console, say: Callable[[str], None]) -> int:
    """Follows a run.

    Args:
        path: Its folder.
        console: The terminal.
        say: Prints a line.

    Returns:
        The run's exit code; 0 where the view was left before it ended.

    Raises:
        RunFolderError: The folder holds no run.
    """
    run = _read(path)
    is_seen = console.is_terminal and not console.is_dumb_terminal
    with contextlib.suppress(KeyboardInterrupt):
        if is_seen:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    live.update(view_of(run, *console.size), refresh=True)
                    if run.status in CODES:
                        break
                    run = _newer(path, console)
        else:
            _say_lines(path, run, say)
    run = _read(path)  # as it is where somebody has left before its end
    if is_seen or run.status in CODES:
        error = str(run.facts.get("error") or "") if run.status == "failed" else ""
        ended = f"{run.state}: {error}" if error else run.state
        say(visible(f"{path.name or path}: {ended}" if is_seen else ended))
    return CODES.get(run.status, EXIT_DONE)


def _say_lines(path: Path, run: RunLog, say: Callable[[str], None]) -> None:
    """A line for the newest step that there is, and for each that comes; an alarm has its own."""
    told, alarms = max(0, len(run.rows) - 1), len(run.alarms)
    while True:
        for index in range(min(told, len(run.rows)), len(run.rows)):
            say(line_of(run, run.rows[index], run.rows[index - 1] if index else None))
        for alarm in run.alarms[alarms:]:
            say(visible(str(alarm.get("line", ""))))
        told, alarms = len(run.rows), len(run.alarms)
        if run.status in CODES:
            return
        run = _newer(path)


def _newer(path: Path, console: Console | None = None) -> RunLog:
    """The run once a file of it, or the terminal's size, has changed; the age of the last step changes by itself."""

    def seen() -> tuple[object, ...]:
        stamps: list[object] = [None if console is None else console.size]
        for name in (METRICS, "run.json", "alarms.jsonl", "samples.jsonl"):
            with contextlib.suppress(OSError):
                stat = (path / name).stat()
                stamps.append((stat.st_mtime_ns, stat.st_size))
        return tuple(stamps)

    before, began = seen(), time.monotonic()
    while seen() == before and time.monotonic() - began < _SECONDS_DRAWN:
        time.sleep(_SECONDS)
    return _read(path)


def _read(path: Path) -> RunLog:
    return read_run(path, begun=False, scored=False)


def view_of(run: RunLog, width: int, height: int) -> RenderableType:
    """All that is shown: step, time left, newest values with their course, alarms, the newest completion.

    Args:
        run: As it is now.
        width: Columns of the terminal.
        height: Its lines.
    """
    left = seconds_left(run)
    head = Text(plain(visible(run.path.name or str(run.path))), style="bold", no_wrap=True, overflow="ellipsis")
    head.append(f"  {plain(visible(run.state))}", style=_STATES.get(run.status, "bold"))
    head.append("" if left is None else f"  ETA {duration(left)}")
    if (error := run.facts.get("error")) and run.status == "failed":
        head.append(f"  {plain(visible(str(error)))}", style="red")
    values = _values(run, width)
    parts: list[RenderableType] = [head, values]
    if run.planned is not None:
        parts.insert(1, ProgressBar(run.planned, run.step, width=width - 1))
    for alarm in run.alarms[-_MOST_ALARMS:]:
        line = plain(visible(str(alarm.get("line", ""))))
        parts.append(Text(line, style="yellow", no_wrap=True, overflow="ellipsis"))
    lines = height - len(parts) - values.row_count - 1
    sample = newest_completion(run.samples) if height >= _FEWEST_LINES and lines >= _FEWEST_OF_TEXT else None
    if sample is not None:
        parts.append(_completion(sample, lines))
    return Group(*parts, Text("Ctrl-C ends this view, not the run", style="dim"))


def line_of(run: RunLog, row: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """A step as one line, for a log or a pipe.

    Args:
        run: That it is of.
        row: Of the step.
        before: Of the step before it.
    """
    of_all = f"/{run.planned}" if run.planned else ""
    parts = [f"step {int(row['step'])}{of_all}"]
    parts += [f"{_NAMED[m]} {_shown(value)}" for m in _IN_A_LINE if (value := number(row.get(m))) is not None]
    for metric, value in row.items():
        if (task := task_of(metric)) is not None and number(value) is not None:
            parts.append(f"{plain(task[0])} avg@{task[1]} {value:.3f}")
    if (speed := _speed(row, before)) is not None:
        parts.append(f"{speed:,.0f} tokens/s")
    if (left := seconds_left(run)) is not None:
        parts.append(f"ETA {duration(left)}")
    return visible("  ".join(parts))


def seconds_left(run: RunLog) -> float | None:
    """Of the training, judged by its last steps; None: not known, or it is not running."""
    seconds = [value for row in run.rows[-_JUDGED:] if (value := number(row.get("step_time"))) is not None]
    if not seconds or run.planned is None or run.status != "running":
        return None
    return statistics.fmean(sorted(seconds)[: max(1, len(seconds) - 1)]) * max(0, run.planned - run.step)


def course(values: Sequence[float], width: int) -> str:
    """Values as so many heights, each the mean of a stretch.

    Args:
        values: In order.
        width: Characters.
    """
    count = min(width, len(values))
    if count < 1:
        return ""
    ends = [round(i * len(values) / count) for i in range(count + 1)]
    means = [statistics.fmean(values[low:high]) for low, high in itertools.pairwise(ends)]
    low, high = min(means), max(means)
    across = high - low
    if across <= 1e-12 * max(abs(low), abs(high)):
        return _BLOCKS[len(_BLOCKS) // 2 - 1] * count
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int((mean - low) / across * len(_BLOCKS)))] for mean in means)


def _values(run: RunLog, width: int) -> Table:
    """A line a quantity: what it is called, its newest value, the mean of ten steps, its course."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column(no_wrap=True, style="cyan")
    curves = curves_of(run)
    rewards = {name: f"reward {reward}" for name in curves if (reward := reward_of(name)) is not None}
    scores = {name: f"{task[0]} avg@{task[1]}" for name in curves if (task := task_of(name)) is not None}
    named = {"reward": "reward", **(rewards if len(rewards) > 1 else {}), **_NAMED, **scores}
    series = {label: list(curves[name].values) for name, label in named.items() if name in curves}
    pairs = zip([None, *run.rows], run.rows, strict=False)
    if speeds := [speed for before, row in pairs if (speed := _speed(row, before)) is not None]:
        series["tokens/s"] = speeds
    for name, values in series.items():
        mean = f"mean of 10 {_shown(statistics.fmean(values[-10:]))}" if len(values) > 9 else ""
        table.add_row(Text(plain(visible(name))), _shown(values[-1]), mean, course(values, max(6, width - 56)))
    return table


def _speed(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> float | None:
    """Tokens a second in a step."""
    now, then = number(row.get("num_tokens")), number((before or {}).get("num_tokens"))
    seconds = number(row.get("step_time"))
    if now is None or then is None or not seconds or now < then:
        return None
    return (now - then) / seconds


def _completion(sample: Mapping[str, Any], lines: int) -> Panel:
    rewards = sample.get("rewards")
    named = rewards.items() if isinstance(rewards, dict) else ()
    title = ", ".join(
        [
            f"step {sample.get('step', '?')}",
            *(f"{name} {_shown(value)}" for name, one in named if (value := number(one)) is not None),
            *(str(value) for name, value in sample.items() if name.endswith("_verdict")),
        ]
    )
    text = Text(overflow="fold")
    text.append(plain(visible(text_of(sample.get("prompt"))))[:300] + "\n", style="dim")
    text.append(visible(text_of(sample.get("completion"))))
    return Panel(text, title=Text(plain(visible(title))), title_align="left", height=max(3, lines), border_style="dim")


def _shown(value: float) -> str:
    size = abs(value)
    if size >= 1_000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.3f}" if size >= 0.001 or not size else f"{value:.1e}"
