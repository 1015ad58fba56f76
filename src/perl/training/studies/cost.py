"""What a study costs, before it is paid for: its cells, their memory and time, as `perl plan` derives them.

Study -> a table, a row each arm; refuses cells that cannot share their servers
"""

from collections.abc import Iterator

from perl.errors import RecipeError
from perl.run.progress import duration
from perl.run.tables import plain_table
from perl.training.forecast import forecast_of
from perl.training.hardware import GIB, Range
from perl.training.stages import prepare
from perl.training.studies.cells import counted
from perl.training.studies.plan import Study


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
