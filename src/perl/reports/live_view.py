"""A run as a terminal shows it: step, time left, newest values with their course, the newest completion.

RunLog, size of the terminal -> what rich draws; a row -> a line

What a model wrote may hold anything: a terminal is sent only what :func:`perl.errors.visible` leaves.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from perl.errors import visible
from perl.reports.completions import newest_completion, text_of
from perl.reports.curves import curves_of, task_of
from perl.reports.run_log import RunLog, number
from perl.run.progress import duration
from perl.run.tables import plain

BLOCKS, LETTERS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
"""Heights of a course; the second where a terminal has no blocks."""
_NARROW = 64
_FEWEST_LINES = 14
_FEWEST_OF_TEXT = 4
_MOST_ALARMS = 3
_STATES = {"running": "cyan", "done": "green", "failed": "red", "interrupted": "yellow"}
# Steps of which the time left is judged.
_JUDGED = 20
_NAMED = {
    "reward": "reward",
    "teacher/kl": "KL to the teacher",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "truncated",
    "entropy": "entropy",
    "kl": "KL",
    "prompts/seen": "prompts seen",
    "refill/flat_before": "flat before refill",
    "refill/samples": "sampled by refill",
    "grad_norm": "gradient norm",
    "sampling/sampling_logp_difference/mean": "engine's gap",
}


def view_of(run: RunLog, width: int, height: int, *, blocks: str = BLOCKS) -> RenderableType:
    """All that is shown.

    Args:
        run: As it is now.
        width: Columns of the terminal.
        height: Its lines.
        blocks: Eight heights of a course.
    """
    parts: list[RenderableType] = [_head(run, width, blocks)]
    values = _values(run, width, blocks)
    parts.append(values)
    used = 3 + values.row_count  # with the head and the last line
    for alarm in run.alarms[-_MOST_ALARMS:]:
        parts.append(
            Text(plain(visible(str(alarm.get("line", "")))), style="yellow", no_wrap=True, overflow="ellipsis")
        )
        used += 1
    left = height - used - 1
    sample = newest_completion(run.samples) if height >= _FEWEST_LINES and left >= _FEWEST_OF_TEXT else None
    if sample is not None:
        parts.append(_completion(sample, left))
    parts.append(Text("q ends this view, not the run", style="dim"))
    return Group(*parts)


def line_of(run: RunLog, row: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """A step as one line, for a log or a pipe.

    Args:
        run: That it is of.
        row: Of the step.
        before: Of the step before it.
    """
    of_all = f"/{run.planned}" if run.planned else ""
    parts = [f"step {int(row['step'])}{of_all}"]
    for metric in ("reward", "teacher/kl", "completions/mean_length", "entropy", "kl"):
        if (value := number(row.get(metric))) is not None:
            parts.append(f"{_NAMED[metric]} {_shown(value)}")
    for metric, value in row.items():
        if (task := task_of(metric)) is not None and number(value) is not None:
            parts.append(f"{plain(task[0])} avg@{task[1]} {value:.3f}")
    if (speed := _speed(row, before)) is not None:
        parts.append(f"{speed:,.0f} tokens/s")
    if (left := seconds_left(run)) is not None and run.status == "running":
        parts.append(f"ETA {duration(left)}")
    return visible("  ".join(parts))


def seconds_left(run: RunLog) -> float | None:
    """Of the training, judged by its last steps; None: not known."""
    seconds = [value for row in run.rows[-_JUDGED:] if (value := number(row.get("step_time"))) is not None]
    if not seconds or run.planned is None:
        return None
    return statistics.fmean(sorted(seconds)[: max(1, len(seconds) - 1)]) * max(0, run.planned - run.step)


def course(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """Values as so many heights, each the mean of a stretch.

    Args:
        values: In order.
        width: Characters.
        blocks: From the lowest to the highest.
    """
    count = min(width, len(values))
    if count < 1:
        return ""
    ends = [round(i * len(values) / count) for i in range(count + 1)]
    means = [statistics.fmean(values[low:high]) for low, high in itertools.pairwise(ends)]
    low, high = min(means), max(means)
    across = high - low
    if across <= 1e-12 * max(abs(low), abs(high)):
        return blocks[len(blocks) // 2 - 1] * count
    return "".join(blocks[min(len(blocks) - 1, int((mean - low) / across * len(blocks)))] for mean in means)


def _head(run: RunLog, width: int, blocks: str) -> RenderableType:
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(plain(visible(run.path.name or str(run.path))), style="bold")
    head.append("  ")
    head.append(plain(visible(run.state)), style=_STATES.get(run.status, "bold"))
    left = seconds_left(run)
    if left is not None and run.status == "running":
        head.append(f"  ETA {duration(left)}")
    if (error := run.facts.get("error")) and run.status == "failed":
        head.append(f"  {plain(visible(str(error)))}", style="red")
    if run.planned is None:
        return head
    return Group(head, _bar(min(1.0, run.step / run.planned), width - 1, blocks))


def _bar(share: float, width: int, blocks: str) -> Text:
    done = round(share * width)
    full, empty = ("━", "─") if blocks == BLOCKS else ("=", "-")
    return Text.assemble((full * done, "cyan"), (empty * max(0, width - done), "dim"))


def _values(run: RunLog, width: int, blocks: str) -> Table:
    """A line a quantity: what it is called, its newest value, the mean of ten steps, its course."""
    wide = width >= _NARROW
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=24 if wide else 14)
    table.add_column(justify="right", no_wrap=True)
    if wide:
        table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column(no_wrap=True, style="cyan")
    room = max(6, width - (56 if wide else 30))
    for name, values in _series(run).items():
        mean = statistics.fmean(values[-10:])
        means = [f"mean of 10 {_shown(mean)}" if len(values) > 9 else ""] if wide else []
        table.add_row(Text(plain(visible(name))), _shown(values[-1]), *means, course(values, room, blocks))
    return table


def _series(run: RunLog) -> dict[str, list[float]]:
    """What is followed, by the name it has for people."""
    curves = curves_of(run)
    rewards = {
        name: f"reward {name.removeprefix('rewards/').removesuffix('/mean')}"
        for name in curves
        if name.startswith("rewards/") and name.endswith("/mean")
    }
    scores = {name: f"{task[0]} avg@{task[1]}" for name in curves if (task := task_of(name)) is not None}
    named = {"reward": "reward", **(rewards if len(rewards) > 1 else {}), **_NAMED, **scores}
    found = {label: list(curves[name].values) for name, label in named.items() if name in curves}
    speeds = [_speed(row, before) for before, row in zip([None, *run.rows], run.rows, strict=False)]
    known = [speed for speed in speeds if speed is not None]
    return {**found, **({"tokens/s": known} if known else {})}


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
