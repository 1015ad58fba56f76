"""Which candidate of each arm is the best on the seeds that choose, and which are scored.

scores of cells -> the chosen candidate of each arm -> candidates to score
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from perl.evaluation.metrics import error_of_mean
from perl.training.studies.cells import Candidate, without_absent
from perl.training.studies.plan import Study


@dataclass(frozen=True)
class Chosen:
    """The candidate of an arm that is scored.

    Attributes:
        candidate: The best on the seeds that choose, the first of equals; None: none was trained to the end.
        scores: Mean score of each candidate over those seeds, by its key; NaN where none was.
        good: The candidates whose mean is within two standard errors of the best.
    """

    candidate: Candidate | None
    scores: Mapping[str, float]
    good: tuple[Candidate, ...] = ()


def choose(
    arm: Sequence[Candidate],
    scores: Mapping[tuple[str, int], float],
    seeds: Sequence[int],
    completions: Mapping[str, int],
) -> Chosen:
    """The best candidate of an arm.

    Only candidates that have a score on every seed are compared, so that none wins for want of a bad one. Two or three
    seeds may agree by chance: the error of the best is never taken for less than that of drawing its completions.

    Args:
        arm: Its candidates.
        scores: By candidate's key and seed; those that failed are absent.
        seeds: That choose.
        completions: By which a cell of a candidate was scored, by its key; 0: they were not drawn, or are not known.
    """
    each = {one.key: [scores[one.key, seed] for seed in seeds if (one.key, seed) in scores] for one in arm}
    means = {key: fmean(found) if len(found) == len(seeds) else math.nan for key, found in each.items()}
    whole = [one for one in arm if not math.isnan(means[one.key])]
    if not whole:
        return Chosen(None, means)
    best = max(whole, key=lambda one: means[one.key])
    drawn = _drawing_error(means[best.key], completions.get(best.key, 0) * len(seeds))
    width = 2 * max(error_of_mean(each[best.key]), drawn) if len(seeds) > 1 else 0.0
    return Chosen(best, means, tuple(one for one in whole if means[one.key] >= means[best.key] - width))


def _drawing_error(score: float, completions: int) -> float:
    """Standard error that drawing so many completions gives a score (binomial, as between 1 and 99 %); 0 for none."""
    inside = min(max(score, 0.01), 0.99)
    return math.sqrt(inside * (1 - inside) / completions) if completions else 0.0


def better_share(arm: Sequence[Candidate], rewards: Mapping[str, float], keep: float) -> list[Candidate]:
    """The candidates of an arm that go on after a rung: so large a share, rounded up, of those that are left.

    Args:
        arm: Those that are left.
        rewards: Mean reward over the seeds, by key; those without one are ended.
        keep: Share.
    """
    known = [one for one in arm if one.key in rewards]
    count = min(len(known), math.ceil(keep * len(arm) - 1e-9))
    best = sorted(known, key=lambda one: -rewards[one.key])[:count]
    return [one for one in arm if one in best]


def finalists(study: Study, chosen: Mapping[str, Chosen]) -> list[Candidate]:
    """What is scored: each arm as it was chosen, and as it is with what was chosen for the baseline.

    The second, whether or not it was tried for that arm, is how studies compare that use one rate for all; beside the
    first it shows what that hides.
    """
    best = [one.candidate for one in chosen.values()]
    all_alike = [at_baseline(study, chosen, arm[0]) for arm in study.arms]
    return list({one.key: one for one in (*best, *all_alike) if one is not None}.values())


def at_baseline(study: Study, chosen: Mapping[str, Chosen], arm: Candidate) -> Candidate | None:
    """An arm with what was chosen for the baseline, as far as its method has such settings.

    Args:
        study: That names a baseline; else nothing is.
        chosen: Of each arm.
        arm: One of its candidates.
    """
    of_baseline = chosen[study.baseline].candidate if study.file.baseline and study.baseline in chosen else None
    if of_baseline is None:
        return None
    kept = without_absent({**arm.arm, **of_baseline.chosen}, study.file.overrides)
    return Candidate(arm.arm, {key: value for key, value in of_baseline.chosen.items() if key in kept})
