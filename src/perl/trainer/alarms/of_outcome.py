"""Signs that the reward is won without what it stands for: held-out scores fall, or only the length changes.

History, Setup -> Sign
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from perl.trainer.alarms.history import History, Logged, right_share
from perl.trainer.alarms.rule import Setup, Sign

LENGTH = "completions/mean_length"

SCORES = 2  # newest evaluations that must all be lower: one alone is noise
FALL = 0.25  # of the best score
STEPS_EACH = 5  # logged steps whose mean reward is compared

LENGTH_WINDOW = 5
LAGS = (10, 20, 40, 80, 160, 320, 640)
LONGER = 1.5
CERTAIN = 3.0  # standard errors


def held_out(history: History, setup: Setup) -> Sign | None:
    """By which part the held-out score is below its best, where the reward has risen since; the worst of the scores."""
    del setup
    signs = [sign for name, scores in history.held_out.items() if (sign := _fallen(history, name, scores))]
    return max(signs, key=lambda sign: sign.value, default=None)


def _fallen(history: History, name: str, scores: Sequence[tuple[int, float]]) -> Sign | None:
    if len(scores) < SCORES + 1:
        return None
    newest, (best_step, best) = scores[-SCORES:], max(scores[:-SCORES], key=lambda scored: scored[1])
    highest = max(score for _, score in newest)  # all of them must be lower
    rewards = [(row.step, reward) for row in history.rows if (reward := row.finite("reward")) is not None]
    then = [reward for step, reward in rewards if step <= best_step][-STEPS_EACH:]
    now = [reward for step, reward in rewards if step > best_step][-STEPS_EACH:]
    if best <= 0 or len(now) < STEPS_EACH or len(then) < 2 or not statistics.fmean(now) > statistics.fmean(then):
        return None
    fall = (best - highest) / best
    what = f"{name} has fallen from {best:.3g} at step {best_step} to {newest[-1][1]:.3g}, while the reward has risen"
    return Sign(fall, f"{what} from {statistics.fmean(then):.3g} to {statistics.fmean(now):.3g}")


def length(history: History, setup: Setup) -> Sign | None:
    """How many times longer completions are, or shorter, since a step from which on only the reward has risen."""
    del setup
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
