"""How often 95 % intervals hold the true score, and the true difference, when problems are few or nearly all alike.

populations of problems -> evaluations drawn from them -> coverage and width of Student's t interval and of ours

A population is a distribution of difficulties, the chance of each problem to be solved; for a difference one of pairs
of them. Of each, evaluations are drawn: n problems, k completions a problem. The truth is the mean over the population.
Prints the cells by number of problems and completions, writes all to ``results/interval_coverage.json``.

    python benchmarks/interval_coverage.py [--evaluations 2000] [--count 30 --k 4]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.random import Generator
from numpy.typing import NDArray

from perl.zoo.intervals import intervals

# Dimensions: E evaluations, P problems.
Floats = NDArray[numpy.float64]
Draw = Callable[[Generator, tuple[int, int]], tuple[Floats, Floats]]
"""Difficulties for base and adapter, shape (E, P)."""

RESULTS = Path(__file__).parent / "results" / "interval_coverage.json"
COUNTS, KS, MEANS = (30, 100, 500), (1, 4, 16, 32), (0.03, 0.05, 0.5, 0.95, 0.97)
# A Beta's two parameters add up to this; None: all problems are equally hard.
SHAPES = {"bimodal": 0.3, "flat": 2.0, "unimodal": 20.0, "equal": None}
# Of 97.5 %, by degrees of freedom.
STUDENT = {29: 2.045230, 99: 1.984217, 499: 1.964729}
# Of evaluations whose interval holds the truth.
ENOUGH = 0.93
# Ends of an interval and truths that are the same differ by rounding.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Population:
    """Problems, or pairs of policies on problems.

    Attributes:
        kind: ``score`` or ``difference``.
        name: Of the distribution.
        truth: The mean that an interval should hold.
        draw: Difficulties; for a score the adapter's alone count.
        mean: Of the difficulties, for a score; of the base's, for a difference.
    """

    kind: str
    name: str
    truth: float
    draw: Draw
    mean: float


@dataclass(frozen=True)
class Cell:
    """A population asked n problems, k times each; shares of evaluations, and mean widths of the intervals."""

    kind: str
    name: str
    mean: float
    n: int
    k: int
    coverage_t: float
    coverage: float
    width_t: float
    width: float


def populations() -> Iterator[Population]:
    """Those of scores, then those of differences."""
    for mean in MEANS:
        for shape, size in SHAPES.items():
            of_shape = f"{shape} {mean}"
            draw = _difficulties(mean, size)
            yield Population("score", of_shape, mean, _alone(draw), mean)
            yield Population("difference", f"the same, {of_shape}", 0.0, _alone(draw), mean)
            yield Population("difference", f"half the gap on 30 %, {of_shape}", 0.15 * (1 - mean), _half(draw), mean)
            yield Population("difference", f"another draw on 20 %, {of_shape}", 0.0, _again(draw), mean)
            yield Population("difference", f"adapter all right, {of_shape}", 1 - mean, _all_right(draw), mean)
    for share in (0.01, 0.03, 0.1):
        yield Population("difference", f"ties, {share:g} gained", share, _ties(share, 0.0), 0.5)
        yield Population("difference", f"ties, {share:g} gained and as many lost", 0.0, _ties(share, share), 0.5)
        yield Population("difference", f"ties at 0.5, {share:g} gained whole", share / 2, _rare(share), 0.5)


def _difficulties(mean: float, size: float | None) -> Callable[[Generator, tuple[int, int]], Floats]:
    if size is None:
        return lambda _, shape: numpy.full(shape, mean)
    return lambda generator, shape: generator.beta(mean * size, (1 - mean) * size, shape)


def _alone(draw: Callable[[Generator, tuple[int, int]], Floats]) -> Draw:
    def both(generator: Generator, shape: tuple[int, int]) -> tuple[Floats, Floats]:
        base_EP = draw(generator, shape)
        return base_EP, base_EP

    return both


def _half(draw: Callable[[Generator, tuple[int, int]], Floats]) -> Draw:
    def both(generator: Generator, shape: tuple[int, int]) -> tuple[Floats, Floats]:
        base_EP = draw(generator, shape)
        return base_EP, numpy.where(generator.random(shape) < 0.3, (1 + base_EP) / 2, base_EP)

    return both


def _again(draw: Callable[[Generator, tuple[int, int]], Floats]) -> Draw:
    def both(generator: Generator, shape: tuple[int, int]) -> tuple[Floats, Floats]:
        base_EP = draw(generator, shape)
        return base_EP, numpy.where(generator.random(shape) < 0.2, draw(generator, shape), base_EP)

    return both


def _all_right(draw: Callable[[Generator, tuple[int, int]], Floats]) -> Draw:
    return lambda generator, shape: (draw(generator, shape), numpy.ones(shape))


def _ties(gained: float, lost: float) -> Draw:
    """Problems that are always or never solved, the same by both but for a few."""

    def both(generator: Generator, shape: tuple[int, int]) -> tuple[Floats, Floats]:
        place_EP, right_EP = generator.random(shape), (generator.random(shape) < 0.5).astype(float)
        base_EP = numpy.where(place_EP < gained, 0.0, numpy.where(place_EP > 1 - lost, 1.0, right_EP))
        adapter_EP = numpy.where(place_EP < gained, 1.0, numpy.where(place_EP > 1 - lost, 0.0, right_EP))
        return base_EP, adapter_EP

    return both


def _rare(share: float) -> Draw:
    def both(generator: Generator, shape: tuple[int, int]) -> tuple[Floats, Floats]:
        return numpy.full(shape, 0.5), numpy.where(generator.random(shape) < share, 1.0, 0.5)

    return both


def measure(population: Population, n: int, k: int, evaluations: int, seed: int) -> Cell:
    """How often both intervals hold the truth in evaluations of a population, and how wide they are."""
    generator = numpy.random.default_rng(seed)
    base_EP, adapter_EP = population.draw(generator, (evaluations, n))
    scores_EP = generator.binomial(k, adapter_EP) / k
    compared = population.kind == "difference"
    if compared:
        scores_EP -= generator.binomial(k, base_EP) / k
    mean_E, error_E = scores_EP.mean(axis=1), scores_EP.std(axis=1, ddof=1) / n**0.5
    ours = intervals(mean_E, error_E, n, difference=compared)
    lowest, reach_E = -1.0 if compared else 0.0, STUDENT[n - 1] * error_E
    students = numpy.maximum(lowest, mean_E - reach_E), numpy.minimum(1.0, mean_E + reach_E)
    held, width = zip(*(_held(low_E, high_E, population.truth) for low_E, high_E in (students, ours)), strict=True)
    return Cell(population.kind, population.name, population.mean, n, k, *held, *width)


def _held(low_E: Floats, high_E: Floats, truth: float) -> tuple[float, float]:
    inside_E = (low_E - ROUNDING <= truth) & (truth <= high_E + ROUNDING)
    return float(inside_E.mean()), float((high_E - low_E).mean())


def table(cells: Sequence[Cell]) -> list[str]:
    """A line for each kind, n and k: the worst coverages, and widths beside Student's in cells where his holds."""
    heading = f"{'':10} {'n':>4} {'k':>3} {'cells':>6} {'t: worst':>9} {'below 93 %':>11} {'ours: worst':>12}"
    lines = [f"{heading} {'below 93 %':>11} {'width / t: median, most':>24}"]
    for kind in ("score", "difference"):
        for n in sorted({cell.n for cell in cells}):
            for k in sorted({cell.k for cell in cells}):
                of = [cell for cell in cells if (cell.kind, cell.n, cell.k) == (kind, n, k)]
                ratios = [cell.width / cell.width_t for cell in of if cell.mean == 0.5 and cell.coverage_t >= ENOUGH]
                below = [sum(c.coverage_t < ENOUGH for c in of), sum(c.coverage < ENOUGH for c in of)]
                worst = min(c.coverage_t for c in of), min(c.coverage for c in of)
                lines.append(
                    f"{kind:10} {n:4} {k:3} {len(of):6} {worst[0]:9.1%} {below[0]:11} {worst[1]:12.1%} {below[1]:11} "
                    f"{statistics.median(ratios):17.2f} {max(ratios):6.2f}"
                )
    return lines


