"""What is compared, whatever it is (adapters, runs, arms of a study), and its differences to one of them.

Scored, Scored -> Paired; several of them -> the same with p values that are corrected for their number

Two settings of several seeds are compared over the seeds that both have; two single policies over the problems that
both answered.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from perl.evaluation.scoring.metrics import (
    Difference,
    corrected,
    error_of_mean,
    guessed_error,
    paired_difference,
    smallest_gain,
)
from perl.evaluation.scoring.seeds import paired_by_seed, smallest_difference

SEED, PROBLEM = "seed", "problem"


@dataclass(frozen=True)
class Paired(Difference):
    """One less the one that it is held against; interval and p values are NaN where nothing pairs the two.

    Attributes:
        own_p_value: Before ``p_value`` was corrected.
        by: :data:`SEED`, :data:`PROBLEM`, or empty.
        pairs: How many.
    """

    own_p_value: float
    by: str
    pairs: int

    def as_dict(self) -> dict[str, float | None]:
        """For JSON: ``p_value`` is its own, ``p_corrected`` that of all; what is not known is None."""
        own = Difference(self.mean, self.stderr, self.low, self.high, self.own_p_value).as_dict()
        return {**own, "p_corrected": None if math.isnan(self.p_value) else self.p_value}

    def smallest(self, tests: int, k: int = 1) -> float | None:
        """The smallest true difference that 80 of 100 such comparisons show; None: none is, or it is not known.

        Args:
            tests: Differences that are looked at together.
            k: Completions a problem, from which an error of 0 is guessed.
        """
        if self.by == PROBLEM:
            return smallest_gain(self.stderr if self.stderr > 0 else guessed_error(self.pairs, k), self.pairs, tests)
        return smallest_difference(self.stderr, self.pairs, tests) if self.stderr > 0 else None


@dataclass(frozen=True)
class Scored:
    """One of what is compared.

    Attributes:
        name: Unlike every other one's.
        by_seed: Seed of the training -> score; of a policy whose training is not looked at a single one.
        by_problem: Seed -> problem -> score; empty where scores are no means over problems.
        own_error: Standard error of a single score, over problems or steps; NaN: not known.
    """

    name: str
    by_seed: Mapping[int, float]
    by_problem: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    own_error: float = math.nan

    @property
    def score(self) -> float:
        """The mean over seeds; NaN without a score."""
        return fmean(self.by_seed.values()) if self.by_seed else math.nan

    @property
    def stderr(self) -> float:
        """Of several seeds from how they differ; of a single one its own."""
        return error_of_mean(list(self.by_seed.values())) if len(self.by_seed) > 1 else self.own_error


def difference_of(reference: Scored, other: Scored) -> Paired:
    """One less another one, not corrected.

    Returns:
        Paired by seed where two seeds or more are common; by problem for two single scores, or for those of the only
        common seed; else the mean alone.
    """
    common = sorted(reference.by_seed.keys() & other.by_seed.keys())
    found, by, pairs = paired_by_seed(reference.by_seed, other.by_seed), SEED, len(common)
    single = len(reference.by_seed) == len(other.by_seed) == 1
    if found is None and (single or len(common) == 1):
        seeds = [next(iter(one.by_seed)) if single else common[0] for one in (reference, other)]
        before, after = (one.by_problem.get(seed, {}) for one, seed in zip((reference, other), seeds, strict=True))
        if before and before.keys() == after.keys():
            found = paired_difference([[value] for value in before.values()], [[after[id]] for id in before])
            by, pairs = PROBLEM, len(before)
    if found is None:
        found, by, pairs = Difference(other.score - reference.score, *[math.nan] * 4), "", 0
    return Paired(found.mean, found.stderr, found.low, found.high, found.p_value, found.p_value, by, pairs)


def family_size(count: int, *, chosen: bool) -> int:
    """How many differences there are among so many.

    Args:
        count: That are compared, the one among them that the others are held against.
        chosen: It is the best by these scores, so that any two could have been compared: there are n (n - 1) / 2
            differences, else n - 1.
    """
    return count * (count - 1) // 2 if chosen else count - 1


def held_against(reference: Scored, others: Sequence[Scored], family: int = 0) -> list[Paired]:
    """Each of several less one of them, with p values that are corrected for their number.

    Args:
        reference: That they are held against.
        others: In order.
        family: See :func:`perl.evaluation.scoring.metrics.corrected`.
    """
    return together([difference_of(reference, one) for one in others], family)


def together(differences: Sequence[Paired], family: int = 0) -> list[Paired]:
    """Differences that are looked at together, p values corrected for their number or that of their family."""
    found = corrected(differences, family)
    return [replace(one, p_value=now.p_value) for one, now in zip(differences, found, strict=True) if now is not None]
