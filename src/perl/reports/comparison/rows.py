"""Runs as the rows of one table: settings by score, each with its seeds below it, then what has no score.

RunLogs, measure -> RunComparison: differences by seed or by problem (:mod:`perl.evaluation.comparing.compared`)
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perl.errors import PerlError, did_you_mean
from perl.evaluation.comparing.compared import Paired, Scored, family_size, held_against
from perl.evaluation.scoring.found_results import numbered
from perl.reports.comparison.measure import REWARD, Measure, Measured, choose_measure, last_mean, measured
from perl.reports.comparison.runs import SEEDS, differing_of, identity_of, seed_of, settings_of, what_differs
from perl.reports.run_log import RunLog, names_of, number

_COSTS = ("reward", "tokens", "training_seconds", "seconds", "trainable_parameters")


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
    difference: Paired | None = None
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


@dataclass(frozen=True)
class SeedGroup(Scored):
    """Runs that differ in nothing but their seeds: at least one, all asked alike, each with another seed."""

    runs: tuple[ScoredRun, ...] = ()

    @property
    def asked(self) -> tuple[tuple[str, str], ...]:
        """How, in common with what it may be compared with."""
        return tuple(sorted(self.runs[0].measured.asked.items()))


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
    scored, without = list[ScoredRun](), list[RunRow]()
    for run, name, column, differing in zip(runs, names, columns, differing_of(runs, columns), strict=True):
        found = measured(run, measure)
        row = _row(run, name, differing, found)
        if isinstance(found, Measured):
            scored.append(ScoredRun(row, identity_of(column), found))
        else:
            without.append(row)
    settings = _settings(scored, names)
    named = None if to is None else _named(to, settings, without)
    by_asked: dict[object, list[SeedGroup]] = {}
    for one in settings:
        by_asked.setdefault(one.asked, []).append(one)
    groups = sorted(by_asked.values(), key=lambda group: (named is not None and named not in group, -len(group)))
    first = groups[0] if groups else []
    reference = named or max(first, key=lambda one: one.score, default=None)
    others = [one for one in first if one is not reference]
    tests = family_size(len(first), chosen=named is None)
    differences: dict[str, Paired] = {}
    if reference is not None:
        pairs = held_against(reference, others, tests if named is None else 0)
        differences = {one.name: pair for one, pair in zip(others, pairs, strict=True)}
    rows = list[RunRow]()
    for position, group in enumerate(groups):
        for one in sorted(group, key=lambda one: -one.score):
            single = [replace(run.row, group=position) for run in one.runs]
            row = single[0] if len(single) == 1 else _over_seeds(one, single)
            is_reference = one is reference and tests > 0
            rows.append(replace(row, reference=is_reference, difference=differences.get(one.name)))
            rows += [replace(seed, kind="seed") for seed in single if len(single) > 1]
    return RunComparison(measure, (*rows, *without), tuple(map(tuple, groups)), named is None, tests)


def _over_seeds(setting: SeedGroup, single: Sequence[RunRow]) -> RunRow:
    """A row for the mean of several; what is not known of one of them is not known of it."""
    means: dict[str, Any] = {}
    for name in _COSTS:
        values = [value for row in single if (value := getattr(row, name)) is not None]
        means[name] = statistics.fmean(values) if len(values) == len(single) else None
    return replace(
        single[0],
        name=setting.name,
        kind="seeds",
        folder=None,
        seeds=tuple(row.seeds[0] for row in single),
        settings={key: text for key, text in single[0].settings.items() if key not in SEEDS},
        score=setting.score,
        stderr=setting.stderr,
        count=len(single),
        **means,
    )


def _row(run: RunLog, name: str, settings: Mapping[str, str], found: Measured | str) -> RunRow:
    reward = last_mean(run, REWARD)
    tokens = [value for row in run.rows if (value := number(row.get("num_tokens"))) is not None]
    steps = [value for row in run.rows if (value := number(row.get("step_time"))) is not None]
    row = RunRow(
        name,
        "run",
        str(run.path),
        run.status,
        found if isinstance(found, str) else "",
        settings,
        (seed_of(run),),
        reward=None if reward is None else reward[0],
        tokens=tokens[-1] if tokens else None,
        training_seconds=math.fsum(steps) if steps else None,
        seconds=number(run.facts.get("seconds")),
        trainable_parameters=number(run.facts.get("trainable_parameters")),
    )
    if isinstance(found, str):
        return row
    return replace(row, score=found.value, stderr=number(found.stderr), count=found.count)


def _settings(runs: Sequence[ScoredRun], taken: Sequence[str]) -> list[SeedGroup]:
    """Runs of the same settings that were asked alike together, if their seeds differ."""
    together: dict[tuple[object, ...], dict[int, ScoredRun]] = {}
    for i, run in enumerate(runs):
        # Without any known setting nothing says that two are alike; nor do two runs of one seed.
        key: tuple[object, ...] = (tuple(sorted(run.measured.asked.items())), run.identity or i)
        seed = run.row.seeds[0]
        together.setdefault((*key, i) if seed in together.get(key, {}) else key, {})[seed] = run
    names = []
    for of in together.values():
        first = next(iter(of.values())).row
        name = (what_differs(first.settings, seed=False) or f"{len(of)} seeds") if len(of) > 1 else first.name
        names.append(f"{name} *" if len(of) > 1 and name in taken else name)
    found = []
    for name, of in zip(numbered(names), together.values(), strict=True):
        scores = {seed: run.measured for seed, run in of.items()}
        by_seed = {seed: one.value for seed, one in scores.items()}
        by_problem = {seed: one.by_problem for seed, one in scores.items()}
        error = next(iter(scores.values())).stderr
        found.append(SeedGroup(name, by_seed, by_problem, error, tuple(of.values())))
    return found


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
