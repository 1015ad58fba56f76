"""Pictures of a study: score against the setting that was chosen, and against the parameters that train.

Findings -> DIR/pictures/score_by_setting.png, DIR/pictures/score_by_parameters.png
"""

from pathlib import Path
from typing import TYPE_CHECKING

from perl.evaluation.pictures import new_figure, save_figure
from perl.training.studies.findings import Arm, Findings
from perl.training.studies.written_plan import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _LINE, _FAINT, _GOOD = "#333333", "#1f5fa8", "#7d8fa3", "#dcebdc"
_COLUMNS = 4
_PANEL = 2.6, 2.1  # inches
_LETTER, _LINE_HEIGHT = 4.2, 8.5  # points, of a name beside a point


def draw_pictures(planned: Study, found: Findings, folder: Path) -> list[Path]:
    """Draws what there is to draw.

    Args:
        planned: The study.
        found: What it found.
        folder: For the pictures.

    Returns:
        Their files.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    pictures = []
    key = next((k for k in planned.file.chosen if _is_numeric(found, k)), None)
    if key is not None:
        pictures.append(_by_setting(found, key, folder / "score_by_setting.png"))
    if sum(arm.parameters is not None and arm.best is not None and arm.best.mean is not None for arm in found.arms) > 1:
        pictures.append(_by_parameters(found, folder / "score_by_parameters.png"))
    return pictures


def _is_numeric(found: Findings, key: str) -> bool:
    values = {one.candidate.chosen.get(key) for arm in found.arms for one in arm.tried if one.scores}
    return len(values) > 1 and all(isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in values)


def _by_setting(found: Findings, key: str, picture: Path) -> Path:
    """A panel each arm: mean over the seeds that choose, a dot a seed, the good interval shaded."""
    arms = [arm for arm in found.sorted() if any(one.scores for one in arm.tried)]
    rows = -(-len(arms) // _COLUMNS)
    columns = min(_COLUMNS, len(arms))
    figure = new_figure(_PANEL[0] * columns + 0.4, _PANEL[1] * rows + 0.5, "the pictures of a study")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for number, panel in enumerate(panels.flat):
        if number < len(arms):
            _panel(panel, arms[number], key)
        else:
            panel.set_axis_off()
    for panel in panels[:, 0]:
        panel.set_ylabel("score", color=_INK)
    for panel in panels[-1, :]:
        panel.set_xlabel(key.rpartition(".")[2].replace("_", " "), color=_INK)
    figure.suptitle("Score on the seeds that choose (dots: seeds; shaded: as good as the best)", fontsize=9, color=_INK)
    return save_figure(figure, picture, dpi=130)


def _panel(panel: "Axes", arm: Arm, key: str) -> None:
    points = sorted(((float(one.candidate.chosen[key]), one) for one in arm.tried if one.scores), key=lambda p: p[0])
    means: dict[float, float] = {}
    for value, one in points:
        means[value] = max(means.get(value, 0.0), sum(one.scores.values()) / len(one.scores))
        panel.plot([value] * len(one.scores), [*one.scores.values()], ".", color=_FAINT, markersize=4)
    good = [value for value, one in points if one.good]
    if good:
        panel.axvspan(min(good) / 1.25, max(good) * 1.25, color=_GOOD, lw=0)
    panel.plot([*means], [*means.values()], "-", color=_LINE, lw=1.4)
    best = arm.best
    if best is not None and float(best.candidate.chosen[key]) in means:
        panel.plot(float(best.candidate.chosen[key]), means[float(best.candidate.chosen[key])], "o", color=_LINE)
    panel.set_xscale("log")
    panel.set_title(_plain(arm.title), fontsize=9, color=_INK)
    panel.tick_params(labelsize=7, colors=_INK)
    panel.grid(alpha=0.25)


def _by_parameters(found: Findings, picture: Path) -> Path:
    """Each arm as it was chosen: score with its standard error against trainable parameters."""
    figure = new_figure(6.4, 4.2, "the pictures of a study")
    from matplotlib.ticker import NullFormatter

    panel = figure.subplots()
    named: list[tuple[float, float, str]] = []
    for arm in found.sorted():
        if arm.parameters is None or arm.best is None or arm.best.mean is None:
            continue
        mean = arm.best.mean
        error = mean.stderr if mean.stderr == mean.stderr else 0.0
        panel.errorbar(arm.parameters, mean.mean, error, fmt="o", color=_LINE, ecolor=_FAINT, markersize=4)
        named.append((float(arm.parameters), mean.mean, arm.title))
    panel.set_xscale("log")
    panel.xaxis.set_minor_formatter(NullFormatter())  # within one power of ten they would lie over each other
    panel.margins(x=0.15)
    panel.set_xlabel("trainable parameters", color=_INK)
    panel.set_ylabel("score on the seeds that score (± standard error)", color=_INK)
    panel.grid(alpha=0.25)
    _name(panel, named)
    return save_figure(figure, picture, dpi=130)


def _plain(text: str) -> str:
    """A text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")


def _name(panel: "Axes", named: list[tuple[float, float, str]]) -> None:
    """Writes each point's name beside it, lower where another one would be written over, with a line to its point."""
    low, high = panel.get_xlim(), panel.get_ylim()
    panel.set_xlim(low)
    panel.set_ylim(high)  # or a name would widen them
    figure = panel.get_figure(root=True)
    assert figure is not None  # noqa: S101 (it was drawn)
    figure.draw_without_rendering()  # by which the axes get their size
    scale = 72 / figure.dpi
    written: list[tuple[float, float, float]] = []
    for x, y, title in sorted(named, key=lambda one: -one[1]):
        left, place = (float(one) * scale for one in panel.transData.transform((x, y)))
        left, top, width = left + 7, place + 2, _LETTER * len(title)
        near = [at for begin, end, at in written if begin < left + width and left < end]
        while any(abs(top - at) < _LINE_HEIGHT for at in near):
            top = min(at for at in near if abs(top - at) < _LINE_HEIGHT) - _LINE_HEIGHT
        written.append((left, left + width, top))
        moved = abs(top - place - 2) > 1
        line = {"arrowstyle": "-", "color": _FAINT, "lw": 0.5, "shrinkA": 0, "shrinkB": 2} if moved else None
        panel.annotate(
            _plain(title), (x, y), (7, top - place), textcoords="offset points", fontsize=7, color=_INK, arrowprops=line
        )
