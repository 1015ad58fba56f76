"""Runs as the rows of one table: settings by score, each with its seeds below it, then what has no score.

RunLogs, measure -> Comparison
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perl.errors import PerlError, did_you_mean
from perl.evaluation.bases import numbered
from perl.evaluation.metrics import Difference
from perl.reports.comparison.cells import Cell, CellDifference, SeedRun, best_of, compare_cells, family_size
from perl.reports.comparison.measure import REWARD, Measure, Measured, choose_measure, last_mean, measured
from perl.reports.comparison.settings import SEEDS, differing_of, identity_of, seed_of, settings_of, what_differs
from perl.reports.page_data import names_of
from perl.reports.run_log import RunLog, number


@dataclass(frozen=True)
class Row:
    """A run, or the runs of one setting that differ in nothing but their seeds.

    Attributes:
        name: Unlike every other row's.
        kind: ``run``, ``seeds`` (a mean over seeds), or ``seed`` (a run of the ``seeds`` row above it).
        folder: Of a run.
        status: ``done``, ``running``, ``failed``, ``interrupted`` or ``killed``; of several seeds ``done``.
        reason: Why there is no score; empty where there is one.
        settings: Recipe key -> text of those that differ between the runs.
        seeds: That it was trained with.
        group: Number of the rows that were asked alike, from 0; None without a score.
        score: None: there is none.
        stderr: Its standard error, over problems, steps or seeds; None: not known.
        count: Problems, steps or seeds that it is a mean of.
        reference: Whether the others of its group are compared with it.
        difference: This less the reference, its p value corrected; None: it is not compared.
        p_value: The difference's own.
        paired: By ``seed``, by ``problem``, or not: empty.
        pairs: How many.
        reward: Mean of the last steps; None: not logged.
        tokens: Of prompts and completions in training.
        training_seconds: Sum of the steps' wall time, without evaluations.
        seconds: Wall time with everything.
        trainable_parameters: Numbers that were trained.
    """

    name: str
    kind: str
    folder: str | None
    status: str
    reason: str
    settings: Mapping[str, str]
    seeds: tuple[int, ...]
    group: int | None = None
    score: float | None = None
    stderr: float | None = None
    count: int = 0
    reference: bool = False
    difference: Difference | None = None
    p_value: float | None = None
    paired: str = ""
    pairs: int = 0
    reward: float | None = None
    tokens: float | None = None
    training_seconds: float | None = None
    seconds: float | None = None
    trainable_parameters: float | None = None

    @property
    def what_differs(self) -> str:
        """``dora lr 1e-3``; of a seed of the row above ``seed 1``."""
        if self.kind == "seeds":
            return f"seeds {' '.join(map(str, self.seeds))}"
        return f"seed {self.seeds[0]}" if self.kind == "seed" else what_differs(self.settings)


@dataclass(frozen=True)
class Comparison:
    """Runs, compared.

    Attributes:
        measure: By what.
        rows: The group of the reference first; each by score, a setting's seeds below it; then those without a score.
        groups: Of each group the cells that were compared, with the number of the reference among them.
        chosen: The reference is the best by these scores, and nobody named it before.
        measured: Folder -> what the run has of the measure.
        tests: For how many differences p values are corrected.
    """

    measure: Measure
    rows: tuple[Row, ...]
    groups: tuple[tuple[tuple[Cell, ...], int], ...]
    chosen: bool
    measured: Mapping[str, Measured]
    tests: int


@dataclass(frozen=True)
class _Run:
    """A run with its row, and what it scored."""

    row: Row
    settings: tuple[tuple[str, str], ...]
    measured: Measured | str


def compare_runs(runs: Sequence[RunLog], *, to: str | None = None, score: str | None = None) -> Comparison:
    """Puts runs beside each other.

    Args:
        runs: At least one, finished or not.
        to: The run, its folder or a row's name, that the others are compared with; None: the best.
        score: As :func:`perl.reports.comparison.measure.choose_measure` takes it.

    Raises:
        PerlError: There is nothing to compare by, or the run to compare with is none of them or has no score.
    """
    measure = choose_measure(runs, score)
    names = numbered(names_of(runs))
    columns = settings_of(runs)
    differing = differing_of(runs, columns)
    known = [
        _Run(
            _row(run, name, settings),
            identity_of(column),
            measured(run, measure),
        )
        for run, name, settings, column in zip(runs, names, differing, columns, strict=True)
    ]
    return _compared(measure, known, to)


def _compared(measure: Measure, known: Sequence[_Run], to: str | None) -> Comparison:
    cells = _cells(known)
    named = None if to is None else _named(to, known, cells)
    order = sorted(_groups(cells), key=lambda group: named is not None and named not in group)
    groups = [[cells[i] for i in group] for group in order]
    compared = [
        (
            tuple(one.cell for one in group),
            numbers.index(named) if named in numbers else best_of([c.cell for c in group]),
        )
        for numbers, group in zip(order, groups, strict=True)
    ]
    # With a named one only its own group is compared: the others are asked otherwise.
    shown = compared if named is None else compared[:1]
    found = compare_cells(shown, chosen=named is None)
    rows: list[Row] = []
    for at, (group, (_, reference)) in enumerate(zip(groups, compared, strict=True)):
        differences = found[at] if at < len(found) else [None] * len(group)
        for i in sorted(range(len(group)), key=lambda i: -group[i].cell.score):
            is_reference = i == reference and at < len(found) and len(group) > 1
            rows += group[i].rows(at, differences[i], is_reference=is_reference)
    rows += [replace(run.row, reason=run.measured) for run in known if isinstance(run.measured, str)]
    scores = {str(run.row.folder): run.measured for run in known if isinstance(run.measured, Measured)}
    tests = sum(family_size(len(of_group), chosen=named is None) for of_group, _ in shown)
    return Comparison(measure, tuple(rows), tuple(compared), named is None, scores, tests)


@dataclass(frozen=True)
class _Members:
    """A cell with the runs that it is made of."""

    cell: Cell
    runs: tuple[_Run, ...]

    def rows(self, group: int, found: CellDifference | None, *, is_reference: bool) -> list[Row]:
        """A row, and below it one for each of several seeds."""
        single = [_with_score(run, group) for run in self.runs]
        row = single[0] if len(single) == 1 else _over_seeds(self.cell.name, single)
        row = replace(row, group=group, score=self.cell.score, stderr=_known(self.cell.stderr), reference=is_reference)
        if found is not None:
            own = _known(found.p_value)
            row = replace(row, difference=found.difference, p_value=own, paired=found.paired, pairs=found.pairs)
        return [row, *(replace(one, kind="seed") for one in single if len(single) > 1)]


def _over_seeds(name: str, single: Sequence[Row]) -> Row:
    """A row for the mean of several."""
    return replace(
        single[0],
        name=name,
        kind="seeds",
        folder=None,
        seeds=tuple(row.seeds[0] for row in single),
        settings={key: text for key, text in single[0].settings.items() if key not in SEEDS},
        count=len(single),
        reward=_mean([row.reward for row in single]),
        tokens=_mean([row.tokens for row in single]),
        training_seconds=_mean([row.training_seconds for row in single]),
        seconds=_mean([row.seconds for row in single]),
        trainable_parameters=_mean([row.trainable_parameters for row in single]),
    )


def _with_score(run: _Run, group: int) -> Row:
    if isinstance(run.measured, str):
        return run.row
    found = run.measured
    return replace(run.row, group=group, score=found.value, stderr=_known(found.stderr), count=found.count)


def _row(run: RunLog, name: str, settings: Mapping[str, str]) -> Row:
    reward = last_mean(run, REWARD)
    tokens = [value for row in run.rows if (value := number(row.get("num_tokens"))) is not None]
    steps = [value for row in run.rows if (value := number(row.get("step_time"))) is not None]
    return Row(
        name,
        "run",
        str(run.path),
        run.status,
        "",
        settings,
        (seed_of(run),),
        reward=None if reward is None else reward[0],
        tokens=tokens[-1] if tokens else None,
        training_seconds=math.fsum(steps) if steps else None,
        seconds=number(run.facts.get("seconds")),
        trainable_parameters=number(run.facts.get("trainable_parameters")),
    )


def _cells(runs: Sequence[_Run]) -> list[_Members]:
    """Runs of the same settings that were asked alike together, if their seeds differ."""
    together: dict[tuple[object, ...], list[_Run]] = {}
    for i, run in enumerate(runs):
        if isinstance(run.measured, str):
            continue
        # Without any known setting nothing says that two are alike; nor do two runs of one seed.
        key: tuple[object, ...] = (run.measured.asked, run.settings if run.settings else i)
        if any(one.row.seeds == run.row.seeds for one in together.get(key, ())):
            key = (*key, i)
        together.setdefault(key, []).append(run)
    found = list(together.values())
    texts = [
        what_differs(of[0].row.settings, seed=False) or f"{len(of)} seeds" if len(of) > 1 else of[0].row.name
        for of in found
    ]
    taken = [run.row.name for run in runs]
    several = [f"{text} *" if text in taken and len(of) > 1 else text for text, of in zip(texts, found, strict=True)]
    return [
        _Members(
            Cell(name, tuple(SeedRun(run.row.seeds[0], m) for run in of if isinstance(m := run.measured, Measured))),
            tuple(of),
        )
        for name, of in zip(numbered(several), found, strict=True)
    ]


def _groups(cells: Sequence[_Members]) -> list[list[int]]:
    """Numbers of the cells that were asked alike, the largest group first."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, one in enumerate(cells):
        groups.setdefault(one.cell.runs[0].measured.asked, []).append(i)
    return sorted(groups.values(), key=len, reverse=True)


def _named(to: str, runs: Sequence[_Run], cells: Sequence[_Members]) -> int:
    """The number of the cell that a name or a folder stands for."""
    place = Path(to).expanduser().resolve()
    for i, one in enumerate(cells):
        folders = [Path(str(run.row.folder)).resolve() for run in one.runs]
        if to == one.cell.name or to in [run.row.name for run in one.runs] or place in folders:
            return i
    for run in runs:
        if isinstance(run.measured, str) and (to == run.row.name or place == Path(str(run.row.folder)).resolve()):
            raise PerlError(f"{to} has no score to compare with: {run.measured}", "--to")
    known = [*(run.row.name for run in runs), *(one.cell.name for one in cells)]
    raise PerlError(f"{to!r} is not among the runs", "--to", did_you_mean(to, set(known)))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) and known else None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
