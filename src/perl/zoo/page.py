"""The zoo as one page for a browser, which needs no network and nothing beside it.

Zoo -> HTML

A table that can be sorted and filtered, scores of base and adapter with their errors, learning curves. Whatever an
entry says is escaped, and the page forbids itself all but its own style and script.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perl.recipe.assets import card_templates_folder
from perl.run.tables import html_templates, plain, signed_percent, size_text
from perl.zoo.catalogue import Zoo
from perl.zoo.entry import Entry, TaskScore
from perl.zoo.intervals import score_interval, score_text
from perl.zoo.listing import tasks_of
from perl.zoo.ranking import error_of, seed_scores

_WIDTH, _HEIGHT = 100, 28
_LARGE_WIDTH, _LARGE_HEIGHT = 560, 200


@dataclass(frozen=True)
class Curve:
    """A learning curve.

    Attributes:
        points: For an SVG polyline.
        low: Smallest reward.
        high: Largest reward.
        first: First step.
        last: Last step.
    """

    points: str
    low: float
    high: float
    first: int
    last: int


def html_page(zoo: Zoo) -> str:
    """The page."""
    folder = card_templates_folder()
    environment = html_templates(folder)
    environment.filters["plain"] = plain
    entries = list(zoo.entries.values())
    tasks = tasks_of(entries)
    style = (folder / "zoo.css").read_text(encoding="utf-8")
    script = (folder / "zoo.js").read_text(encoding="utf-8")
    axes = {task: _axis(entries, task) for task in tasks}
    rows = [_row(entry, axes) for entry in entries]
    return environment.get_template("zoo.html.jinja").render(
        rows=rows,
        tasks=tasks,
        axes=axes,
        counts={task: sum(task in row["scores"] for row in rows) for task in tasks},
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        provenances=sorted({entry.provenance for entry in entries}),
        methods=sorted({entry.method for entry in entries}),
        bases=sorted({entry.on_base for entry in entries}),
        size=(_WIDTH, _HEIGHT),
        large=(_LARGE_WIDTH, _LARGE_HEIGHT),
        newest=max((entry.created for entry in entries if entry.created), default=None),
    )


def curve_of(points: Sequence[tuple[int, float]], width: int, height: int) -> Curve | None:
    """A curve as wide and high as that, less a margin; None: too short to draw."""
    if len(points) < 2:
        return None
    steps, rewards = [step for step, _ in points], [reward for _, reward in points]
    first, last, low, high = min(steps), max(steps), min(rewards), max(rewards)
    across, up = (last - first) or 1, (high - low) or 1.0
    placed = (
        f"{2 + (width - 4) * (step - first) / across:.1f},{height - 2 - (height - 4) * (reward - low) / up:.1f}"
        for step, reward in points
    )
    return Curve(" ".join(placed), low, high, first, last)


def _row(entry: Entry, axes: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """An entry with what is drawn of it, for the template; ``search`` is what the filter looks at."""
    searched = (entry.name, entry.method, entry.on_base, entry.provenance, entry.source or "")
    return {
        "entry": entry,
        "size": size_text(entry.adapter.size),
        "scores": {score.task: _score_cell(entry, score, axes[score.task]) for score in entry.scores},
        "curve": curve_of(entry.curve, _WIDTH, _HEIGHT),
        "large_curve": curve_of(entry.curve, _LARGE_WIDTH, _LARGE_HEIGHT),
        "search": plain(" ".join(searched)).lower(),
    }


def _score_cell(entry: Entry, score: TaskScore, axis: tuple[float, float]) -> dict[str, Any]:
    """A score on a task, for the table and for the picture in it; ``value`` is a fraction, to sort by."""
    error, base = error_of(entry, score), score.base
    return {
        "value": score.adapter,
        "text": score_text(score.adapter, error, score.n),
        "base": score_text(base, score.base_stderr, score.n),
        "gain": signed_percent(score.gain),
        "adapter_bar": _bar(score.adapter, _ends(score.adapter, error, score.n), axis),
        "base_bar": None if base is None else _bar(base, _ends(base, score.base_stderr, score.n), axis),
        "seeds": tuple(_place(value, axis) for value in seed_scores(entry, score)[1:]),
    }


def _axis(entries: Sequence[Entry], task: str) -> tuple[float, float]:
    """Range of a task's scores, with room for their errors."""
    ends = []
    for entry in entries:
        score = entry.score(task)
        if score is not None:
            ends += [*_ends(score.adapter, error_of(entry, score), score.n), *seed_scores(entry, score)]
            ends += [] if score.base is None else _ends(score.base, score.base_stderr, score.n)
    low, high = max(0.0, min(ends)), min(1.0, max(ends))
    return (low, high) if high > low else (max(0.0, low - 0.05), min(1.0, high + 0.05))


def _ends(value: float, error: float | None, problems: int | None) -> tuple[float, float]:
    """As far as the error goes; as far as the interval where there is no spread to take an error from."""
    if error:
        return value - error, value + error
    return score_interval(value, error, problems) or (value, value)


def _place(value: float, axis: tuple[float, float]) -> float:
    low, high = axis
    return round(5 + (_WIDTH - 10) * min(1.0, max(0.0, (value - low) / (high - low))), 1)


def _bar(value: float, ends: tuple[float, float], axis: tuple[float, float]) -> dict[str, float]:
    """A score and the ends of its error bar, as places in the picture."""
    return {name: _place(at, axis) for name, at in (("x", value), ("low", ends[0]), ("high", ends[1]))}


def _hash(text: str) -> str:
    """As a content security policy names a script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
