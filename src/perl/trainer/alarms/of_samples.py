"""Signs in what was sampled: completions that are masked out or truncated, rewards that do not differ, and why.

History, Setup -> Sign; flat steps -> one line with the setting to change
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perl.trainer.alarms.rule import JUDGES, VERDICTS, AlarmSetup, History, Logged, Sign, fraction, judge_of, number

MASKED, TRUNCATED = "rows/masked_fraction", "completions/clipped_ratio"
MOST = 0.5
"""Of the completions: more are lost than are used, and the fault that is named."""
LEARNED, PATIENCE = 0.95, 4
"""From this share of right answers on, groups agree by chance, and it takes so many times more steps."""
MASKED_WINDOW, TRUNCATED_WINDOW = 3, 5
_LONGER = "raise rollout.max_completion_length{max_completion_length} or ask for shorter completions"
_MANY_TIMEOUTS = 0.2
_ALL_RIGHT, _NEARLY_NONE_RIGHT = 0.95, 0.05
_SHOWN_CHARACTERS = 80
# The standard deviation of equal rewards: TRL forms it in float32, where that of eight times 0.7 is not 0.
_ROUNDING = 1e-6
_DIGITS = 6  # TRL averages what rewards log in float32


def masked(history: History, setup: AlarmSetup) -> Sign | None:
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
        change=_LONGER,
    )


def truncated(history: History, setup: AlarmSetup) -> Sign | None:
    """Which share of the newest steps' completions is cut off; None where that they are masked out is said."""
    shares, out = history.recent(TRUNCATED, TRUNCATED_WINDOW), history.recent(MASKED, MASKED_WINDOW)
    if shares is None or (setup.masks_truncated and out is not None and statistics.fmean(out) >= MOST):
        return None
    share = statistics.fmean(shares)
    return Sign(share, f"{_percent(share)} of the completions of the newest {TRUNCATED_WINDOW} steps are truncated")


def truncated_at_once(history: History) -> Sign | None:
    """Which share of the first step's completions is cut off, if it is most: said at once, and no alarm yet."""
    first = history.recent(TRUNCATED, 1) if len(history.rows) == 1 else None
    if first is None or first[0] <= MOST:
        return None
    return Sign(first[0], f"{_percent(first[0])} of the completions of the first step are truncated")


def flat(history: History, setup: AlarmSetup) -> Sign | None:
    """For how many steps in a row no group's rewards have differed."""
    if not setup.flat_steps or not history.newest_rows("reward", 1):
        return None
    found = flat_steps(history, setup)
    if found is None:
        return Sign(0.0, "", float(setup.flat_steps))
    learned = found.right is not None and found.right >= LEARNED
    return Sign(float(found.steps), diagnose(found), float(setup.flat_steps * (PATIENCE if learned else 1)))


@dataclass(frozen=True)
class FlatSteps:
    """Steps in a row in which no group's rewards differ; fractions are those of their completions, None if not known.

    Attributes:
        steps: How many.
        reward: Mean of the rewards; None if no completion got one.
        truncated: Cut off at the longest length.
        right: Those with this verdict; so are ``wrong``, ``no_answer`` and ``timeout``.
        unjudged: The gold answer cannot be read, or the comparison failed.
        judge: The reward that judged them.
        completion: A typical one of the newest.
        settings: The run's present values, by the name of TRL's argument.
        compares: Whether equal rewards of a group make no advantage; with a critic or a baseline of the batch they do.
    """

    steps: int
    reward: float | None = None
    truncated: float | None = None
    right: float | None = None
    wrong: float | None = None
    no_answer: float | None = None
    timeout: float | None = None
    unjudged: float | None = None
    judge: str = "accuracy"
    completion: str | None = None
    settings: Mapping[str, Any] | None = None
    compares: bool = True


def diagnose(flat: FlatSteps) -> str:
    """What happened in flat steps, how a typical completion ends, and which setting to change: one line."""
    steps = "1 step" if flat.steps == 1 else f"{flat.steps} steps"
    what = "no completion got a reward" if flat.reward is None else "no group's rewards differed"
    then = "they teach nothing" if flat.compares else "they say of no completion that it is better than another"
    line = f"for {steps} {what}, so {then}: {_shares(flat)}"
    if flat.completion is not None:
        # On one line and without what a terminal would act on.
        text = "".join(c for c in " ".join(flat.completion.split()) if c.isprintable())
        cut = "..." if len(text) > _SHOWN_CHARACTERS else ""
        ending = f'ends "{cut}{text[-_SHOWN_CHARACTERS:]}"' if text else "is empty"
        line += f"; a typical completion {ending}"
    return f"{line}; {AlarmSetup(values=flat.settings or {}).with_values(_advice(flat))}"


