"""Runs as the rows of one table: settings by score, each with its seeds below it, then what has no score.

RunLogs, measure -> Comparison: paired differences, with p values that are corrected for their number

Two settings of several seeds are compared over the seeds that both have; two single runs are two adapters, which are
compared over the problems that both answered.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perl.errors import PerlError, did_you_mean
from perl.evaluation.scoring.found_results import numbered
from perl.evaluation.scoring.metrics import Difference, corrected, paired_difference
from perl.evaluation.scoring.seeds import mean_over_seeds, paired_by_seed
from perl.reports.comparison.measure import REWARD, Measure, Measured, choose_measure, last_mean, measured
from perl.reports.comparison.runs import SEEDS, differing_of, identity_of, seed_of, settings_of, what_differs
from perl.reports.run_log import RunLog, names_of, number

SEED, PROBLEM = "seed", "problem"


@dataclass(frozen=True)
class RunRow:
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
        reference: Whether others are compared with it.
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
class ScoredRun:
    """A run with its row, what it has in common with its other seeds, and what it scored."""

    row: RunRow
    identity: tuple[tuple[str, str], ...]
    measured: Measured

    @property
    def seed(self) -> int:
        """Of the training."""
        return self.row.seeds[0]


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ in nothing but their seeds: at least one, all asked alike.

    Attributes:
        name: For people, unlike every other one's.
        runs: Each with another seed.
    """

    name: str
    runs: tuple[ScoredRun, ...]

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
class Paired:
    """A setting less the reference; interval and p value are NaN where nothing pairs the two.

    Attributes:
        difference: With a p value that is corrected where several were compared.
        p_value: The difference's own.
        by: ``seed``, ``problem``, or empty.
        pairs: How many.
    """

    difference: Difference
    p_value: float
    by: str
    pairs: int


@dataclass(frozen=True)
class RunComparison:
    """Runs, compared.

    Attributes:
        measure: By what.
        rows: Those that were asked as the reference first; by score, seeds below their setting; then those without.
        groups: Settings that were asked alike; those of the first are compared.
        chosen: The reference is the best by these scores, and nobody named it before.
        tests: For how many differences p values are corrected.
    """

    measure: Measure
    rows: tuple[RunRow, ...]
    groups: tuple[tuple[SeedGroup, ...], ...]
    chosen: bool
    tests: int

    @property
    def scored(self) -> list[ScoredRun]:
        """Every run that has a score."""
        return [run for group in self.groups for setting in group for run in setting.runs]


def compare_runs(runs: Sequence[RunLog], *, to: str | None = None, score: str | None = None) -> RunComparison:
    """Puts runs beside each other.

    Args:
        runs: At least one, finished or not.
        to: The run, its folder or a row's name, that the others are compared with; None: the best.
        score: As :func:`perl.reports.comparison.measure.choose_measure` takes it.

    Raises:
        PerlError: There is nothing to compare by, or the run to compare with is none of them or has no score.
    """
    measure, columns = choose_measure(runs, score), settings_of(runs)
    names = numbered(names_of(runs))
    rows = [_row(*each) for each in zip(runs, names, differing_of(runs, columns), strict=True)]
    found = [measured(run, measure) for run in runs]
    scored = [
        ScoredRun(row, identity_of(column), one)
        for row, column, one in zip(rows, columns, found, strict=True)
        if isinstance(one, Measured)
    ]
    without = [replace(row, reason=one) for row, one in zip(rows, found, strict=True) if isinstance(one, str)]
    settings = _settings(scored, names)
    named = None if to is None else _named(to, settings, without)
    groups = sorted(_groups(settings), key=lambda group: named is not None and named not in group)
    first = groups[0] if groups else []
    reference = named or max(first, key=lambda one: one.score, default=None)
    pairs, tests = ({}, 0) if reference is None else compare_settings(first, reference, chosen=named is None)
    shown = [
        row
        for number, group in enumerate(groups)
        for setting in sorted(group, key=lambda one: -one.score)
        for row in _rows_of(setting, number, pairs.get(setting.name), reference=setting is reference and tests > 0)
    ]
    return RunComparison(measure, (*shown, *without), tuple(map(tuple, groups)), named is None, tests)


def compare_settings(
    settings: Sequence[SeedGroup], reference: SeedGroup, *, chosen: bool
) -> tuple[dict[str, Paired], int]:
    """Every setting less the reference, with p values that are corrected for their number.

    Args:
        settings: That were asked alike, the reference among them.
        reference: That the others are compared with.
        chosen: It is the best by these scores, so that any two settings could have been compared: of n there are
            n (n - 1) / 2 differences, else n - 1.

    Returns:
        Name of a setting -> its difference; and for how many differences p values are corrected.
    """
    found = {one.name: difference_of(reference, one) for one in settings if one is not reference}
    tests = family_size(len(settings), chosen=chosen)
    together = corrected([one.difference for one in found.values()], tests if chosen else 0)
    return {
        name: replace(one, difference=difference or one.difference)
        for (name, one), difference in zip(found.items(), together, strict=True)
    }, tests


