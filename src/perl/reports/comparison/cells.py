"""Settings beside each other, each trained with one seed or several: which is better, and how sure that is.

Cells, the reference -> a difference of each, paired, with p values that are corrected for their number

Nothing here reads a file. Two settings of several seeds are compared over the seeds that both have; two single runs are
two adapters, which are compared over the problems that both answered.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from perl.evaluation.metrics import Difference, corrected, paired_difference
from perl.evaluation.power import guessed_error, smallest_gain
from perl.evaluation.seeds import mean_over_seeds, paired_by_seed, smallest_difference
from perl.reports.comparison.measure import Measured

SEED, PROBLEM = "seed", "problem"


@dataclass(frozen=True)
class SeedRun:
    """A run of a cell: its seed, and what it scored."""

    seed: int
    measured: Measured


@dataclass(frozen=True)
class Cell:
    """Runs that differ in nothing but their seeds.

    Attributes:
        name: For people, unlike every other one's.
        runs: At least one, each with another seed; all asked alike.
    """

    name: str
    runs: tuple[SeedRun, ...]

    @property
    def by_seed(self) -> dict[int, float]:
        """Seed -> score."""
        return {run.seed: run.measured.value for run in self.runs}

    @property
    def score(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.by_seed.values())

    @property
    def stderr(self) -> float:
        """Of several seeds from how they differ; of a single run its own, over problems or steps."""
        if len(self.runs) == 1:
            return self.runs[0].measured.stderr
        return mean_over_seeds(list(self.by_seed.values())).stderr


@dataclass(frozen=True)
class CellDifference:
    """A cell less the reference.

    Attributes:
        difference: With a p value that is corrected for all differences of the comparison; interval and p value are NaN
            where nothing pairs the two.
        p_value: The difference's own.
        paired: By ``seed``, by ``problem``, or not: empty.
        pairs: How many.
    """

    difference: Difference
    p_value: float
    paired: str
    pairs: int


def best_of(cells: Sequence[Cell]) -> int:
    """The number of the cell with the highest score; of equal ones the first.

    Raises:
        ValueError: There is none.
    """
    return max(range(len(cells)), key=lambda i: cells[i].score)


def family_size(count: int, *, chosen: bool) -> int:
    """How many differences p values are corrected for.

    Args:
        count: Cells that are compared, the reference included.
        chosen: The reference is the best by the same scores, so that any two of them could have been compared.
    """
    return count * (count - 1) // 2 if chosen else count - 1


def difference_of(reference: Cell, other: Cell) -> CellDifference:
    """A cell less another one, not corrected.

    Returns:
        Paired by seed where two seeds or more are common; by problem for two single runs, or for the runs of the only
        common seed; else the mean alone.
    """
    common = sorted(reference.by_seed.keys() & other.by_seed.keys())
    found = paired_by_seed(reference.by_seed, other.by_seed)
    if found is not None:
        return CellDifference(found, found.p_value, SEED, len(common))
    single = len(reference.runs) == len(other.runs) == 1
    if single or len(common) == 1:
        before, after = (
            next(run.measured for run in cell.runs if single or run.seed == common[0]) for cell in (reference, other)
        )
        if before.by_problem and before.by_problem.keys() == after.by_problem.keys():
            rows = [[[of.by_problem[problem]] for problem in before.by_problem] for of in (before, after)]
            found = paired_difference(rows[0], rows[1])
            return CellDifference(found, found.p_value, PROBLEM, len(before.by_problem))
    mean = other.score - reference.score
    return CellDifference(Difference(mean, math.nan, math.nan, math.nan, math.nan), math.nan, "", 0)


def compare_cells(groups: Sequence[tuple[Sequence[Cell], int]], *, chosen: bool) -> list[list[CellDifference | None]]:
    """Every cell less the reference of its group, with p values that are corrected for all groups together.

    Args:
        groups: Cells that were asked alike, and the number of the one that the others are compared with.
        chosen: The references are the best by these scores; see :func:`family_size`.

    Returns:
        For each group as many as cells; None for the reference.
    """
    found = [
        [None if i == number else difference_of(cells[number], cell) for i, cell in enumerate(cells)]
        for cells, number in groups
    ]
    family = sum(family_size(len(cells), chosen=chosen) for cells, _ in groups)
    flat = [None if one is None else one.difference for of_group in found for one in of_group]
    together = iter(corrected(flat, family if chosen else 0))
    return [
        [
            None if one is None or difference is None else replace(one, difference=difference)
            for one, difference in zip(of_group, together, strict=False)
        ]
        for of_group in found
    ]


def smallest_shown(differences: Sequence[CellDifference], k: int, tests: int) -> dict[str, tuple[float | None, int]]:
    """How large a true difference had to be, so that 80 of 100 such comparisons show it.

    Args:
        differences: Of one comparison.
        k: Completions a problem.
        tests: For how many differences p values are corrected.

    Returns:
        ``seed`` and ``problem``, as far as any is paired so and has an error -> by the largest error among them, None
        where no difference could be shown; and how many pairs that one has.
    """
    shown: dict[str, tuple[float | None, int]] = {}
    for how in (SEED, PROBLEM):
        paired = [one for one in differences if one.paired == how and (one.difference.stderr > 0 or how == PROBLEM)]
        if not paired:
            continue
        widest = max(paired, key=lambda one: one.difference.stderr)
        error, pairs = widest.difference.stderr, widest.pairs
        if how == SEED:
            shown[how] = (smallest_difference(error, pairs, tests), pairs)
        else:
            shown[how] = (smallest_gain(error if error > 0 else guessed_error(pairs, k), pairs, tests), pairs)
    return shown