def is_flat(logs: Mapping[str, Any]) -> bool | None:
    """Whether no group of a logged step had different rewards; None for logs that do not say it.

    Args:
        logs: A step's, with TRL's names. No reward at all, which TRL logs as None, is flat: its
            ``frac_reward_zero_std`` counts a group without rewards as one whose rewards differ.
    """
    if "reward" not in logs:
        return None
    reward, zero_std, std = (number(logs.get(key)) for key in ("reward", "frac_reward_zero_std", "reward_std"))
    if reward is None:
        return True
    if zero_std is None and std is None:
        return None
    alike = std is not None and std <= _ROUNDING * max(1.0, abs(reward))
    return alike or zero_std == 1.0


def flat_steps(history: History, setup: AlarmSetup) -> FlatSteps | None:
    """The newest steps in a row whose rewards do not differ; None: they do, or nothing says it.

    Steps that train on earlier rollouts have no rewards of their own and count neither way.
    """
    flat: list[Logged] = []  # the newest first
    for row in reversed(history.rows):
        differs = is_flat(row.values)
        if differs is False:
            break
        if differs:
            flat.append(row)
    if not flat:
        return None
    judge = next((name for name in (judge_of(row.values) for row in flat) if name), JUDGES[0])
    verdicts = {verdict: _mean(flat, fraction(judge, verdict)) for verdict in VERDICTS}
    known = [share for share in verdicts.values() if share is not None]
    unjudged = [share for name in ("unparsable_gold", "unjudged", "error") if (share := verdicts[name]) is not None]
    return FlatSteps(
        steps=sum(row.steps for row in flat),
        reward=_mean(flat, "reward"),
        truncated=_mean(flat, TRUNCATED),
        right=max(0.0, round(1.0 - sum(known), _DIGITS)) if len(known) == len(VERDICTS) else None,
        wrong=verdicts["wrong"],
        no_answer=verdicts["no_answer"],
        timeout=verdicts["timeout"],
        unjudged=sum(unjudged) if unjudged else None,
        judge=judge,
        completion=setup.completion,
        settings=setup.values,
        compares=setup.compares,
    )


def _mean(rows: Sequence[Logged], key: str) -> float | None:
    """Of the steps that have it; a log of several steps counts as often as it has steps."""
    known = [(value, row.steps) for row in rows if (value := row.finite(key)) is not None]
    return sum(value * steps for value, steps in known) / sum(steps for _, steps in known) if known else None


def typical(completions: Sequence[str]) -> str | None:
    """The completion of median length, the shorter of two; None of none."""
    return sorted(completions, key=len)[(len(completions) - 1) // 2] if completions else None


def _shares(flat: FlatSteps) -> str:
    """The fractions that are known; that of a rare fault only if it happened."""
    shares = [
        (flat.truncated, "truncated", True),
        (flat.no_answer, "no answer", True),
        (flat.wrong, "wrong", True),
        (flat.right, "right", True),
        (flat.timeout, "timeout", False),
        (flat.unjudged, "cannot be judged", False),
    ]
    known = [(round(share, _DIGITS), name, always) for share, name, always in shares if share is not None]
    shown = [f"{_percent(share)} {name}" for share, name, always in known if share or always]
    if flat.right is None and flat.reward is not None:
        shown.append(f"mean reward {flat.reward:.4g}")
    return ", ".join(shown) or "nothing else is known"


def _advice(flat: FlatSteps) -> str:
    """The setting to change, by the first fault that explains the flat rewards.

    What cannot be judged comes before what is truncated: longer completions get no reward for it either. Truncated but
    right completions are not too short: their model does not stop after its answer.
    """
    if _share(flat.unjudged) >= MOST:
        return "the gold answers cannot be read: `perl reward check RECIPE` lists them"
    if _share(flat.right) >= _ALL_RIGHT:
        return "too easy, other rewards are saturated: harder problems (data.train)"
    if _share(flat.truncated) >= MOST:
        return _LONGER
    if _share(flat.timeout) >= _MANY_TIMEOUTS:
        return f"look at the answers in samples.jsonl, or raise rewards.{flat.judge}.args.timeout_seconds"
    if _share(flat.no_answer) >= MOST:
        form = r'e.g. "put your final answer within \boxed{}"'
        return f"ask for the form of the answer in data.prompt_template or data.system_prompt, {form}"
    generations = "train.num_generations{num_generations}"
    if flat.right is not None and flat.right > _NEARLY_NONE_RIGHT:
        fault = "the completions of a prompt are all right or all wrong"
        return f"{fault}: raise rollout.temperature{{temperature}} or {generations}"
    if flat.right is not None:
        remedy = f"easier problems (data.train), a stronger base, more {generations}"
        return f"too hard: {remedy}; or wrong gold answers: `perl reward check RECIPE`"
    if flat.reward is None:
        return "every reward function returns None or fails: try them on the gold answers, `perl reward check RECIPE`"
    return (
        "the reward function gives all completions of a prompt the same number: call it with some of samples.jsonl, "
        "or `perl reward check RECIPE`"
    )


def _percent(share: float) -> str:
    """A fraction as a whole percentage that is 0 or 100 only if it is."""
    if 0.0 < share < 0.005:
        return "<1 %"
    return ">99 %" if 0.995 <= share < 1.0 else f"{100 * share:.0f} %"


def _share(share: float | None) -> float:
    return -1.0 if share is None else share
