"""A study from its file to its results; start reading here.

study.yaml -> plan -> cells with the seeds that choose -> a choice for each arm -> cells with the seeds that score
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from perl.errors import PerlError, RecipeError
from perl.run.logs import read_log
from perl.run.progress import duration
from perl.run.tables import plain_table
from perl.training.forecast import forecast_of
from perl.training.hardware import GIB, Range
from perl.training.prepare import prepare
from perl.training.studies.cells import CHOOSES, SCORES, Candidate, Cell, cells_of, counted
from perl.training.studies.plan import Study, load_study, opened, steps_of
from perl.training.studies.processes import CellEnd, CellProcesses
from perl.training.studies.report import write_report
from perl.training.studies.results import (
    CHOSEN,
    CellRow,
    Chosen,
    StudyResult,
    better_share,
    choose,
    finalists,
    read_chosen,
    row_of,
)

# Steps whose mean reward says how far a cell is that was not scored yet.
_LAST_STEPS = 10


def study(source: str | Path | Mapping[str, Any], output_dir: str | Path | None = None) -> StudyResult:
    """Carries out a study, or goes on with it where it was stopped.

    Args:
        source: A study file, or its content.
        output_dir: Its folder; None: ``runs/studies/NAME``.

    Returns:
        The results, which are in the folder too.

    Raises:
        PerlError: The study, a recipe of a cell, or the folder cannot be used; nothing was started.
        InterruptedRunError: Ctrl-C or SIGTERM; the same call goes on.
    """
    planned = load_study(source)
    check_servers(planned)
    folder = Path(output_dir) if output_dir is not None else Path("runs") / "studies" / planned.name
    result, seeds = StudyResult(folder), planned.file.seeds
    choosing = cells_of(planned.candidates, seeds.choose, CHOOSES)
    scored = [] if planned.file.chosen else list(planned.candidates)
    with opened(planned, folder):
        processes = CellProcesses(planned, folder)
        try:
            if planned.file.chosen:
                rows = read_chosen(folder)
                if rows is None:
                    _train_choosing(processes)
                result.rows = rows if rows is not None else _rows(processes, choosing)
                result.chosen = chosen_of(planned, result.rows)
                _check_chosen(planned, result)
                if rows is None:  # before anything is scored, so that no score can change it
                    result.write(CHOSEN)
                scored = finalists(planned, result.chosen)
            processes.train(cells_of(scored, seeds.score, SCORES))
        finally:  # as far as it is done
            chosen_by = [row for row in result.rows if row.stage == CHOOSES] or _rows(processes, choosing)
            result.rows = [*chosen_by, *_rows(processes, cells_of(scored, seeds.score, SCORES))]
            result.write("results.json")
            write_report(planned, result)
    return result


def _rows(processes: CellProcesses, cells: Sequence[Cell]) -> list[CellRow]:
    command = processes.study.command
    return [row_of(cell, processes.run_of(cell), processes.end_of(cell), command(cell)) for cell in cells]


def chosen_of(planned: Study, rows: Sequence[CellRow]) -> dict[str, Chosen]:
    """The choice of each arm, by cells that were trained to the end.

    Args:
        planned: The study.
        rows: Of the cells that choose.
    """
    scores = {(Candidate(row.settings).key, row.seed): row.score for row in rows if row.score is not None}
    drawn = planned.recipes[0].eval.temperature > 0
    completions = {Candidate(row.settings).key: row.completions for row in rows if drawn and row.completions}
    return {arm[0].title: choose(arm, scores, planned.file.seeds.choose, completions) for arm in planned.arms}


def _check_chosen(planned: Study, result: StudyResult) -> None:
    """Refuses to go on with no choice at all, or none for what the others are held against.

    Raises:
        PerlError: With why the first cell has no score.
    """
    none = [title for title, one in result.chosen.items() if one.candidate is None]
    named = planned.file.baseline and planned.baseline in none
    if named or len(none) == len(result.chosen):
        of = planned.baseline if named else "any arm"
        reason = next((f": {row.name}: {row.reason}" for row in result.rows if row.arm in none and row.reason), "")
        what = f"no candidate of {of} was trained to its end with every seed that chooses, so nothing is chosen{reason}"
        raise PerlError(what, str(result.folder), "the same command tries its cells again")


def _train_choosing(processes: CellProcesses) -> None:
    """Trains with the seeds that choose; with halving, only the better candidates of each arm to the end."""
    planned = processes.study
    seeds, halving = planned.file.seeds.choose, planned.file.halving
    left = list(planned.candidates)
    keep = 1.0 if halving is None else halving.keep
    for share in [] if halving is None else sorted(halving.at):
        cells = cells_of(left, seeds, CHOOSES)
        steps = {cell.name: max(1, round(share * steps_of(planned.recipe_of(cell.candidate)))) for cell in cells}
        processes.train(cells, steps)
        whole = [cell for cell in cells if processes.end_of(cell).status in ("paused", "done")]
        each: dict[str, list[float]] = {}  # a candidate's rewards, of each seed; one that failed with a seed has none
        for cell in whole:
            if (reward := reward_at(processes.run_of(cell), steps[cell.name])) is not None:
                each.setdefault(cell.candidate.key, []).append(reward)
        means = {key: fmean(found) for key, found in each.items() if len(found) == len(seeds)}
        groups = [[one for one in arm if one in left] for arm in planned.arms]
        left = [one for arm in groups for one in better_share(arm, means, keep)]
        for cell in whole:
            if cell.candidate not in left:
                processes.ended[cell.name] = CellEnd("ended early", f"not among the better at {share:.0%} of the steps")
    processes.train(cells_of(left, seeds, CHOOSES))


def reward_at(run: Path, step: int) -> float | None:
    """Mean reward of the last steps up to one, by which a cell that pauses there is judged; None: it has none."""
    rows = read_log(run / "metrics.jsonl")
    rewards = [float(row["reward"]) for row in rows if row.get("reward") is not None and int(row["step"]) <= step]
    return fmean(rewards[-_LAST_STEPS:]) if rewards else None


def check_servers(planned: Study) -> None:
    """Refuses cells beside each other of which one puts weights into the servers that all are answered by.

    Raises:
        RecipeError: With the arm.
        PerlError: A cell cannot run.
    """
    for one, recipe in zip(planned.candidates, planned.recipes, strict=True):
        beside = planned.file.at_once > 1 and recipe.rollout.addresses
        if beside and prepare(recipe, engine_here=False).served_rank is None:
            what = f"{one.title} puts its weights into the servers, which would answer the other cells with them"
            raise RecipeError(what, planned.layer.where(("at_once",)), "at_once: 1, or another study for it")


def cost_lines(planned: Study) -> Iterator[str]:
    """What each arm costs, for a person to read, without loading weights.

    Raises:
        PerlError: A cell cannot run, or not beside the others.
    """
    check_servers(planned)
    file = planned.file
    rows = [["arm", "cells that choose", "cells that score", "trains", "GiB a cell", "a cell trains"]]
    cells, time, memory = 0, Range(0.0, 0.0), 0.0
    for arm in planned.arms:
        plan = prepare(planned.recipe_of(arm[0]), engine_here=False)
        ((_, column),) = forecast_of(plan).strategies.items()
        title, trains = arm[0].title, column.step.times(plan.steps)
        choosing = len(arm) * len(file.seeds.choose)
        finalists = len(arm) if not file.chosen else 2 if file.baseline and title != planned.baseline else 1
        scoring = finalists * len(file.seeds.score)
        took = f"{duration(trains.low)} to {duration(trains.high)}"
        gib = column.memory.least / GIB
        rows.append([title, f"{choosing}", f"{scoring}", f"{plan.trainable_parameters:,}", f"{gib:.2f}", took])
        cells, memory = cells + choosing + scoring, max(memory, gib)
        time = time.plus(trains.times(choosing + scoring))
    yield from plain_table(rows)
    yield ""
    most, took = "at most " if file.halving or file.baseline else "", f"{duration(time.low)} to {duration(time.high)}"
    yield f"{most}{cells} cells, {took} of training one after the other (derived)"
    side = f"{file.at_once} at once, {counted(file.threads, 'thread')} each"
    yield f"{side}: up to {memory * file.at_once:.2f} GiB"
    if len(file.seeds.score) < 2:
        yield "one seed scores: there will be no error over seeds, and no difference can be told from chance"
