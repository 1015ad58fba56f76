"""Every problem of an evaluation as a point: which ones the adapter solves more often than its base.

Results -> problems.png
"""

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from perl.errors import MissingExtraError, missing_extra
from perl.evaluation.scoring.results import FIGURE, Results, TaskResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_INK, _BETTER, _WORSE, _EQUAL = "#333333", "#1f5fa8", "#c8641e", "#808080"
_COLUMNS = 3
# Areas in square points: of one problem's point, and of the largest one in a panel. With many completions a problem the
# places are close together and the largest is smaller; so wide is the panel, in points.
_POINT, _SMALLEST, _LARGEST, _PANEL = 24.0, 9.0, 900.0, 190.0


def draw_problems(results: Results, folder: Path) -> Path | None:
    """Draws a panel a task: the share of right completions of each problem, base across and adapter up.

    Problems in one place are one larger point. Nothing is drawn of tasks of which one policy only was scored.

    Args:
        results: Of an evaluation.
        folder: Where ``problems.png`` goes.

    Returns:
        The picture's file; None: there is nothing to draw.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    tasks = [task for task in results.tasks if paired_shares(task)]
    if not tasks:
        return None
    # As square as can be: two panels side by side, four in two rows.
    columns = min(_COLUMNS, 2 if len(tasks) == 4 else len(tasks))
    rows = -(-len(tasks) // columns)
    figure = new_figure(4.4 * columns, 4.7 * rows + 0.6, "drawing problems")
    beside = "\nbeside" if len(results.tasks) == 1 else " beside"
    title = f"{results.subject['name']}{beside} {results.subject['base']}"
    figure.suptitle(title, color=_INK, fontsize=12 if columns > 1 else 9)
    if any(len(set(shares)) < len(shares) for shares in map(paired_shares, tasks)):
        figure.supxlabel("a larger point is several problems in one place", color=_EQUAL, fontsize=8)
    for index, task in enumerate(tasks):
        _draw(figure.add_subplot(rows, columns, index + 1), task)
    return save_figure(figure, folder / FIGURE, dpi=120)


def paired_shares(task: TaskResult) -> list[tuple[Fraction, Fraction]]:
    """Shares of right completions of each problem that base and adapter were both asked, base first."""
    pairs = [(p.base, p.adapter) for p in task.problems if p.base is not None and p.adapter is not None]
    return [(Fraction(sum(base), len(base)), Fraction(sum(adapter), len(adapter))) for base, adapter in pairs]


def _draw(axes: "Axes", task: TaskResult) -> None:
    shares = paired_shares(task)
    axes.plot([0, 1], [0, 1], color=_EQUAL, linewidth=1, linestyle="--", zorder=1)
    counts = Counter(shares)
    largest = min(_LARGEST, max(6 * _POINT, (1.6 * _PANEL / task.score.k) ** 2))
    each = min(_POINT, largest / max(counts.values()))
    # Large points first, so that none hides a small one.
    for (base, adapter), count in counts.most_common():
        color = _BETTER if adapter > base else _WORSE if adapter < base else _EQUAL
        area = max(_SMALLEST, each * count)
        axes.scatter([float(base)], [float(adapter)], s=area, color=color, alpha=0.85, linewidths=0, zorder=2)
    better = sum(adapter > base for base, adapter in shares)
    worse = sum(adapter < base for base, adapter in shares)
    summary = f"{better} better, {len(shares) - better - worse} equal, {worse} worse"
    axes.set_title(f"{task.title}\n{summary}", loc="left", color=_INK, fontsize=10)
    axes.set_xlabel(f"base, avg@{task.score.k} of each problem", fontsize=8)
    axes.set_ylabel(f"adapter, avg@{task.score.k} of each problem", fontsize=8)
    axes.set(xlim=(-0.08, 1.1), ylim=(-0.08, 1.1), aspect="equal")
    axes.tick_params(labelsize=8)
    axes.grid(color="#e8e8e8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def new_figure(width: float, height: float, needed_for: str) -> "Figure":
    """A white picture.

    Args:
        width: In inches.
        height: In inches.
        needed_for: What needs matplotlib, for the error.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        problem = missing_extra("matplotlib", "plots", needed_for)
        raise MissingExtraError(problem.message, hint=problem.hint) from None
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save_figure(figure: "Figure", picture: Path, dpi: float | None = None) -> Path:
    """Writes a picture, into a folder that is made for it.

    Args:
        figure: As :func:`new_figure` gave it.
        picture: The file.
        dpi: Dots an inch; None: the library's.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)  # draws without a screen
    figure.savefig(picture, dpi=dpi or "figure")
    return picture
