"""What a study costs, before it is paid for: its cells, their memory and time, as `perl plan` derives them.

Study -> a table, a row each arm
"""

from collections.abc import Iterator
from dataclasses import dataclass

from perl.run.progress import duration
from perl.run.tables import plain_table
from perl.training.cost_time import Range
from perl.training.hardware import GIB
from perl.training.question import forecast_of
from perl.training.stages import prepare
from perl.training.studies.cells import Candidate, counted
from perl.training.studies.written_plan import Study


@dataclass(frozen=True)
class ArmCost:
    """Of one of the compared.

    Attributes:
        choosing: Cells at most; halving ends some of them early.
        scoring: Cells at most; one candidate, and perhaps another that has the baseline's settings.
        trainable: Parameters.
        memory: GiB of a cell at least.
        cell: Seconds that a cell trains, without its evaluation.
    """

    title: str
    choosing: int
    scoring: int
    trainable: int
    memory: float
    cell: Range


def arm_costs(planned: Study) -> list[ArmCost]:
    """What each arm costs, without loading weights.

    Raises:
        PerlError: A cell cannot run.
    """
    seeds, base = planned.file.seeds, planned.baseline
    found = []
    for arm in planned.arms:
        first: Candidate = arm[0]
        plan = prepare(planned.recipe_of(first), engine_here=False)
        ((_, column),) = forecast_of(plan).strategies.items()
        title, tuned = first.title, bool(planned.file.chosen)
        finalists = (2 if base is not None and title != base else 1) if tuned else len(arm)
        found.append(
            ArmCost(
                title,
                len(arm) * len(seeds.choose) if tuned else 0,
                finalists * len(seeds.score),
                plan.trainable_parameters,
                column.memory.least / GIB,
                column.step.times(plan.steps),
            )
        )
    return found


def cost_lines(planned: Study) -> Iterator[str]:
    """The costs for a person to read."""
    costs, file = arm_costs(planned), planned.file
    head = ["arm", "cells that choose", "cells that score", "trains", "GiB a cell", "a cell trains"]
    rows = [
        [c.title, f"{c.choosing}", f"{c.scoring}", f"{c.trainable:,}", f"{c.memory:.2f}", _range(c.cell)] for c in costs
    ]
    yield from plain_table([head, *rows])
    cells = sum(cost.choosing + cost.scoring for cost in costs)
    low, high = (sum((c.choosing + c.scoring) * getattr(c.cell, end) for c in costs) for end in ("low", "high"))
    yield ""
    upper = "at most " if file.halving is not None or file.baseline else ""
    yield f"{upper}{cells} cells, {duration(low)} to {duration(high)} of training one after the other (derived)"
    side = f"{file.at_once} at once, {counted(file.threads, 'thread')} each"
    together = max(cost.memory for cost in costs) * file.at_once
    yield f"{side}: up to {together:.2f} GiB, of which the base is held once where cells share it"
    if len(file.seeds.score) < 2:
        yield "one seed scores: there will be no error over seeds, and no difference can be told from chance"
    if file.budget is not None:
        yield f"after {duration(file.budget)} of core time no cell is begun"


def _range(seconds: Range) -> str:
    return f"{duration(seconds.low)} to {duration(seconds.high)}"
