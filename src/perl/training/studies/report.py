"""The report of a study: what was asked, what was found, what that does not show, and how to repeat each cell.

Findings, rows of cells -> DIR/report.md, DIR/report.json, DIR/pictures
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perl.errors import MissingExtraError, RunFolderError
from perl.evaluation.seeds import coverage_by_seed
from perl.evaluation.table import difference_cell, p_cell
from perl.run.files import write_text
from perl.run.folder import Run
from perl.run.progress import duration
from perl.run.tables import in_markdown, markdown_table
from perl.run.warned import warn
from perl.training.hardware import GIB
from perl.training.studies.cells import CHOOSES, SCORES, counted, titled
from perl.training.studies.choose import completions_of
from perl.training.studies.conduct import usage_rows
from perl.training.studies.findings import Arm, Findings, Scored, findings
from perl.training.studies.pictures import draw_pictures
from perl.training.studies.results import Row, StudyResult
from perl.training.studies.written_plan import Study

_DASH = "-"
_SMALLEST_SPREAD = 1e-3


def write_report(planned: Study, result: StudyResult, *, draw: bool = True) -> Path:
    """Writes the report of a study as far as it is done.

    Args:
        planned: The study.
        result: Its cells.
        draw: Draw the pictures too.

    Returns:
        ``report.md``; ``report.json`` and the pictures lie beside it.
    """
    found = findings(planned, result)
    pictures = []
    try:
        pictures = draw_pictures(planned, found, result.folder / "pictures") if draw else []
    except MissingExtraError as error:
        warn("PRL306", "%s", error)
    lines = [*_asked(planned, result), "", *_best(found), "", *_at_baseline(found)]
    lines += [line for picture in pictures for line in ("", f"![{picture.stem}](pictures/{picture.name})")]
    lines += ["", *_tried(planned, found), "", *_not_shown(planned, result, found), "", *_cells(result)]
    path = result.folder / "report.md"
    write_text(path, "\n".join(lines) + "\n")
    values = {"plan": result.plan, "findings": _plain(asdict(found)), "cost": cost_of(result)}
    write_text(result.folder / "report.json", json.dumps(values, indent=2, default=str) + "\n")
    return path


def cost_of(result: StudyResult) -> dict[str, float]:
    """What the cells took: processes, core-seconds, and seconds if one had run after the other."""
    rows = usage_rows(result.folder)
    return {
        "processes": len(rows),
        "core_seconds": round(sum(float(row.get("cpu", 0)) for row in rows), 1),
        "seconds_one_after_the_other": round(sum(float(row.get("wall", 0)) for row in rows), 1),
    }


def _asked(planned: Study, result: StudyResult) -> Iterator[str]:
    file, cost = planned.file, cost_of(result)
    yield f"# {in_markdown(planned.name)}"
    yield ""
    recipe = planned.recipes[0]
    varies = ", ".join(f"`{key}`" for key in dict.fromkeys(key for block in file.grid for key in block))
    yield f"Recipe `{in_markdown(file.recipe)}` on {in_markdown(recipe.model.name)}; {varies} vary."
    if planned.every:
        yield f"In every cell: {', '.join(f'`{one}`' for one in planned.every)}."
    if file.chosen:
        choose, score = (", ".join(map(str, seeds)) for seeds in (file.seeds.choose, file.seeds.score))
        chosen = ", ".join(f"`{key}`" for key in file.chosen)
        yield f"{chosen}: chosen for each arm with the seeds {choose}, then scored with the seeds {score}."
    if file.halving is not None:
        places = ", ".join(f"{place:.0%}" for place in file.halving.at)
        yield f"While choosing, the better {file.halving.keep:.0%} of each arm went on after {places} of the steps."
    done = sum(row.status == "done" for row in result.rows)
    yield (
        f"{done} of {len(result.rows)} cells are done; {duration(cost['core_seconds'])} of core time in all. "
        f"Plan `{result.plan[:12]}`, written before the results."
    )


def _best(found: Findings) -> Iterator[str]:
    yield "## Each as it was chosen"
    yield ""
    if found.reference is None:
        yield "No arm has a score yet."
        return
    yield from markdown_table([_head(found), *(_row(arm, arm.best, found) for arm in found.sorted())])
    yield ""
    how = {
        "baseline": "the study's baseline",
        CHOOSES: "the best on the seeds that choose",
        SCORES: "the best of these very scores",
    }[found.named_by]
    yield (
        "Scores in percent, mean ± standard error over seeds. "
        f"Differences to {in_markdown(found.reference)} ({how}) are "
        f"paired by seed, with Student's 95 % interval; p is of the paired t test, corrected by Holm for "
        f"{counted(found.tests, 'difference')}. Detectable: the smallest true difference that 80 of 100 such "
        "studies would show."
    )
    if any(arm.best is not None and not _has_interval(arm.best) and arm.title != found.reference for arm in found.arms):
        yield ""
        yield "A difference without an interval is of fewer than two seeds, or is the same with each of them."


def _at_baseline(found: Findings) -> Iterator[str]:
    shown = [arm for arm in found.sorted() if arm.at_baseline is not None]
    if len(shown) < 2:
        return
    setting = titled(next(arm.at_baseline for arm in shown if arm.at_baseline is not None).candidate.chosen)
    yield f"## All with what was chosen for {in_markdown(found.reference)}: {in_markdown(setting)}"
    yield ""
    order = sorted(
        shown, key=lambda arm: -(arm.at_baseline.mean.mean if arm.at_baseline and arm.at_baseline.mean else -1)
    )
    yield from markdown_table([_head(found), *(_row(arm, arm.at_baseline, found) for arm in order)])
    yield ""
    yield "What this table ranks is how well one value fits each arm; the one above ranks the arms."


def _has_interval(scored: Scored) -> bool:
    return scored.difference is not None and scored.difference.stderr > 0


def _head(found: Findings) -> list[str]:
    return ["arm", "chosen", "score", f"difference to {in_markdown(found.reference)}", "p", "detectable", "parameters"]


def _row(arm: Arm, scored: Scored | None, found: Findings) -> list[str]:
    title = in_markdown(arm.title)
    parameters = f"{arm.parameters:,}" if arm.parameters is not None else _DASH
    if scored is None or scored.mean is None:
        return [title, _DASH, "no score", _DASH, _DASH, _DASH, parameters]
    chosen = in_markdown(titled(scored.candidate.chosen)) if scored.candidate.chosen else _DASH
    edge = " (edge)" if arm.at_edge and scored is arm.best else ""
    error = f" ± {100 * scored.mean.stderr:.1f}" if not math.isnan(scored.mean.stderr) else ""
    score = f"{100 * scored.mean.mean:.1f}{error} ({scored.mean.seeds})"
    if arm.title == found.reference:
        return [title, chosen + edge, score, "held against", _DASH, _DASH, parameters]
    smallest = f"{100 * scored.smallest:.1f}" if scored.smallest is not None else _DASH
    return [
        title,
        chosen + edge,
        score,
        difference_cell(scored.difference),
        p_cell(scored.difference),
        smallest,
        parameters,
    ]


def _tried(planned: Study, found: Findings) -> Iterator[str]:
    if not planned.file.chosen:
        return
    yield "## What was tried on the seeds that choose"
    yield ""
    rows = []
    for arm in found.arms:
        for one in arm.tried:
            scores = [f"{100 * score:.1f}" for score in one.scores.values()]
            mean = f"{100 * sum(one.scores.values()) / len(one.scores):.1f}" if one.scores else _DASH
            chosen = arm.best is not None and one.candidate.key == arm.best.candidate.key
            whole = len(one.scores) in (0, len(planned.file.seeds.choose))
            mark = (
                "chosen" if chosen else "as good" if one.good else "" if whole or not one.scores else "a seed is absent"
            )
            rows.append(
                [in_markdown(arm.title), in_markdown(titled(one.candidate.chosen)), mean, ", ".join(scores), mark]
            )
    yield from markdown_table([["arm", "setting", "mean", "each seed", ""], *rows], [False, False, True, False, False])
    yield ""
    if len(planned.file.seeds.choose) > 1:
        yield (
            "As good: within two standard errors of the arm's best, over seeds or, where that is more, of drawing its "
            "completions. One standing alone is a narrow choice."
        )
    else:
        yield "With one seed that chooses there is no telling which settings are as good as the best."


def _not_shown(planned: Study, result: StudyResult, found: Findings) -> Iterator[str]:
    seeds = planned.file.seeds.score
    yield "## What this does not show"
    yield ""
    recipe = planned.recipes[0]
    base = in_markdown(recipe.model.name)
    yield f"- One base ({base}), one recipe, the problems of its evaluation, {counted(len(seeds), 'seed')}."
    if planned.file.chosen:
        yield "- The seeds that choose and those that score are asked the same problems: choices may suit these."
    if planned.file.score == "best":
        yield "- The best adapter of a run is chosen by the same problems that score it, which flatters all of them."
    if found.named_by == SCORES and found.reference is not None:
        yield "- No baseline was named: the arm that the others are held against was chosen by its own scores."
    if len(seeds) < 2:
        yield "- With one seed that scores there is no error over seeds, and no difference can be told from chance."
    if not planned.file.chosen:
        yield "- No setting was chosen for each arm: the ranking is that of this recipe's values."
    edges = [f"{in_markdown(arm.title)} ({in_markdown(', '.join(arm.at_edge))})" for arm in found.arms if arm.at_edge]
    if edges:
        yield f"- Chosen at the edge of what was tried, so that a better value may lie beyond: {'; '.join(edges)}."
    if planned.file.halving is not None:
        yield "- Halving favours arms' values that are fast at the start; those that were ended early have no score."
    covered = _coverage(result, found)
    if covered:
        yield covered
    failed = [
        row for row in result.rows if row.status not in ("done", "ended early") or row.reason == "it has no score"
    ]
    choosing = sum(row.stage == CHOOSES and row.status == "failed" for row in failed)
    if choosing and result.chosen:
        yield (
            f"- {counted(choosing, 'cell')} failed while choosing: the choice was made without them. It stays made in "
            "this folder; another --output begins anew."
        )
    yield f"- Cells that failed or have not ended: {len(failed) or 'none'}."
    yield from (f"  - `{row.name}`: {row.status}: {in_markdown(row.reason)}" for row in failed)


def _coverage(result: StudyResult, found: Findings) -> str:
    """How often intervals of this study hold the truth, by simulation with its own means, spread and numbers."""
    scored = [arm.best for arm in found.sorted() if arm.best is not None and arm.best.mean is not None]
    seeds = min((one.mean.seeds for one in (scored[:1] + scored[-1:]) if one.mean is not None), default=0)
    runs = [result.folder / "cells" / row.stage / row.name for row in result.rows if row.score is not None]
    completions = next((number for run in runs if (number := completions_of(run))), 0)
    if len(scored) < 2 or seeds < 2 or not completions:
        return ""
    means = [one.mean for one in scored if one.mean is not None]
    pair = means[0], means[-1]
    inside = [min(max(one.mean, 0.01), 0.99) for one in pair]
    seen = sum(one.stderr**2 for one in pair) / 2 * seeds
    drawn = sum(mean * (1 - mean) for mean in inside) / 2 / completions  # which the simulation adds itself
    spread = math.sqrt(max(_SMALLEST_SPREAD**2, seen - drawn))
    share = coverage_by_seed((inside[0], inside[1]), spread, seeds, completions)
    return (
        "- Intervals: of studies made up with the best and the worst arm's scores, this spread over seeds, "
        f"{seeds} seeds and {completions:,} completions, {share} have the true difference inside the 95 % interval "
        "(those without an interval, whose seeds all differ by the same, are left out)."
    )


def _cells(result: StudyResult) -> Iterator[str]:
    yield "## Cells"
    yield ""
    yield "Each command trains its cell alone: on a CPU without servers to the same adapter (SHA-256 of its weights)."
    yield ""
    peaks: dict[str, float] = {}
    for used in usage_rows(result.folder):
        name = str(used.get("name"))
        peaks[name] = max(peaks.get(name, 0.0), float(used.get("peak", 0)))
    rows = []
    for row in result.rows:
        peak = f"{peaks[row.name] / GIB:.2f}" if row.name in peaks else _DASH
        score = f"{100 * row.score:.1f}" if row.score is not None else row.status
        what = "scores" if row.stage == SCORES else "chooses"
        rows.append([f"`{row.name}`", what, score, peak, f"`{_adapter(result, row)[:12]}`", f"`{row.command}`"])
    head = ["cell", "", "score", "peak, GiB", "adapter", "command"]
    yield from markdown_table([head, *rows], [False, False, True, True, False, False])
    yield ""
    yield "Peak: of its process in main memory, what it shares with the other cells included."


def _adapter(result: StudyResult, row: Row) -> str:
    try:
        return str(
            Run.read(result.folder / "cells" / row.stage / row.name).facts.get("fingerprint", {}).get("adapter")
            or _DASH
        )
    except RunFolderError:
        return _DASH


def _plain(value: Any) -> Any:  # noqa: ANN401 (JSON)
    """Values as JSON has them: no NaN."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