def family_size(count: int, *, chosen: bool) -> int:
    """How many differences p values are corrected for; see :func:`compare_settings`."""
    return count * (count - 1) // 2 if chosen else count - 1


def difference_of(reference: SeedGroup, other: SeedGroup) -> Paired:
    """A setting less another one, not corrected.

    Returns:
        Paired by seed where two seeds or more are common; by problem for two single runs, or for the runs of the only
        common seed; else the mean alone.
    """
    common = sorted(reference.by_seed.keys() & other.by_seed.keys())
    found = paired_by_seed(reference.by_seed, other.by_seed)
    if found is not None:
        return Paired(found, found.p_value, SEED, len(common))
    single = len(reference.runs) == len(other.runs) == 1
    if single or len(common) == 1:
        before, after = (
            next(run.measured.by_problem for run in one.runs if single or run.seed == common[0])
            for one in (reference, other)
        )
        if before and before.keys() == after.keys():
            found = paired_difference([[value] for value in before.values()], [[after[id]] for id in before])
            return Paired(found, found.p_value, PROBLEM, len(before))
    mean = other.score - reference.score
    return Paired(Difference(mean, math.nan, math.nan, math.nan, math.nan), math.nan, "", 0)


def _rows_of(setting: SeedGroup, group: int, found: Paired | None, *, reference: bool) -> list[RunRow]:
    """A row, and below it one for each of several seeds."""
    single = [
        replace(
            run.row,
            group=group,
            score=run.measured.value,
            stderr=_known(run.measured.stderr),
            count=run.measured.count,
        )
        for run in setting.runs
    ]
    row = single[0] if len(single) == 1 else _over_seeds(setting, single)
    row = replace(row, reference=reference)
    if found is not None:
        own = _known(found.p_value)
        row = replace(row, difference=found.difference, p_value=own, paired=found.by, pairs=found.pairs)
    return [row, *(replace(one, kind="seed") for one in single if len(single) > 1)]


def _over_seeds(setting: SeedGroup, single: Sequence[RunRow]) -> RunRow:
    """A row for the mean of several."""
    first = single[0]
    costs = ("reward", "tokens", "training_seconds", "seconds", "trainable_parameters")
    means: dict[str, Any] = {name: _mean([getattr(row, name) for row in single]) for name in costs}
    return replace(
        first,
        name=setting.name,
        kind="seeds",
        folder=None,
        seeds=tuple(row.seeds[0] for row in single),
        settings={key: text for key, text in first.settings.items() if key not in SEEDS},
        score=setting.score,
        stderr=_known(setting.stderr),
        count=len(single),
        **means,
    )


def _row(run: RunLog, name: str, settings: Mapping[str, str]) -> RunRow:
    reward = last_mean(run, REWARD)
    tokens = [value for row in run.rows if (value := number(row.get("num_tokens"))) is not None]
    steps = [value for row in run.rows if (value := number(row.get("step_time"))) is not None]
    return RunRow(
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


def _settings(runs: Sequence[ScoredRun], taken: Sequence[str]) -> list[SeedGroup]:
    """Runs of the same settings that were asked alike together, if their seeds differ."""
    together: dict[tuple[object, ...], list[ScoredRun]] = {}
    for i, run in enumerate(runs):
        # Without any known setting nothing says that two are alike; nor do two runs of one seed.
        key: tuple[object, ...] = (_asked(run), run.identity or i)
        if any(one.seed == run.seed for one in together.get(key, ())):
            key = (*key, i)
        together.setdefault(key, []).append(run)
    names = []
    for of in together.values():
        name = of[0].row.name
        if len(of) > 1:
            name = what_differs(of[0].row.settings, seed=False) or f"{len(of)} seeds"
            name = f"{name} *" if name in taken else name
        names.append(name)
    return [SeedGroup(name, tuple(of)) for name, of in zip(numbered(names), together.values(), strict=True)]


def _asked(run: ScoredRun) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(run.measured.asked.items()))


def _groups(settings: Sequence[SeedGroup]) -> list[list[SeedGroup]]:
    """Those that were asked alike, the largest group first."""
    groups: dict[object, list[SeedGroup]] = {}
    for one in settings:
        groups.setdefault(_asked(one.runs[0]), []).append(one)
    return sorted(groups.values(), key=len, reverse=True)


def _named(to: str, settings: Sequence[SeedGroup], without: Sequence[RunRow]) -> SeedGroup:
    """The setting that a name or a folder stands for."""
    place = Path(to).expanduser().resolve()

    def is_meant(row: RunRow) -> bool:
        return to == row.name or place == Path(str(row.folder)).resolve()

    for one in settings:
        if to == one.name or any(is_meant(run.row) for run in one.runs):
            return one
    for row in without:
        if is_meant(row):
            raise PerlError(f"{to} has no score to compare with: {row.reason}", "--to")
    known = {*(row.name for row in without), *(run.row.name for one in settings for run in one.runs)}
    raise PerlError(f"{to!r} is not among the runs", "--to", did_you_mean(to, known | {one.name for one in settings}))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) and known else None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
