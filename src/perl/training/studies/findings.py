"""What a study found: each arm as it was chosen, held against one of them, and all with one setting.

rows of cells -> Findings

The arm that the others are held against is the study's baseline, else the best on the seeds that choose. Where there is
neither it is the best of the scores themselves: any two arms could have been the best and another one, and p values are
corrected for all such pairs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perl.errors import RunFolderError
from perl.evaluation.metrics import Difference, corrected
from perl.evaluation.seeds import SeedMean, mean_over_seeds, paired_by_seed, smallest_difference
from perl.run.folder import Run
from perl.training.studies.cells import CHOOSES, SCORES, Candidate, at_baseline, titled
from perl.training.studies.results import Row, StudyResult
from perl.training.studies.written_plan import Study


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
class Scored:
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
    best: Scored | None
    at_baseline: Scored | None
    parameters: int | None
    at_edge: tuple[str, ...]


@dataclass(frozen=True)
class Findings:
    """All of it.

    Attributes:
        reference: Title of the arm that the others are held against; None: no arm has a score.
        named_by: What made it that: the study's ``baseline``, the seeds that ``choose``, or those that ``score``.
        tests: Differences among which those of a table were, for Holm's correction.
    """

    arms: tuple[Arm, ...]
    reference: str | None
    named_by: str
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
    scores = {stage: _by_candidate([row for row in result.rows if row.stage == stage]) for stage in (CHOOSES, SCORES)}
    reference = _reference(planned, result)
    of_reference = result.chosen.get(reference or "")
    common = of_reference.candidate if of_reference is not None and planned.baseline is not None else None
    arms = []
    for arm in planned.arms:
        chosen = result.chosen.get(arm[0].title)
        best = chosen.candidate if chosen is not None else (arm[0] if len(arm) == 1 else None)
        same = at_baseline(arm[0], common.chosen, planned.file.overrides) if common is not None else None
        good = chosen.good if chosen is not None else ()
        tried = (
            [Tried(one, scores[CHOOSES].get(one.key, {}), one in good) for one in arm] if planned.file.chosen else []
        )
        arms.append(
            Arm(
                arm[0].title,
                tuple(tried),
                _scored(best, scores[SCORES]) if best is not None else None,
                _scored(same, scores[SCORES]) if same is not None else None,
                _parameters(result, arm),
                _at_edge(best, arm) if best is not None and chosen is not None else (),
            )
        )
    named_by = "baseline" if planned.baseline is not None else CHOOSES if planned.file.chosen else SCORES
    count = sum(arm.best is not None and arm.best.mean is not None for arm in arms)
    tests = count * (count - 1) // 2 if named_by == SCORES else max(count - 1, 0)
    return Findings(tuple(_held_against(arms, reference, tests)), reference, named_by, tests)


def _by_candidate(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.score is not None:
            found.setdefault(Candidate(row.settings).key, {})[row.seed] = row.score
    return found


def _reference(planned: Study, result: StudyResult) -> str | None:
    named = planned.baseline
    if named is not None:
        return named
    if result.chosen:
        best = {
            title: one.scores[one.candidate.key] for title, one in result.chosen.items() if one.candidate is not None
        }
        return max(best, key=lambda title: best[title]) if best else None
    scored = _by_candidate([row for row in result.rows if row.stage == SCORES])
    means = {one.title: scored[one.key] for one in planned.candidates if one.key in scored}
    return max(means, key=lambda title: sum(means[title].values()) / len(means[title])) if means else None


def _scored(candidate: Candidate, scores: Mapping[str, Mapping[int, float]]) -> Scored:
    found = scores.get(candidate.key, {})
    return Scored(candidate, mean_over_seeds([*found.values()]) if found else None, found)


def _held_against(arms: Sequence[Arm], reference: str | None, tests: int) -> list[Arm]:
    """The arms with their differences to one of them, corrected for as many as there are in a table."""
    named = next((arm for arm in arms if arm.title == reference), None)
    if named is None or named.best is None:
        return list(arms)
    base = named.best
    best = _compared([arm.best if arm is not named else None for arm in arms], base, tests)
    common = _compared([arm.at_baseline if arm is not named else None for arm in arms], base, tests)
    return [
        Arm(a.title, a.tried, best[i] or a.best, common[i] or a.at_baseline, a.parameters, a.at_edge)
        for i, a in enumerate(arms)
    ]


def _compared(some: Sequence[Scored | None], base: Scored, tests: int) -> list[Scored | None]:
    differences = [paired_by_seed(base.scores, one.scores) if one is not None else None for one in some]
    found: list[Scored | None] = []
    for one, difference in zip(some, corrected(differences, family=tests), strict=True):
        if one is None:
            found.append(None)
            continue
        seeds = len(base.scores.keys() & one.scores.keys())
        known = difference is not None and difference.stderr > 0
        smallest = smallest_difference(difference.stderr, seeds, tests) if difference is not None and known else None
        found.append(Scored(one.candidate, one.mean, one.scores, difference, smallest))
    return found


def _parameters(result: StudyResult, arm: Sequence[Candidate]) -> int | None:
    for row in result.rows:
        if row.arm == arm[0].title:
            try:
                facts = Run.read(result.folder / "cells" / row.stage / row.name).facts
            except RunFolderError:
                continue
            if facts.get("trainable_parameters"):
                return int(facts["trainable_parameters"])
    return None


def _at_edge(best: Candidate, arm: Sequence[Candidate]) -> tuple[str, ...]:
    found = []
    for key, value in best.chosen.items():
        tried = [one.chosen.get(key) for one in arm]
        numbers = sorted({one for one in tried if isinstance(one, int | float) and not isinstance(one, bool)})
        if len(numbers) > 1 and value in (numbers[0], numbers[-1]):
            found.append(titled({key: value}))
    return tuple(found)


def level(scored: Scored | None) -> float:
    """A mean score to sort by; without one it is the lowest."""
    return scored.mean.mean if scored is not None and scored.mean is not None else -math.inf
