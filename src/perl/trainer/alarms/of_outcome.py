"""Signs that the reward is won without what it stands for: held-out scores fall, or only the length changes.

History, Setup -> Sign
"""

import bisect
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perl.trainer.alarms.rule import AlarmSetup, HeldOutScore, History, Logged, Sign, right_share

LENGTH = "completions/mean_length"

SCORES = 2  # newest evaluations that must all be lower: one alone is noise
FALL = 0.25  # of the best score
FEW_PROBLEMS = 30  # of a benchmark whose size is not logged, as AIME's
STEPS_EACH = 5  # logged steps whose mean reward is compared

LENGTH_WINDOW = 5
LAGS = (10, 20, 40, 80, 160, 320, 640)
LONGER = 1.5
CERTAIN = 3.0  # standard errors


def held_out(history: History, setup: AlarmSetup) -> Sign | None:
    """By which part the held-out score is below its best, where the reward has risen since; the worst of the scores."""
    generations = int(setup.values.get("num_generations_eval") or setup.values.get("num_generations") or 1)
    signs = [sign for name, scores in history.held_out.items() if (sign := _fallen(history, name, scores, generations))]
    return max(signs, key=lambda sign: sign.value / (sign.limit or FALL), default=None)


def _fallen(history: History, name: str, scores: Sequence[HeldOutScore], generations: int) -> Sign | None:
    if len(scores) < SCORES + 1:
        return None
    newest, best = scores[-SCORES:], max(scores[:-SCORES], key=lambda score: score.value)
    highest = max(score.value for score in newest)  # all of them must be lower
    since = bisect.bisect_right(history.rows, best.step, key=lambda row: row.step)
    then, now = (_rewards(rows) for rows in (reversed(history.rows[:since]), reversed(history.rows[since:])))
    if best.value <= 0 or len(now) < STEPS_EACH or len(then) < 2 or statistics.fmean(now) <= statistics.fmean(then):
        return None
    asked = (best.problems or FEW_PROBLEMS) * (best.completions or generations)
    error = best.spread * math.sqrt(2.0 / asked)  # of a difference of two scores
    what = f"{name} has fallen from {best.value:.3g} at step {best.step} to {newest[-1].value:.3g}"
    return Sign(
        (best.value - highest) / best.value,
        f"{what}, while the reward has risen from {statistics.fmean(then):.3g} to {statistics.fmean(now):.3g}",
        max(FALL, CERTAIN * error / best.value),
    )


def _rewards(newest_first: Iterable[Logged]) -> list[float]:
    """Of the first few steps that have one."""
    known = (reward for row in newest_first if (reward := row.finite("reward")) is not None)
    return list(itertools.islice(known, STEPS_EACH))


def length(history: History, _: AlarmSetup) -> Sign | None:
    """How many times longer completions are, or shorter, since a step from which on only the reward has risen."""
    if not history.rows or LENGTH not in history.rows[-1].values:
        return None
    rows = history.newest_rows(LENGTH, LAGS[-1] + LENGTH_WINDOW)
    signs = [sign for lag in LAGS if (sign := _gamed(rows, lag)) is not None]
    return max(signs, key=lambda sign: sign.value, default=None)


@dataclass(frozen=True)
class _Change:
    """Means of some steps before and of the newest, and how many standard errors lie between them."""

    before: float
    after: float
    errors: float


def _gamed(rows: Sequence[Logged], lag: int) -> Sign | None:
    """The sign between the newest steps and those so many logged steps before; None: nothing is gamed."""
    if len(rows) < lag + LENGTH_WINDOW:
        return None
    then, now = rows[-lag - LENGTH_WINDOW : -lag], rows[-LENGTH_WINDOW:]
    tokens = _change([row.finite(LENGTH) for row in then], [row.finite(LENGTH) for row in now])
    reward = _change([row.finite("reward") for row in then], [row.finite("reward") for row in now])
    right = _change([right_share(row.values) for row in then], [right_share(row.values) for row in now])
    if tokens is None or reward is None or right is None or min(tokens.before, tokens.after) <= 0:
        return None
    times = tokens.after / tokens.before
    # Longer answers are paid for unless more of them are right; shorter ones are wanted unless fewer are.
    unearned = right.errors <= 1.0 if times > 1 else right.errors <= -CERTAIN
    if reward.errors < CERTAIN or not unearned:
        return None
    how, by = ("longer", times) if times > 1 else ("shorter", 1 / times)
    return Sign(
        by,
        f"completions are {by:.2g} times {how} than {lag} logged steps before, the reward has risen from "
        f"{reward.before:.3g} to {reward.after:.3g}, and {100 * right.after:.0f} % of the answers are right, "
        f"{100 * right.before:.0f} % then",
    )


def _change(then: Sequence[float | None], now: Sequence[float | None]) -> _Change | None:
    """None: a step lacks the value."""
    before, after = ([value for value in part if value is not None] for part in (then, now))
    if len(before) < len(then) or len(after) < len(now):
        return None
    means = statistics.fmean(before), statistics.fmean(after)
    spread = math.sqrt((statistics.variance(before) + statistics.variance(after)) / len(now))
    difference = means[1] - means[0]
    errors = difference / spread if spread else math.copysign(math.inf, difference) if difference else 0.0
    return _Change(*means, errors)
