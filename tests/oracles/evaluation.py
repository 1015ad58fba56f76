"""What an evaluation must find, counted from its completions: fractions, enumerations, and mpmath's beta distribution.

rights, answers -> avg@k, pass@k, maj@k, G-Pass@k, errors, intervals, differences; places, facts -> seeds, hashes
"""

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import mpmath

Rows = Sequence[Sequence[bool]]


class Estimate(NamedTuple):
    """A mean over problems; error and ends of the 95 % interval are NaN for one problem."""

    mean: float
    stderr: float
    low: float
    high: float


def marks(texts: Sequence[str]) -> list[list[bool]]:
    """``"110"`` -> right, right, wrong; a text a problem."""
    return [[mark == "1" for mark in text] for text in texts]


def is_right(text: str, gold: str) -> bool:
    """Whether the last box holds the gold answer, a whole number, literally."""
    answers = re.findall(r"\\boxed\{(.*?)\}", text)
    return bool(answers) and answers[-1] == gold


def seed_by_hand(task: str, problem: str, index: int, seed: int = 0) -> int:
    """Half of the first 32 bits of a hash."""
    return int(hashlib.sha256(f"{seed}\n{task}\n{problem}\n{index}".encode()).hexdigest()[:8], 16) // 2


def digest(facts: Mapping[str, object]) -> str:
    """The first 64 bits, in hexadecimal digits, of the SHA-256 of facts in the order of their names."""
    ordered = ", ".join(f"{json.dumps(name)}: {json.dumps(facts[name])}" for name in sorted(facts))
    return hashlib.sha256(f"{{{ordered}}}".encode()).hexdigest()[:16]


def shares(right: Rows) -> list[Fraction]:
    """Of each problem, the share of completions that are right."""
    return [Fraction(sum(row), len(row)) for row in right]


def share_of_draws(row: Sequence[bool], k: int, at_least: int = 1) -> Fraction:
    """Of all choices of k completions, the share that holds at least so many right ones: every choice is tried."""
    draws = list(itertools.combinations(row, k))
    return Fraction(sum(sum(draw) >= at_least for draw in draws), len(draws))


def share_of_votes(answers: Sequence[str | None], right: Sequence[bool]) -> Fraction:
    """How often one of the most frequent answers, drawn at random, is right; right answers are one answer."""
    votes = Counter("right" if r else f"wrong: {' '.join(a.split())}" for a, r in zip(answers, right, strict=True) if a)
    most = [answer for answer, count in votes.items() if count == max(votes.values())]
    return Fraction(most.count("right"), len(most)) if most else Fraction(0)


def estimate(values: Sequence[Fraction], *, difference: bool = False) -> Estimate:
    """The mean of the problems' values, its standard error, and the ends of its 95 % interval."""
    count = len(values)
    mean = sum(values, Fraction(0)) / count
    if count == 1:
        return Estimate(float(mean), math.nan, math.nan, math.nan)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    low, high = (
        _limit(values, difference),
        _limit([-value if difference else 1 - value for value in values], difference),
    )
    return Estimate(float(mean), math.sqrt(variance / count), low, -high if difference else 1 - high)


def _limit(values: Sequence[Fraction], difference: bool) -> float:
    """The lower end: a quantile of the beta distribution with the moments of a bootstrap with one more, worst value.

    Weights from a flat Dirichlet over m values give a mean with the variance of the values (denominator m) over m + 1.
    """
    unit = [(value + 1) / 2 if difference else value for value in values]
    if not any(unit):
        return -1.0 if difference else 0.0
    more = [*unit, Fraction(0)]
    mean = sum(more) / len(more)
    variance = sum((value - mean) ** 2 for value in more) / len(more) / (len(more) + 1)
    size = mean * (1 - mean) / variance - 1
    a, b = (mpmath.mpf(part.numerator) / part.denominator for part in (mean * size, (1 - mean) * size))
    low, high = mpmath.mpf(0), mpmath.mpf(1)
    for _ in range(60):  # bisection of the distribution function
        middle = (low + high) / 2
        below = mpmath.betainc(a, b, 0, middle, regularized=True) < 0.025
        low, high = (middle, high) if below else (low, middle)
    return float(2 * low - 1 if difference else low)


def p_value(base: Rows, adapter: Rows) -> float:
    """Of all ways to exchange base and adapter problem by problem, the share that is at least as far from 0."""
    gains = [y - x for x, y in zip(shares(base), shares(adapter), strict=True) if x != y]
    sums = [sum((s * g for s, g in zip(signs, gains, strict=True)), Fraction(0)) for signs in _signs(len(gains))]
    return sum(abs(found) >= abs(sum(gains)) for found in sums) / len(sums)


def _signs(count: int) -> itertools.product:
    return itertools.product((1, -1), repeat=count)


def difference(base: Rows, adapter: Rows) -> Estimate:
    """Adapter less base, problem by problem."""
    return estimate([y - x for x, y in zip(shares(base), shares(adapter), strict=True)], difference=True)


def pass_at(right: Rows, k: int) -> Estimate:
    """pass@k by trying every choice."""
    return estimate([share_of_draws(row, k) for row in right])


def majority(answers: Sequence[Sequence[str | None]], right: Rows) -> Estimate:
    """maj@k of all completions."""
    return estimate([share_of_votes(a, r) for a, r in zip(answers, right, strict=True)])
