"""How often an evaluation shows the gain that a plan calls the smallest, by the rule of tables and cards.

populations of problems, gain -> evaluations drawn from them -> share that shows it

A population is problems with chances to be solved: by the base, from a Beta distribution, and by the adapter. Those of
the adapter are the base's on the scale of log-odds, with a shift and normal noise of each problem, so that the gain has
the mean and the standard deviation that are asked for and no chance leaves 0..1. ``guess`` is what the plan takes for
granted, the others are what it may be instead. The rule: the 95 % interval excludes 0, and p is at most 0.05 / tasks,
as in Holm's first step. Beside it the share that shows the gain by Miller's formula alone, which is for Student's
interval. Prints a table, writes ``results/power.json``.

    python benchmarks/power.py [--evaluations 2000] [--count 30 --k 16]
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
from numpy.random import Generator
from numpy.typing import NDArray

from perl.evaluation.scoring.metrics import SHOWN_IN, SMALL_P, guessed_error, paired_difference, smallest_gain
from perl.evaluation.scoring.table import is_shown
from perl.zoo.intervals import intervals

# Dimensions: E evaluations, P problems.
Floats = NDArray[numpy.float64]

RESULTS = Path(__file__).parent / "results" / "power.json"
COUNTS, KS, TASKS = (30, 50, 100, 200, 500), (1, 4, 16, 32), (1, 3, 10)
# The two parameters of a Beta distribution, and the standard deviation of the gains over problems.
POPULATIONS = {
    "guess": (0.5, 0.5, 0.2),
    "gains spread less": (0.5, 0.5, 0.1),
    "gains spread more": (0.5, 0.5, 0.3),
    "flat difficulties": (1.0, 1.0, 0.2),
    "hard problems": (0.3, 1.2, 0.2),
}
# The p value of flipped signs is up to so many times the normal one, or that the other; where this does not decide,
# signs are flipped. Of few problems that are asked once it is the binomial one, hence in large steps.
NEAR_FEW, NEAR, FEW = 3.0, 1.5, 100
# So many evaluations of a cell are decided by the rule itself, to show that the short way decides the same.
BY_RULE = 10
NORMAL = statistics.NormalDist()
_QUANTILES, _NOISES = 2000, 41


@dataclass(frozen=True)
class Cell:
    """Evaluations of a population.

    Attributes:
        tasks: Differences that are looked at together.
        gain: The true one; what :func:`perl.evaluation.scoring.metrics.smallest_gain` says.
        shown: Share of evaluations that show it; where problems cannot gain so much, None.
        by_formula: The gain by Miller's formula alone.
        formula_shown: Share of evaluations that show that.
    """

    population: str
    n: int
    k: int
    tasks: int
    gain: float
    shown: float | None
    by_formula: float
    formula_shown: float | None


def shift_and_noise(a: float, b: float, gain: float, spread: float) -> tuple[float, float] | None:
    """Log-odds to add, and the standard deviation of the noise; None: no noise spreads gains of this mean so much."""
    odds_Q = _log_odds(numpy.random.default_rng(0).beta(a, b, _QUANTILES))
    noise_N = numpy.array([NORMAL.inv_cdf((i + 0.5) / _NOISES) for i in range(_NOISES)])

    def gains(shift: float, noise: float) -> Floats:
        moved = _chances(odds_Q[:, None] + shift + noise * noise_N)
        return moved - _chances(odds_Q)[:, None]

    def shift_for(noise: float) -> float:
        low, high = -40.0, 40.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if gains(middle, noise).mean() < gain else (low, middle)
        return high

    low, high = 0.0, 20.0
    for _ in range(30):
        noise = (low + high) / 2
        low, high = (noise, high) if gains(shift_for(noise), noise).std() < spread else (low, noise)
    found = gains(shift_for(high), high)
    fits = abs(found.mean() - gain) < 0.002 and abs(found.std() - spread) < 0.02
    return (shift_for(high), high) if fits else None


def _log_odds(chance: Floats) -> Floats:
    some = numpy.clip(chance, 1e-12, 1 - 1e-12)
    return numpy.log(some / (1 - some))


def _chances(log_odds: Floats) -> Floats:
    return numpy.exp(-numpy.logaddexp(0.0, -log_odds))


def share_shown(
    name: str, n: int, k: int, gain: float, tasks: int, evaluations: int, generator: Generator
) -> float | None:
    """Share of evaluations of n problems, k times each, that show that the adapter is the better one."""
    a, b, spread = POPULATIONS[name]
    found = shift_and_noise(a, b, gain, spread)
    if found is None:
        return None
    base_EP = generator.beta(a, b, (evaluations, n))
    noise_EP = found[1] * generator.standard_normal((evaluations, n))
    adapter_EP = _chances(_log_odds(base_EP) + found[0] + noise_EP)
    counts = generator.binomial(k, base_EP), generator.binomial(k, adapter_EP)
    scores_EP = (counts[1] - counts[0]) / k
    low_E, _ = intervals(scores_EP.mean(axis=1), scores_EP.std(axis=1, ddof=1) / n**0.5, n, difference=True)
    z_E = scores_EP.sum(axis=1) / numpy.sqrt((scores_EP**2).sum(axis=1))
    shown = 0
    for i in range(evaluations):
        p, level = 2 * (1 - NORMAL.cdf(abs(z_E[i]))), SMALL_P / tasks
        times = NEAR_FEW if n <= FEW else NEAR
        near = level / times < p < level * times
        says = bool(low_E[i] > 0 and p <= level)
        if i < BY_RULE or (near and low_E[i] > 0):
            by_rule = _by_rule(counts[0][i], counts[1][i], k, level)
            if not near and by_rule != says:
                raise RuntimeError(f"the short way says {says} where p is {p}")
            says = by_rule
        shown += says
    return shown / evaluations


def _by_rule(base_P: NDArray[numpy.int64], adapter_P: NDArray[numpy.int64], k: int, level: float) -> bool:
    rows = [[[True] * int(c) + [False] * (k - int(c)) for c in counts] for counts in (base_P, adapter_P)]
    found = paired_difference(*rows)
    return is_shown(found) and found.mean > 0 and found.p_value <= level


def measure(name: str, n: int, k: int, tasks: int, evaluations: int) -> Cell:
    """A cell, with evaluations that are drawn from a seed of its own."""
    generator = numpy.random.default_rng([n, k, tasks, list(POPULATIONS).index(name)])
    stderr = guessed_error(n, k)
    gain = smallest_gain(stderr, n, tasks) or 1.0
    formula = (NORMAL.inv_cdf(1 - SMALL_P / tasks / 2) + NORMAL.inv_cdf(SHOWN_IN)) * stderr
    shares = [share_shown(name, n, k, true, tasks, evaluations, generator) for true in (gain, formula)]
    return Cell(name, n, k, tasks, gain, shares[0], formula, shares[1])


def table(cells: Sequence[Cell]) -> list[str]:
    """A line for each cell of the guess; of each other population the least and the most."""
    lines = [f"{'n':>4} {'k':>3} {'tasks':>6} {'gain':>6} {'shown in':>9} {'by the formula alone':>21} {'shown in':>9}"]
    for cell in cells:
        if cell.population == "guess":
            gains = f"{100 * cell.gain:6.1f} {_share(cell.shown):>9} {100 * cell.by_formula:21.1f}"
            lines.append(f"{cell.n:4} {cell.k:3} {cell.tasks:6} {gains} {_share(cell.formula_shown):>9}")
    for name in POPULATIONS:
        shares = [cell.shown for cell in cells if cell.population == name and cell.shown is not None]
        if shares:
            middle = statistics.median(shares)
            lines.append(f"{name}: {min(shares):.0%} to {max(shares):.0%}, median {middle:.0%}, in {len(shares)} cells")
    return lines


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def main() -> None:
    """All cells, or those that were asked for; only all of them are written."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--evaluations", type=int, default=1000, help="of each cell")
    parser.add_argument("--count", type=int, choices=COUNTS, help="problems; all of them by default")
    parser.add_argument("--k", type=int, choices=KS, help="completions a problem; all of them by default")
    arguments = parser.parse_args()
    started, cells = time.monotonic(), []
    for name in POPULATIONS:
        for n in (arguments.count,) if arguments.count else COUNTS:
            for k in (arguments.k,) if arguments.k else KS:
                for tasks in TASKS if name == "guess" else TASKS[:1]:
                    cells.append(measure(name, n, k, tasks, arguments.evaluations))
    lines = table(cells)
    print("\n".join(lines))
    if arguments.count or arguments.k:
        return
    found = {
        "command": "python benchmarks/power.py",
        "evaluations": arguments.evaluations,
        "seconds": round(time.monotonic() - started, 1),
        "table": lines,
        "cells": [{name: _short(fact) for name, fact in asdict(cell).items()} for cell in cells],
    }
    rows = ",\n  ".join(map(json.dumps, found.pop("cells")))
    facts = json.dumps(found, indent=1).removesuffix("\n}")
    RESULTS.write_text(f'{facts},\n "cells": [\n  {rows}\n ]\n}}\n', encoding="utf-8")


def _short(fact: object) -> object:
    return round(fact, 5) if isinstance(fact, float) and math.isfinite(fact) else fact


if __name__ == "__main__":
    main()
