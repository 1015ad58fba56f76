"""Signs of a policy that goes astray, and of its optimizer: entropy, clipped ratios, distances, gradients, the rate.

History, Setup -> Sign
"""

import itertools
import math
import statistics
from collections.abc import Sequence

from perl.trainer.alarms.of_samples import MASKED, is_flat
from perl.trainer.alarms.rule import AlarmSetup, History, Sign, right_share

ENTROPY, KL = "entropy", "kl"
ENGINE_GAP = "sampling/sampling_logp_difference/mean"
CLIPPED = ("clip_ratio/region_mean", "cispo_clip_ratio")

ENTROPY_WINDOW = 5
LEARNED = 0.9  # of the answers are right: a policy that is sure of itself is as it should be
AGREEING = 0.5  # of the groups have no reward that differs: sampling finds nothing else any more

RATIO_WINDOW = 3
CLIPPED_MOST = 0.05

GAP_WINDOW = 3
GAP = 0.1  # nats
GAP_FLOOR, GAP_GROWTH = 0.02, 10.0

KL_WINDOW, KL_BEFORE = 3, 20
KL_MOST = 1.0  # nats a token
KL_FLOOR, KL_GROWTH = 0.3, 10.0


def entropy(history: History, _: AlarmSetup) -> Sign | None:
    """How many times lower the entropy is than at first, where the task is not learned and groups agree."""
    values = history.of(ENTROPY)
    if len(values) < 2 * ENTROPY_WINDOW:
        return None
    first, now = statistics.fmean(values[:ENTROPY_WINDOW]), statistics.fmean(values[-ENTROPY_WINDOW:])
    agreeing, still = history.recent("frac_reward_zero_std", ENTROPY_WINDOW), _unlearned(history)
    if first <= 0 or agreeing is None or statistics.fmean(agreeing) < AGREEING or still is None:
        return None
    fall = first / max(now, 1e-12)
    share = f"{100 * now / first:.2g} % of what it was at first"
    return Sign(fall, f"the entropy is {now:.2g} nats a token, {share}{still}")


def _unlearned(history: History) -> str | None:
    """How much is still to be learned; None: nothing, or it cannot be said."""
    rows = history.newest_rows("reward", ENTROPY_WINDOW)
    right = [share for row in rows if (share := right_share(row.values)) is not None]
    if right:
        share = statistics.fmean(right)
        return None if share >= LEARNED else f", while {100 * share:.0f} % of the answers are right"
    rewards = history.of("reward")
    if len(rewards) < 2 * ENTROPY_WINDOW:
        return None
    first, now = statistics.fmean(rewards[:ENTROPY_WINDOW]), statistics.fmean(rewards[-ENTROPY_WINDOW:])
    # Without verdicts nobody knows the highest reward there is; one that has grown may have reached it.
    return None if now > first else f", while the reward is {now:.3g} as at first"


def ratios(history: History, setup: AlarmSetup) -> Sign | None:
    """Which share of the tokens' importance ratios is outside of their bounds.

    None where a completion has one ratio: GSPO's narrow bounds clip most of them in healthy trainings.
    """
    if setup.by_sequence:
        return None
    known = [found for key in CLIPPED if (found := history.recent(key, RATIO_WINDOW)) is not None]
    if not known:
        return None
    share = statistics.fmean(known[0])
    what = f"{100 * share:.0f} % of the tokens' importance ratios are clipped in the newest {RATIO_WINDOW} steps"
    return Sign(share, what)


def engine(history: History, _: AlarmSetup) -> Sign | None:
    """How far the engine's log-probs of what it sampled are from the trainer's, in nats."""
    return _grown(
        history.of(ENGINE_GAP),
        history.of(ENGINE_GAP)[:GAP_WINDOW],
        GAP_WINDOW,
        (GAP, GAP_FLOOR, GAP_GROWTH),
        "the engine's log-probs are {now:.2g} nats a token off the trainer's",
        "at first",
    )


def divergence(history: History, _: AlarmSetup) -> Sign | None:
    """How far the policy is from its reference, in nats a token."""
    series = history.of(KL)
    return _grown(
        series,
        series[-KL_WINDOW - KL_BEFORE : -KL_WINDOW],
        KL_WINDOW,
        (KL_MOST, KL_FLOOR, KL_GROWTH),
        "the KL divergence to the reference is {now:.2g} nats a token",
        f"in the {KL_BEFORE} steps before",
    )


def _grown(
    series: Sequence[float],
    before: Sequence[float],
    window: int,
    limits: tuple[float, float, float],
    what: str,
    when: str,
) -> Sign | None:
    """The median of the newest values against a highest one, or against what it was before and a floor.

    A median: estimates of a divergence have single values far out, which come from a single token.
    """
    if len(series) < 2 * window or not before:
        return None
    most, floor, growth = limits
    now, earlier = statistics.median(series[-window:]), statistics.median(before)
    limit = min(most, max(floor, growth * earlier))
    return Sign(now, f"{what.format(now=now)}, {earlier:.2g} {when}", limit)


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


def explosion(history: History, _: AlarmSetup) -> Sign | None:
    """How many times larger the gradient's norm is than usual; infinite if it is no number.

    Usual is the larger of two medians: of the steps before, and of the first steps. A policy that has learned its task
    has a gradient in few groups only, whose norm then rises from nearly nothing to what it was at first.
    """
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


def vanished(history: History, setup: AlarmSetup) -> Sign | None:
    """For how many steps in a row the gradient was 0 although rewards differed and completions were trained on."""
    newest = history.newest_rows(NORM, 1)
    if not newest or newest[0].values[NORM] != 0.0:
        return Sign(0.0, "") if newest else None
    rewarded, steps = bool(history.of("reward")), 0
    for row in reversed(history.rows):
        norm = row.values.get(NORM)
        # Where nothing moves the policy other rules say why not.
        taught = is_flat(row.values) is False and (row.finite(MASKED) or 0.0) < 1.0
        if norm is None or row.step <= setup.waits or (rewarded and not taught):
            continue
        if norm != 0.0:
            break
        steps += row.steps
    differing = ", in which rewards differed" if rewarded else ""
    return Sign(float(steps), f"the gradient's norm is 0 in the newest {steps} steps{differing}")


def rate(history: History, setup: AlarmSetup) -> Sign | None:
    """How many times the usual rate of the method the learning rate is."""
    rates = history.recent(RATE, 1)
    if rates is None or not setup.usual_rate:
        return None
    times = rates[0] / setup.usual_rate
    return Sign(times, f"the learning rate is {rates[0]:.2g}, {times:.3g} times the usual {setup.usual_rate:.2g}")
