"""How small a gain an evaluation can show, before anything is drawn.

problems, completions, tasks -> the smallest gain that is shown in 80 of 100 evaluations

A gain is shown by the rule of tables and cards: its 95 % interval excludes 0, and its p value, corrected for the number
of tasks, is at most 0.05. How far the guess holds is measured by ``benchmarks/power.py``.
"""

import math
from statistics import NormalDist

from perl.evaluation.metrics import SMALL_P
from perl.zoo.intervals import interval

SHOWN_IN = 0.8
"""Share of evaluations that show the smallest gain."""
# First guesses: the variance over problems of how much better the adapter solves them, and the mean over problems of
# p (1 - p), the variance of one completion's score, where the chances p to be solved are distributed as Beta(1/2, 1/2).
GAINS_VARIANCE, COMPLETION_VARIANCE = 0.2**2, 1 / 8
_STEPS = 40  # of halving an interval of length 1


def guessed_error(problems: int, k: int) -> float:
    """The standard error that a difference of base and adapter will have, as far as one can know beforehand.

    Args:
        problems: At least one.
        k: Completions of each, of the base and of the adapter.

    Source: Miller 2024, "Adding error bars to evals", arXiv:2411.00640, section 5, equation 9 without the logarithm of
        the two levels, which :func:`smallest_gain` has.
    """
    return math.sqrt((GAINS_VARIANCE + 2 * COMPLETION_VARIANCE / k) / problems)


def smallest_gain(stderr: float, problems: int, tasks: int = 1) -> float | None:
    """The smallest true gain that 80 of 100 evaluations show.

    Args:
        stderr: Of the difference, more than 0.
        problems: Of the task.
        tasks: Differences that are looked at together: the level is that of Holm's first step, 0.05 / tasks. Once
            another one is shown a smaller gain is enough.

    Returns:
        0..1; None: so few problems show no gain, however large.

    Source: Miller 2024, arXiv:2411.00640, section 5, for the p value. The interval is wider than Student's where
        problems are few (:func:`perl.zoo.intervals.interval`), so that the mean that 80 of 100 evaluations exceed must
        be one whose interval excludes 0, too.
    """
    level = SMALL_P / tasks
    if problems < 2 or 2 / 2**problems > level:  # the smallest p value that flipping all signs can have
        return None
    normal = NormalDist()
    for_p = normal.inv_cdf(1 - level / 2) * stderr
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if interval(middle, stderr, problems, difference=True)[0] > 0:
            high = middle
        else:
            low = middle
    gain = max(for_p, high) + normal.inv_cdf(SHOWN_IN) * stderr
    return gain if gain <= 1 else None


def power_line(problems: int, k: int, tasks: int = 1) -> str:
    """What a plan says of it: ``30 problems x 16: a gain below 18 points is missed in more than 1 of 5 evaluations``.

    Args:
        problems: Of a task.
        k: Completions of each.
        tasks: Differences that will be looked at together.
    """
    return f"{problems:,} problems x {k}: {power_words(guessed_error(problems, k), problems, tasks)}"


def power_words(stderr: float, problems: int, tasks: int = 1) -> str:
    """The part of it that says how small a gain can be; arguments as those of :func:`smallest_gain`."""
    together = f" (Holm over {tasks})" if tasks > 1 else ""
    gain = smallest_gain(stderr, problems, tasks)
    if gain is None:
        return f"too few to show any gain{together}"
    points = 100 * gain
    return (
        f"a gain below {points:.{0 if points >= 9.95 else 1}f} points is missed in more than 1 of 5 evaluations"
        f"{together}"
    )