def _lines(found: dict[str, Any]) -> str:
    """As JSON, a line each of the table and of the cells."""
    facts = []
    for name, fact in found.items():
        inner = ",\n  ".join(map(json.dumps, fact)) if isinstance(fact, list) else None
        facts.append(f" {json.dumps(name)}: " + (json.dumps(fact) if inner is None else f"[\n  {inner}\n ]"))
    return "{\n" + ",\n".join(facts) + "\n}\n"


def _short(fact: str | float) -> str | float:
    return round(fact, 5) if isinstance(fact, float) else fact


def main() -> None:
    """All cells, or those that were asked for; only all of them are written."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--evaluations", type=int, default=2000, help="of each population, n and k")
    parser.add_argument("--count", type=int, choices=COUNTS, help="problems; all of them by default")
    parser.add_argument("--k", type=int, choices=KS, help="completions a problem; all of them by default")
    arguments = parser.parse_args()
    started, cells = time.monotonic(), []
    for n in (arguments.count,) if arguments.count else COUNTS:
        for k in (arguments.k,) if arguments.k else KS:
            for number, population in enumerate(populations()):
                cells.append(measure(population, n, k, arguments.evaluations, seed=1000 * n + 40 * k + number))
    lines = table(cells)
    print("\n".join(lines))
    found = {
        "evaluations": arguments.evaluations,
        "seconds": round(time.monotonic() - started, 1),
        "table": lines,
        "cells": [list(asdict(cells[0])), *([_short(fact) for fact in asdict(cell).values()] for cell in cells)],
    }
    if not arguments.count and not arguments.k:
        RESULTS.write_text(_lines(found), encoding="utf-8")


if __name__ == "__main__":
    main()
