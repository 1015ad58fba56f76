"""What a study found: each arm as it was chosen, held against one of them, and all with one setting.

rows of cells -> Findings

The arm that the others are held against is named before there are scores: the study's baseline, else the grid's first.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from perl.evaluation.scoring.metrics import Difference, corrected
from perl.evaluation.scoring.seeds import SeedMean, mean_over_seeds, paired_by_seed, smallest_difference
from perl.training.studies.cells import CHOOSES, SCORES, Candidate, titled
from perl.training.studies.plan import Study
from perl.training.studies.results import CellRow, StudyResult, at_baseline


@dataclass(frozen=True)
class Tried:
    """A candidate on the seeds that choose.

    Attributes:
        scores: Seed -> score; a cell that failed or was ended early has none.
        good: Whether its mean is within two standard errors of the arm's best.
    """

    candidate: Candidate
    scores: Mapping[int, float]
    good: bool


@dataclass(frozen=True)
class ScoredCandidate:
    """A candidate on the seeds that score.

    Attributes:
        mean: Over the seeds; None: no cell has a score.
        scores: Seed -> score.
        difference: To the arm that the others are held against, paired by seed, its p value corrected for all of the
            table; None: it is that arm, or they share fewer than two seeds.
        smallest: The smallest true difference that 80 of 100 such studies show.
    """

    candidate: Candidate
    mean: SeedMean | None
    scores: Mapping[int, float]
    difference: Difference | None = None
    smallest: float | None = None


@dataclass(frozen=True)
class Arm:
    """One of the compared.

    Attributes:
        tried: Its candidates on the seeds that choose.
        best: As it was chosen; None: none was trained to the end.
        at_baseline: With what was chosen for the baseline; None: that was not scored.
        parameters: That train.
        at_edge: Keys whose chosen value is the smallest or largest tried, so that a better one may lie beyond.
    """

    title: str
    tried: tuple[Tried, ...]
    best: ScoredCandidate | None
    at_baseline: ScoredCandidate | None
    parameters: int | None
    at_edge: tuple[str, ...]


@dataclass(frozen=True)
class Findings:
    """All of it.

    Attributes:
        reference: Title of the arm that the others are held against.
        tests: Differences among which those of a table were, for Holm's correction.
    """

    arms: tuple[Arm, ...]
    reference: str
    tests: int

    def sorted(self) -> list[Arm]:
        """The arms, the best score first."""
        return sorted(self.arms, key=lambda arm: -level(arm.best))


def findings(planned: Study, result: StudyResult) -> Findings:
    """What the cells of a study say.

    Args:
        planned: The study.
        result: Its cells.
    """
    arms = [_arm(planned, result, arm) for arm in planned.arms]
    tests = max(sum(arm.best is not None and arm.best.mean is not None for arm in arms) - 1, 0)
    return Findings(tuple(_held_against(arms, planned.baseline, tests)), planned.baseline, tests)


def _by_candidate(rows: Sequence[CellRow], stage: str) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.stage == stage and row.score is not None:
            found.setdefault(Candidate(row.settings).key, {})[row.seed] = row.score
    return found


def _arm(planned: Study, result: StudyResult, arm: Sequence[Candidate]) -> Arm:
    """What is known of an arm, not yet held against another one."""
    title, chosen = arm[0].title, result.chosen.get(arm[0].title)
    best = chosen.candidate if chosen is not None else (arm[0] if len(arm) == 1 else None)
    good = chosen.good if chosen is not None else ()
    same = at_baseline(planned, result.chosen, arm[0])
    tried, scores = _by_candidate(result.rows, CHOOSES), _by_candidate(result.rows, SCORES)
    return Arm(
        title,
        tuple(Tried(one, tried.get(one.key, {}), one in good) for one in arm if planned.file.chosen),
        _scored(best, scores) if best is not None else None,
        _scored(same, scores) if same is not None else None,
        next((row.parameters for row in result.rows if row.arm == title and row.parameters), None),
        _at_edge(best, arm) if best is not None and chosen is not None else (),
    )


def _scored(candidate: Candidate, scores: Mapping[str, Mapping[int, float]]) -> ScoredCandidate:
    found = scores.get(candidate.key, {})
    return ScoredCandidate(candidate, mean_over_seeds([*found.values()]) if found else None, found)


def _held_against(arms: Sequence[Arm], reference: str, tests: int) -> list[Arm]:
    """The arms with their differences to one of them, corrected for as many as there are in a table."""
    named = next((arm for arm in arms if arm.title == reference), None)
    if named is None or named.best is None:
        return list(arms)
    others = [arm for arm in arms if arm is not named]
    best = _compared([arm.best for arm in others], named.best, tests)
    common = _compared([arm.at_baseline for arm in others], named.best, tests)
    compared = {
        arm.title: replace(arm, best=one, at_baseline=other)
        for arm, one, other in zip(others, best, common, strict=True)
    }
    return [compared.get(arm.title, arm) for arm in arms]


def _compared(
    some: Sequence[ScoredCandidate | None], base: ScoredCandidate, tests: int
) -> list[ScoredCandidate | None]:
    differences = [paired_by_seed(base.scores, one.scores) if one is not None else None for one in some]
    found: list[ScoredCandidate | None] = []
    for one, difference in zip(some, corrected(differences, family=tests), strict=True):
        if one is None or difference is None:
            found.append(one)
            continue
        seeds = len(base.scores.keys() & one.scores.keys())
        smallest = smallest_difference(difference.stderr, seeds, tests) if difference.stderr > 0 else None
        found.append(replace(one, difference=difference, smallest=smallest))
    return found


def _at_edge(best: Candidate, arm: Sequence[Candidate]) -> tuple[str, ...]:
    found = []
    for key, value in best.chosen.items():
        tried = [one.chosen.get(key) for one in arm]
        numbers = sorted({one for one in tried if isinstance(one, int | float) and not isinstance(one, bool)})
        if len(numbers) > 1 and value in (numbers[0], numbers[-1]):
            found.append(titled({key: value}))
    return tuple(found)


def level(scored: ScoredCandidate | None) -> float:
    """A mean score to sort by; without one it is the lowest."""
    return scored.mean.mean if scored is not None and scored.mean is not None else -math.inf
