"""Signs in the optimizer's step: gradients that explode or vanish, a rate that is far from the usual.

History, Setup -> Sign
"""

import itertools
import math
import statistics

from perl.trainer.alarms.flat import is_flat
from perl.trainer.alarms.history import History, Logged
from perl.trainer.alarms.of_samples import MASKED
from perl.trainer.alarms.rule import Setup, Sign

NORM, RATE = "grad_norm", "learning_rate"

NORM_WINDOW, NORM_BEFORE, FEWEST_BEFORE = 3, 20, 10
BAD_WINDOW, BAD = 5, 3  # as many of the newest steps without a finite norm; one alone is skipped and forgotten
ZERO_STEPS = 3.0
USUAL_WIDTH = 2048  # of the models of 1 to 2 billion parameters that the usual rates are for


def usual_rate(of_method: float, width: int | None) -> float | None:
    """The learning rate that is usual for a method on a model of some width; None: the width is not known.

    Args:
        of_method: Of the methods' table.
        width: The model's hidden size.

    Source:
        Adam's rate of matrices goes with 1 / width (Yang et al. 2022, arXiv:2203.03466). Wider models than 2048 are
        left at the table's rate: LoRA's best rate hardly falls with size from there on (Schulman et al. 2025).
    """
    return of_method * max(1.0, USUAL_WIDTH / width) if width else None


def explosion(history: History, setup: Setup) -> Sign | None:
    """How many times larger the gradient's norm is than usual; infinite if it is no number.

    Usual is the larger of two medians: of the steps before, and of the first steps. A policy that has learned its task
    has a gradient in few groups only, whose norm then rises from nearly nothing to what it was at first.
    """
    del setup
    rows = history.newest_rows(NORM, BAD_WINDOW)
    bad = sum(not math.isfinite(row.values[NORM]) for row in rows)
    if bad >= BAD:
        return Sign(math.inf, f"the gradient's norm is not finite in {bad} of the newest {BAD_WINDOW} steps")
    norms = history.of(NORM)
    recent = [norm for norm in norms[-NORM_WINDOW - NORM_BEFORE :] if norm > 0]
    before, newest = recent[:-NORM_WINDOW], recent[-NORM_WINDOW:]
    if len(before) < FEWEST_BEFORE:
        return None
    first = list(itertools.islice((norm for norm in norms if norm > 0), FEWEST_BEFORE))
    # The least of the newest: one batch with a large gradient is usual, three in a row are not.
    now, usual = min(newest), max(statistics.median(before), statistics.median(first))
    what = f"the gradient's norm is {now:.3g} or more in {NORM_WINDOW} steps"
    return Sign(now / usual, f"{what}, {now / usual:.0f} times the usual of this run, {usual:.3g}")


def vanished(history: History, setup: Setup) -> Sign | None:
    """For how many steps in a row the gradient was 0 although rewards differed and completions were trained on."""
    newest = history.newest_rows(NORM, 1)
    if not newest or newest[0].values[NORM] != 0.0:
        return Sign(0.0, "") if newest else None
    rewarded, steps = bool(history.of("reward")), 0
    for row in reversed(history.rows):
        norm = row.values.get(NORM)
        if norm is None or row.step <= setup.waits or (rewarded and not _teaches(row)):
            continue
        if norm != 0.0:
            break
        steps += row.steps
    differing = ", in which rewards differed" if rewarded else ""
    return Sign(float(steps), f"the gradient's norm is 0 in the newest {steps} steps{differing}")


def _teaches(row: Logged) -> bool:
    """Whether a step has something that moves the policy: other rules say why not."""
    return is_flat(row.values) is False and (row.finite(MASKED) or 0.0) < 1.0


def rate(history: History, setup: Setup) -> Sign | None:
    """How many times the usual rate of the method the learning rate is."""
    rates = history.recent(RATE, 1)
    if rates is None or not setup.usual_rate:
        return None
    times = rates[0] / setup.usual_rate
    return Sign(times, f"the learning rate is {rates[0]:.2g}, {times:.3g} times the usual {setup.usual_rate:.2g}")
