"""Signs in what was sampled: completions that are masked out or truncated, rewards that do not differ.

History, Setup -> Sign
"""

import statistics

from perl.trainer.alarms.flat import TRUNCATED, diagnose, flat_steps
from perl.trainer.alarms.history import History
from perl.trainer.alarms.rule import Setup, Sign

MASKED = "rows/masked_fraction"
MOST = 0.5
"""Of the completions: more are lost than are used."""
LEARNED, PATIENCE = 0.95, 4
"""From this share of right answers on, groups agree by chance, and it takes so many times more steps."""
MASKED_WINDOW, TRUNCATED_WINDOW = 3, 5


def masked(history: History, setup: Setup) -> Sign | None:
    """Which share of the newest steps' completions is masked out of the loss."""
    shares = history.recent(MASKED, MASKED_WINDOW)
    if shares is None:
        return None
    share, cut = statistics.fmean(shares), history.recent(TRUNCATED, MASKED_WINDOW)
    what = f"{_percent(share)} of the completions of the newest {MASKED_WINDOW} steps are masked out"
    if not setup.masks_truncated or cut is None:
        return Sign(share, what)
    return Sign(
        share,
        f"{what}, {TRUNCATED} is {statistics.fmean(cut):.2f}",
        cause="train.mask_truncated_completions leaves truncated ones out of the loss",
        change="raise rollout.max_completion_length{max_completion_length} or ask for shorter completions",
    )


def truncated(history: History, setup: Setup) -> Sign | None:
    """Which share of the newest steps' completions is cut off; None where that they are masked out is said."""
    shares, out = history.recent(TRUNCATED, TRUNCATED_WINDOW), history.recent(MASKED, MASKED_WINDOW)
    if shares is None or (setup.masks_truncated and out is not None and statistics.fmean(out) >= MOST):
        return None
    share = statistics.fmean(shares)
    return Sign(share, f"{_percent(share)} of the completions of the newest {TRUNCATED_WINDOW} steps are truncated")


def flat(history: History, setup: Setup) -> Sign | None:
    """For how many steps in a row no group's rewards have differed."""
    if not setup.flat_steps or not history.newest_rows("reward", 1):
        return None
    found = flat_steps(history, setup)
    if found is None:
        return Sign(0.0, "", float(setup.flat_steps))
    learned = found.right is not None and found.right >= LEARNED
    return Sign(float(found.steps), diagnose(found), float(setup.flat_steps * (PATIENCE if learned else 1)))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
