"""What a cell scored, and which candidate of each arm is the best on the seeds that choose.

run folders -> scores -> the chosen candidate of each arm
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from perl.errors import PerlError, RunFolderError
from perl.evaluation.metrics import error_of_mean
from perl.run.facts import RUN_FACTS, best_disagreement, read_best
from perl.run.folder import Run
from perl.run.logs import read_log
from perl.training.studies.cells import Candidate

# Steps whose mean reward says how far a cell is that was not scored yet.
_LAST_STEPS = 10
TRAIN_AGAIN = "delete this folder, and the same command trains the cell again"


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


def score_of(folder: Path, of: Literal["final", "best"] = "final") -> float | None:
    """A run's score: the mean over its tasks of avg@k of the adapter, or of the best one; None: it has none yet.

    Raises:
        RunFolderError: What stands there is no score.
    """
    try:
        run = Run.read(folder)
        if of == "best":
            best = read_best(folder / "best")
    except (PerlError, OSError, ValueError):
        return None
    if of == "best":
        wrong = best_disagreement(best, read_log(run.metrics), done=run.status == "done")
        if wrong:
            raise RunFolderError(wrong, str(run.path), TRAIN_AGAIN)
        return float(best["value"])
    tasks = run.facts.get("eval") or {}
    if run.status != "done" or not tasks:
        return None
    try:
        score = sum(float(task["adapter"]) for task in tasks.values()) / len(tasks)
    except (AttributeError, KeyError, TypeError, ValueError):
        score = math.nan
    if not 0 <= score <= 1:
        raise RunFolderError("its scores are not what a run writes", str(run.path / RUN_FACTS), TRAIN_AGAIN)
    return score


def completions_of(folder: Path) -> int:
    """How many completions a run was scored by; 0: not known."""
    try:
        return sum(int(task["n"]) * int(task["k"]) for task in (Run.read(folder).facts.get("eval") or {}).values())
    except (PerlError, AttributeError, KeyError, TypeError, ValueError):
        return 0


def drawing_error(score: float, completions: int) -> float:
    """Standard error that drawing so many completions gives a score (binomial, as between 1 and 99 %); 0 for none."""
    inside = min(max(score, 0.01), 0.99)
    return math.sqrt(inside * (1 - inside) / completions) if completions else 0.0


def reward_at(folder: Path, step: int) -> float | None:
    """Mean reward of the last steps up to one, by which a cell that pauses there is judged; None: it has none."""
    rows = read_log(folder / "metrics.jsonl")
    rewards = [float(row["reward"]) for row in rows if row.get("reward") is not None and int(row["step"]) <= step]
    last = rewards[-_LAST_STEPS:]
    return sum(last) / len(last) if last else None


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
    means = {key: sum(found) / len(found) if len(found) == len(seeds) else math.nan for key, found in each.items()}
    whole = [one for one in arm if not math.isnan(means[one.key])]
    if not whole:
        return Chosen(None, means)
    best = max(whole, key=lambda one: means[one.key])
    drawn = drawing_error(means[best.key], completions.get(best.key, 0) * len(seeds))
    width = 2 * max(error_of_mean(each[best.key]), drawn) if len(seeds) > 1 else 0.0
    return Chosen(best, means, tuple(one for one in whole if means[one.key] >= means[best.key] - width))


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
