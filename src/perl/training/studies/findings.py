"""What a study found: each arm as it was chosen, held against one of them, and all with one setting.

rows of cells -> Findings

The arm that the others are held against is named before there are scores: the study's baseline, else the grid's first.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from perl.evaluation.comparing.compared import Paired, Scored, family_size, held_against
from perl.training.studies.cells import CHOOSES, SCORES, Candidate, titled
from perl.training.studies.plan import Study
from perl.training.studies.results import StudyResult, at_baseline


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


@dataclass(frozen=True, kw_only=True)
class ScoredCandidate(Scored):
    """A candidate on the seeds that score.

    Attributes:
        candidate: Which.
        difference: To the arm that the others are held against, paired by seed, its p value corrected for all of the
            table; None: it is that arm, or one of the two has no score.
    """

    candidate: Candidate
    difference: Paired | None = None


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
    by_stage: dict[str, dict[str, dict[int, float]]] = {CHOOSES: {}, SCORES: {}}
    for row in result.rows:
        if row.score is not None:
            by_stage[row.stage].setdefault(Candidate(row.settings).key, {})[row.seed] = row.score

    def scored(candidate: Candidate | None) -> ScoredCandidate | None:
        scores = by_stage[SCORES].get(candidate.key, {}) if candidate is not None else {}
        return None if candidate is None else ScoredCandidate(candidate.title, scores, candidate=candidate)

    arms = []
    for arm in planned.arms:
        title, chosen = arm[0].title, result.chosen.get(arm[0].title)
        chose = chosen.candidate if chosen is not None else (arm[0] if len(arm) == 1 else None)
        good = chosen.good if chosen is not None else ()
        tried = [Tried(one, by_stage[CHOOSES].get(one.key, {}), one in good) for one in arm if planned.file.chosen]
        same = scored(at_baseline(planned, result.chosen, arm[0]))
        parameters = next((row.parameters for row in result.rows if row.arm == title and row.parameters), None)
        at_edge = _at_edge(chose, tried) if chose is not None else ()
        arms.append(Arm(title, tuple(tried), scored(chose), same, parameters, at_edge))
    tests = max(family_size(sum(arm.best is not None and bool(arm.best.by_seed) for arm in arms), chosen=False), 0)
    reference = next((arm.best for arm in arms if arm.title == planned.baseline and arm.best is not None), None)
    if reference is not None and reference.by_seed:
        others = [arm for arm in arms if arm.title != planned.baseline]
        best = _held_against(reference, {arm.title: arm.best for arm in others}, tests)
        alike = _held_against(reference, {arm.title: arm.at_baseline for arm in others}, tests)
        arms = [replace(a, best=best.get(a.title, a.best), at_baseline=alike.get(a.title, a.at_baseline)) for a in arms]
    return Findings(tuple(arms), planned.baseline, tests)


def _held_against(
    reference: ScoredCandidate, others: Mapping[str, ScoredCandidate | None], tests: int
) -> dict[str, ScoredCandidate]:
    """Those of a table that have a score, by the titles of their arms, with their differences."""
    known = {title: one for title, one in others.items() if one is not None and one.by_seed}
    pairs = held_against(reference, list(known.values()), tests)
    return {title: replace(one, difference=pair) for (title, one), pair in zip(known.items(), pairs, strict=True)}


def _at_edge(best: Candidate, arm: Sequence[Tried]) -> tuple[str, ...]:
    found = []
    for key, value in best.chosen.items():
        tried = [one.candidate.chosen.get(key) for one in arm]
        numbers = sorted({one for one in tried if isinstance(one, int | float) and not isinstance(one, bool)})
        if len(numbers) > 1 and value in (numbers[0], numbers[-1]):
            found.append(titled({key: value}))
    return tuple(found)


def level(scored: ScoredCandidate | None) -> float:
    """A mean score to sort by; without one it is the lowest."""
    return scored.score if scored is not None and scored.by_seed else -math.inf
