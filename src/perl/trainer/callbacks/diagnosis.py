"""Reports why nothing is learned: rewards that do not differ within any group, or completions that are masked out.

logs of a step -> FlatSteps -> one line with the setting to change, when flat steps follow each other
logs of a step -> one line with the setting to change, when steps leave nearly all completions out of the loss

Sees only what is logged and the newest completions. Knows nothing of problems, models or how a reward is made.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments

logger = logging.getLogger("perl")

Logs = Mapping[str, Any] | None

# Rewards that judge answers and log what became of them, the first one that a run has; see ``rewards/accuracy.py``.
_JUDGES = ("accuracy", "reasoning_accuracy", "cosine_length", "length_penalty")
_VERDICTS = ("wrong", "no_answer", "unparsable_gold", "timeout", "error")
_TRUNCATED = "completions/clipped_ratio"

_MOST = 0.5  # of the completions: the fault that is named
_MANY_TIMEOUTS = 0.2
_ALL_RIGHT, _NEARLY_NONE_RIGHT = 0.95, 0.05
_SHOWN_CHARACTERS = 80
# The standard deviation of equal rewards: TRL forms it in float32, where that of eight times 0.7 is not 0.
_ROUNDING = 1e-6
_DIGITS = 6  # TRL averages what rewards log in float32

_MASKED = "rows/masked_fraction"
_NEARLY_ALL = 0.9
_MASKED_STEPS = 3  # before the first line


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
        line += f"; {_ending(flat.completion)}"
    return f"{line}; {_advice(flat)}"


def is_flat(logs: Mapping[str, Any]) -> bool | None:
    """Whether no group of a logged step had different rewards; None for logs that do not say it.

    Args:
        logs: A step's, with TRL's names. No reward at all, which TRL logs as None, is flat: its
            ``frac_reward_zero_std`` counts a group without rewards as one whose rewards differ.
    """
    if "reward" not in logs:
        return None
    reward, zero_std, std = (_number(logs.get(key)) for key in ("reward", "frac_reward_zero_std", "reward_std"))
    if reward is None:
        return True
    if zero_std is None and std is None:
        return None
    alike = std is not None and std <= _ROUNDING * max(1.0, abs(reward))
    return alike or zero_std == 1.0


class FlatRewards(TrainerCallback):
    """Warns once flat steps follow each other, again each time their number has doubled, and says when it is over."""

    def __init__(self, after_steps: int, latest_completions: Callable[[], list[str]], *, compares: bool = True) -> None:
        """Waits for flat steps.

        Args:
            after_steps: How many in a row are a warning; 0: never warn.
            latest_completions: Gives the trainer's newest completions.
            compares: As of :class:`FlatSteps`.
        """
        self._compares = compares
        self.after_steps = after_steps
        self.latest_completions = latest_completions
        self._logged_step = 0
        self._forget()

    def on_train_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:  # noqa: ANN401 (transformers')
        """Begins to count; a resumed run counts anew."""
        self._logged_step = state.global_step
        self._forget()

    def on_log(self, args: TrainingArguments, state: TrainerState, _: Any, logs: Logs = None, **__: Any) -> None:  # noqa: ANN401
        """Counts the steps that were logged; those that train on earlier rollouts have no rewards of their own."""
        if self.after_steps < 1 or not state.is_world_process_zero or not logs:
            return
        if not logs.keys() & {"loss", "reward"}:  # an evaluation, or the summary at the end
            return
        if "train_runtime" in logs and state.global_step == self._logged_step:  # which has the last step's once more
            return
        steps = max(1, state.global_step - self._logged_step)
        self._logged_step = state.global_step
        flat = is_flat(logs)
        if flat is None:
            return
        if not flat:
            if self._steps >= self.after_steps:
                logger.info("rewards differ within groups again, after %d steps in which they did not", self._steps)
            self._forget()
            return
        self._count(logs, steps)
        if self._steps >= self._warn_at:
            while self._warn_at <= self._steps:
                self._warn_at *= 2
            logger.warning("%s", diagnose(self._flat_steps(args)))

    def _forget(self) -> None:
        self._steps, self._warn_at = 0, self.after_steps
        self._judge = _JUDGES[0]
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, int] = defaultdict(int)

    def _count(self, logs: Mapping[str, Any], steps: int) -> None:
        self._steps += steps
        self._judge = next((name for name in _JUDGES if _of(name, "wrong") in logs), self._judge)
        for key in ("reward", _TRUNCATED, *(_of(self._judge, verdict) for verdict in _VERDICTS)):
            value = _number(logs.get(key))
            if value is not None:
                self._sums[key] += value * steps
                self._counts[key] += steps

    def _flat_steps(self, args: TrainingArguments) -> FlatSteps:
        verdicts = [self._mean(_of(self._judge, verdict)) for verdict in _VERDICTS]
        known = [share for share in verdicts if share is not None]
        wrong, no_answer, unparsable, timeout, error = verdicts
        names = ("max_completion_length", "temperature", "num_generations")
        return FlatSteps(
            steps=self._steps,
            reward=self._mean("reward"),
            truncated=self._mean(_TRUNCATED),
            right=max(0.0, round(1.0 - sum(known), _DIGITS)) if len(known) == len(_VERDICTS) else None,
            wrong=wrong,
            no_answer=no_answer,
            timeout=timeout,
            unjudged=None if unparsable is None or error is None else unparsable + error,
            judge=self._judge,
            completion=typical(self.latest_completions()),
            settings={name: getattr(args, name, None) for name in names},
            compares=self._compares,
        )

    def _mean(self, key: str) -> float | None:
        return self._sums[key] / self._counts[key] if self._counts[key] else None


class MaskedRows(TrainerCallback):
    """Warns once three steps have masked out nearly all of their rows, and again each time their number has doubled."""

    def __init__(self) -> None:
        """No step was masked yet."""
        self._steps, self._warn_at = 0, _MASKED_STEPS

    def on_log(self, args: TrainingArguments, state: TrainerState, _: Any, logs: Logs = None, **__: Any) -> None:  # noqa: ANN401
        """Counts the steps whose rollouts were masked out."""
        if logs and "train_runtime" in logs:  # the last step's once more
            return
        share = _number((logs or {}).get(_MASKED))
        if share is None or share < _NEARLY_ALL or not state.is_world_process_zero:
            return
        self._steps += 1
        if self._steps >= self._warn_at:
            self._warn_at *= 2
            logger.warning("%s", _masked_line(self._steps, share, logs or {}, args))


def _masked_line(steps: int, share: float, logs: Mapping[str, Any], args: TrainingArguments) -> str:
    """What was masked out and which setting to change."""
    line = f"{steps} steps so far have masked out 90 % or more of their completions, the newest {_percent(share)}: "
    truncated = _number(logs.get(_TRUNCATED))
    if not getattr(args, "mask_truncated_completions", False) or truncated is None:
        return f"{line}no token of theirs is in the loss; look at the masks that come with the rollouts"
    return (
        f"{line}{_TRUNCATED} is {truncated:.2f}, and train.mask_truncated_completions leaves truncated ones out of the "
        f"loss; raise rollout.max_completion_length (now {getattr(args, 'max_completion_length', None)}) or ask for "
        "shorter completions"
    )


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
    if _share(flat.unjudged) >= _MOST:
        return "the gold answers cannot be read: `perl reward check RECIPE` lists them"
    if _share(flat.right) >= _ALL_RIGHT:
        return "too easy, other rewards are saturated: harder problems (data.train)"
    if _share(flat.truncated) >= _MOST:
        now = _now(flat, "max_completion_length")
        return f"raise rollout.max_completion_length{now} or ask for shorter completions"
    if _share(flat.timeout) >= _MANY_TIMEOUTS:
        return f"look at the answers in samples.jsonl, or raise rewards.{flat.judge}.args.timeout_seconds"
    if _share(flat.no_answer) >= _MOST:
        form = r'e.g. "put your final answer within \boxed{}"'
        return f"ask for the form of the answer in data.prompt_template or data.system_prompt, {form}"
    generations = f"train.num_generations{_now(flat, 'num_generations')}"
    if flat.right is not None and flat.right > _NEARLY_NONE_RIGHT:
        fault = "the completions of a prompt are all right or all wrong"
        return f"{fault}: raise rollout.temperature{_now(flat, 'temperature')} or {generations}"
    if flat.right is not None:
        remedy = f"easier problems (data.train), a stronger base, more {generations}"
        return f"too hard: {remedy}; or wrong gold answers: `perl reward check RECIPE`"
    if flat.reward is None:
        return "every reward function returns None or fails: try them on the gold answers, `perl reward check RECIPE`"
    return (
        "the reward function gives all completions of a prompt the same number: call it with some of samples.jsonl, "
        "or `perl reward check RECIPE`"
    )


def _now(flat: FlatSteps, name: str) -> str:
    value = (flat.settings or {}).get(name)
    return "" if value is None else f" (now {value:g})"


def _ending(completion: str) -> str:
    """The end of a completion, on one line and without what a terminal would act on."""
    text = "".join(c for c in " ".join(completion.split()) if c.isprintable())
    if not text:
        return "a typical completion is empty"
    cut = "..." if len(text) > _SHOWN_CHARACTERS else ""
    return f'a typical completion ends "{cut}{text[-_SHOWN_CHARACTERS:]}"'


def _percent(share: float) -> str:
    """A fraction as a whole percentage that is 0 or 100 only if it is."""
    if 0.0 < share < 0.005:
        return "<1 %"
    return ">99 %" if 0.995 <= share < 1.0 else f"{100 * share:.0f} %"


def _of(judge: str, verdict: str) -> str:
    return f"reward/{judge}/{verdict}_frac"


def _share(share: float | None) -> float:
    return -1.0 if share is None else share


def _number(value: Any) -> float | None:  # noqa: ANN401 (what a trainer logs)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
