"""The report of a study: what was asked, what was found, what that does not show, and how to repeat each cell.

Findings, rows of cells -> DIR/report.md, DIR/pictures/score_by_setting.png
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from perl.errors import MissingExtraError, warn
from perl.evaluation.scoring.figure import new_figure, save_figure
from perl.evaluation.scoring.table import compared_cells
from perl.run.files import write_text
from perl.run.progress import duration
from perl.run.tables import UNKNOWN, Row, TableCell, fact_cell, in_markdown, percent, printed
from perl.training.studies.cells import CHOOSES, SCORES, as_overrides, canonical, counted, titled
from perl.training.studies.findings import Arm, Findings, ScoredCandidate, findings, level
from perl.training.studies.plan import Study
from perl.training.studies.results import StudyResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _LINE, _FAINT, _GOOD = "#333333", "#1f5fa8", "#7d8fa3", "#dcebdc"
_COLUMNS = 4
_PANEL = 2.6, 2.1  # inches


def write_report(planned: Study, result: StudyResult) -> Path:
    """Writes the report of a study as far as it is done.

    Args:
        planned: The study.
        result: Its cells.

    Returns:
        ``report.md``; the picture lies in ``pictures``.
    """
    found = findings(planned, result)
    lines = [*_asked(planned, result), "", "## Each as it was chosen", ""]
    lines += [_table([(arm, arm.best) for arm in found.sorted()], found), ""]
    lines += [
        f"Scores in percent, mean ± standard error over seeds. Differences to {in_markdown(found.reference)} are "
        f"paired by seed, with Student's 95 % interval; p is of the paired t test, corrected by Holm for "
        f"{counted(found.tests, 'difference')}. Detectable: the smallest true difference that 80 of 100 such "
        "studies would show. A difference without an interval is of fewer than two seeds, or the same with each.",
        "",
    ]
    alike = [(arm, arm.at_baseline) for arm in found.arms if arm.at_baseline is not None]
    if len(alike) > 1:
        setting = next(titled(scored.candidate.chosen) for arm, scored in alike if arm.title == found.reference)
        lines += [f"## All with what was chosen for {in_markdown(found.reference)}: {in_markdown(setting)}", ""]
        lines += [_table(sorted(alike, key=lambda one: -level(one[1])), found), ""]
        lines.append("What this table ranks is how well one value fits each arm; the one above ranks the arms.")
    try:
        for picture in _pictures(planned, found, result.folder):
            lines += ["", f"![{picture.stem}](pictures/{picture.name})"]
    except MissingExtraError as error:
        warn("PRL306", "%s", error)
    lines += ["", *_tried(planned, found), "", *_not_shown(planned, result, found), "", "## Cells", ""]
    what = "Each command trains its cell alone: on a CPU without servers to the same adapter (SHA-256 of its weights)."
    cells = [
        {
            "cell": fact_cell(f"`{row.name}`"),
            "seed": fact_cell("scores" if row.stage == SCORES else "chooses"),
            "score": fact_cell(row.status) if row.score is None else TableCell(row.score, percent(row.score)),
            "adapter": fact_cell(f"`{row.adapter[:12]}`" if row.adapter else None),
            "command": fact_cell(f"`{row.command}`"),
        }
        for row in result.rows
    ]
    lines += [what, "", printed(cells, style="markdown", in_marks=True)]
    path = result.folder / "report.md"
    write_text(path, "\n".join(lines) + "\n")
    return path


def _asked(planned: Study, result: StudyResult) -> Iterator[str]:
    file = planned.file
    yield from (f"# {in_markdown(planned.name)}", "")
    varies = ", ".join(f"`{key}`" for key in dict.fromkeys(key for block in file.grid for key in block))
    yield f"Recipe `{in_markdown(file.recipe)}` on {in_markdown(planned.recipes[0].model.name)}; {varies} vary."
    if file.overrides:
        yield f"In every cell: {', '.join(f'`{one}`' for one in as_overrides(file.overrides))}."
    if file.chosen:
        choose, score = (", ".join(map(str, seeds)) for seeds in (file.seeds.choose, file.seeds.score))
        chosen = ", ".join(f"`{key}`" for key in file.chosen)
        yield f"{chosen}: chosen for each arm with the seeds {choose}, then scored with the seeds {score}."
    if file.halving is not None:
        places = ", ".join(f"{place:.0%}" for place in file.halving.at)
        yield f"While choosing, the better {file.halving.keep:.0%} of each arm went on after {places} of the steps."
    done = sum(row.status == "done" for row in result.rows)
    took = duration(sum(row.seconds for row in result.rows))
    yield f"{done} of {len(result.rows)} cells are done; one after the other they took {took}."


def _table(rows: Sequence[tuple[Arm, ScoredCandidate | None]], found: Findings) -> str:
    """Arms with their scores, and how far they are from the one that they are held against."""
    heading = f"difference to {found.reference}"
    cells: list[Row] = []
    for arm, scored in rows:
        row = {"arm": fact_cell(arm.title), "chosen": UNKNOWN, "score": fact_cell("no score"), heading: UNKNOWN}
        if scored is not None and scored.by_seed:
            if scored.candidate.chosen:
                is_edge = bool(arm.at_edge) and scored is arm.best
                row["chosen"] = fact_cell(f"{titled(scored.candidate.chosen)}{' (edge)' * is_edge}")
            error = f" ± {percent(scored.stderr)}" if not math.isnan(scored.stderr) else ""
            row["score"] = TableCell(scored.score, f"{percent(scored.score)}{error} ({len(scored.by_seed)})")
            row |= compared_cells(scored.difference, heading)
            smallest = scored.difference.smallest(found.tests) if scored.difference is not None else None
            row["detectable"] = UNKNOWN if smallest is None else TableCell(smallest, percent(smallest))
            if arm.title == found.reference:
                row[heading] = fact_cell("held against")
        cells.append({**row, "parameters": fact_cell(arm.parameters)})
    columns = ["arm", "chosen", "score", heading, "p", "detectable", "parameters"]
    return printed(cells, columns, "markdown")


def _tried(planned: Study, found: Findings) -> Iterator[str]:
    if not planned.file.chosen:
        return
    rows: list[Row] = []
    for arm in found.arms:
        for one in arm.tried:
            scores = list(one.scores.values())
            chosen = arm.best is not None and one.candidate.key == arm.best.candidate.key
            absent = 0 < len(scores) < len(planned.file.seeds.choose)
            mark = "chosen" if chosen else "as good" if one.good else "a seed is absent" if absent else ""
            rows.append(
                {
                    "arm": fact_cell(arm.title),
                    "setting": fact_cell(titled(one.candidate.chosen)),
                    "mean": TableCell(fmean(scores), percent(fmean(scores))) if scores else UNKNOWN,
                    "each seed": fact_cell(", ".join(map(percent, scores)) or None),
                    "is": TableCell(mark, mark),
                }
            )
    yield from ("## What was tried on the seeds that choose", "", printed(rows, style="markdown"), "")
    if len(planned.file.seeds.choose) > 1:
        yield (
            "As good: within two standard errors of the arm's best, over seeds or, where that is more, of drawing its "
            "completions. One standing alone is a narrow choice."
        )
    else:
        yield "With one seed that chooses there is no telling which settings are as good as the best."


def _not_shown(planned: Study, result: StudyResult, found: Findings) -> Iterator[str]:
    seeds, base = planned.file.seeds.score, in_markdown(planned.recipes[0].model.name)
    yield from ("## What this does not show", "")
    yield f"- One base ({base}), one recipe, the problems of its evaluation, {counted(len(seeds), 'seed')}."
    if planned.file.chosen:
        yield "- The seeds that choose and those that score are asked the same problems: choices may suit these."
    else:
        yield "- No setting was chosen for each arm: the ranking is that of this recipe's values."
    if len(seeds) < 2:
        yield "- With one seed that scores there is no error over seeds, and no difference can be told from chance."
    edges = [f"{in_markdown(arm.title)} ({in_markdown(', '.join(arm.at_edge))})" for arm in found.arms if arm.at_edge]
    if edges:
        yield f"- Chosen at the edge of what was tried, so that a better value may lie beyond: {'; '.join(edges)}."
    if planned.file.halving is not None:
        yield "- Halving favours arms' values that are fast at the start; those that were ended early have no score."
    # Whether cells whose settings name the same data had others.
    named = [{key: value for key, value in row.settings.items() if key.startswith("data.")} for row in result.rows]
    had = {(canonical(one), canonical(row.data)) for one, row in zip(named, result.rows, strict=True) if row.data}
    if len(had) > len({one for one, _ in had}):
        yield "- **A data file was changed while the study went on**: not all cells have the same problems."
    failed = [row for row in result.unfinished if row.stage == CHOOSES and row.status == "failed"]
    if failed and result.chosen:
        yield (
            f"- {counted(len(failed), 'cell')} failed while choosing: the choice was made without them. It stays made "
            "in this folder; another --output begins anew."
        )
    yield f"- Cells that failed or have not ended: {len(result.unfinished) or 'none'}."
    yield from (f"  - `{row.name}`: {row.status}: {in_markdown(row.reason)}" for row in result.unfinished)


def _pictures(planned: Study, found: Findings, folder: Path) -> Iterator[Path]:
    """Draws score against the first setting with numbers that was chosen, a panel each arm.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    arms = [arm for arm in found.sorted() if any(one.scores for one in arm.tried)]
    key = None
    for name in planned.file.chosen if arms else ():
        values = {one.candidate.chosen.get(name) for arm in arms for one in arm.tried if one.scores}
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(values) > 1 and len(numbers) == len(values) and min(numbers) > 0 and key is None:
            key = name
    if key is None:
        return
    columns, rows = min(_COLUMNS, len(arms)), -(-len(arms) // _COLUMNS)
    figure = new_figure(_PANEL[0] * columns + 0.4, _PANEL[1] * rows + 0.5, "the picture of a study")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for panel in panels.flat[len(arms) :]:
        panel.set_axis_off()
    for panel, arm in zip(panels.flat, arms, strict=False):
        _draw(panel, arm, key)
    figure.supylabel("score", fontsize=9, color=_INK)
    figure.supxlabel(key.rpartition(".")[2].replace("_", " "), fontsize=9, color=_INK)
    figure.suptitle("Score on the seeds that choose (dots: seeds; shaded: as good as the best)", fontsize=9, color=_INK)
    yield save_figure(figure, folder / "pictures" / "score_by_setting.png", dpi=130)


def _draw(panel: "Axes", arm: Arm, key: str) -> None:
    """The best mean over the seeds at each value, a dot a seed, the good interval shaded."""
    points = sorted(((float(one.candidate.chosen[key]), one) for one in arm.tried if one.scores), key=lambda p: p[0])
    means: dict[float, float] = {}
    for value, one in points:
        means[value] = max(means.get(value, 0.0), fmean(one.scores.values()))
        panel.plot([value] * len(one.scores), [*one.scores.values()], ".", color=_FAINT, markersize=4)
    good = [value for value, one in points if one.good]
    if good:
        panel.axvspan(min(good) / 1.25, max(good) * 1.25, color=_GOOD, lw=0)
    panel.plot([*means], [*means.values()], "-", color=_LINE, lw=1.4)
    best = float(arm.best.candidate.chosen[key]) if arm.best is not None else math.nan
    if best in means:
        panel.plot(best, means[best], "o", color=_LINE)
    panel.set_xscale("log")
    panel.set_title(arm.title.replace("$", r"\$"), fontsize=9, color=_INK)  # in which it finds no formula
    panel.tick_params(labelsize=7, colors=_INK)
    panel.grid(alpha=0.25)
