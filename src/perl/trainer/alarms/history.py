"""What a training has logged, as rules read it.

logs of a step -> History: training steps in order, the series of each metric, held-out scores
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Scores on problems that are not trained on: of TRL's evaluation, with the name of its data set if there are several,
# and of benchmark tasks.
_HELD_OUT = re.compile(r"eval_(\w+_)?reward|eval/.+/avg@\d+")
# Rewards that judge answers and log what became of them, the first one that a run has; see ``rewards/accuracy.py``.
JUDGES = ("accuracy", "reasoning_accuracy", "cosine_length", "length_penalty")
VERDICTS = ("wrong", "no_answer", "unparsable_gold", "timeout", "unjudged", "error")
# A reward of somebody else's that says by its name that it counts right answers.
_ACCURACY = re.compile(r"rewards/\w*(accura|correct)\w*/mean")


@dataclass(frozen=True)
class Logged:
    """The log of one training step, or the means of several.

    Attributes:
        step: The newest of them.
        steps: How many.
        values: Metrics that are numbers, by TRL's names; one may be infinite, or NaN. NaN stands for None too, which is
            the reward of a step in which nothing got one.
    """

    step: int
    steps: int
    values: Mapping[str, float]

    def finite(self, key: str) -> float | None:
        """A metric that is a finite number."""
        value = self.values.get(key)
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class HeldOutScore:
    """A held-out score.

    Attributes:
        step: At which the policy was scored.
        value: The mean.
        spread: Standard deviation of the completions' scores; at most that, where it is not logged.
        problems: That were asked; None: it is not logged.
        completions: Of each; None: it is not in the metric's name.
    """

    step: int
    value: float
    spread: float
    problems: int | None
    completions: int | None


class History:
    """All that was logged, in order.

    Attributes:
        rows: The training steps.
        held_out: Scores by the metric's name.
    """

    def __init__(self, begin: int = 0) -> None:
        """Nothing is known.

        Args:
            begin: The step before the first that is logged.
        """
        self.rows: list[Logged] = []
        self.held_out: defaultdict[str, list[HeldOutScore]] = defaultdict(list)
        self._newest = begin
        self._series: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, step: int, logs: Mapping[str, Any]) -> bool:
        """Takes what was logged.

        Args:
            step: At which.
            logs: As TRL logs them: of a training step, of an evaluation, or the entry that closes a training.

        Returns:
            Whether it tells anything of the training.
        """
        values = {key: math.nan if v is None else float(v) for key, v in logs.items() if v is None or _is_number(v)}
        scores = [key for key in values if _HELD_OUT.fullmatch(key) and math.isfinite(values[key])]
        closes = "train_runtime" in logs and step == self._newest  # which has the last step's once more
        if closes:
            return False
        for key in scores:
            self.held_out[key].append(_score(step, key, values))
        if not logs.keys() & {"loss", "reward"}:
            return bool(scores)
        self.rows.append(Logged(step, max(1, step - self._newest), values))
        self._newest = step
        for key, value in values.items():
            if math.isfinite(value):
                self._series[key].append(value)
        return True

    def of(self, key: str) -> Sequence[float]:
        """The finite values of a metric, of the steps that logged it."""
        return self._series.get(key, [])

    def recent(self, key: str, count: int) -> list[float] | None:
        """The newest values of a metric; None: there are fewer."""
        series = self.of(key)
        return list(series[-count:]) if len(series) >= count else None

    def newest_rows(self, key: str, count: int) -> list[Logged]:
        """The newest training steps that logged a metric, as many as there are."""
        found = []
        for row in reversed(self.rows):
            if key in row.values:
                found.append(row)
            if len(found) == count:
                break
        return found[::-1]


def _score(step: int, key: str, values: Mapping[str, float]) -> HeldOutScore:
    value, task = values[key], re.fullmatch(r"eval/.+/avg@(\d+)", key)
    most = math.sqrt(max(0.0, value * (1.0 - value)))  # of scores from 0 to 1
    if task is not None:
        return HeldOutScore(step, value, most, None, int(task.group(1)))
    spread = number(values.get(f"{key}_std"))
    rate, seconds = (
        number(values.get(key.removesuffix("reward") + what)) for what in ("samples_per_second", "runtime")
    )
    asked = max(1, round(rate * seconds)) if rate and seconds else None  # transformers logs their number like that only
    return HeldOutScore(step, value, most if spread is None else spread, asked, None)


def judge_of(values: Mapping[str, Any]) -> str | None:
    """The reward that judged answers; None: none did."""
    return next((name for name in JUDGES if fraction(name, "wrong") in values), None)


def fraction(judge: str, verdict: str) -> str:
    """The metric that says which share of the answers got a verdict."""
    return f"reward/{judge}/{verdict}_frac"


def right_share(values: Mapping[str, Any]) -> float | None:
    """Which share of a step's completions is right; None: nothing says it."""
    judge = judge_of(values)
    if judge is not None:
        shares = [number(values.get(fraction(judge, verdict))) for verdict in VERDICTS]
        known = [share for share in shares if share is not None]
        return max(0.0, round(1.0 - sum(known), 6)) if len(known) == len(VERDICTS) else None
    named = [key for key in values if _ACCURACY.fullmatch(key)]
    return number(values[named[0]]) if named else None


def number(value: Any) -> float | None:  # noqa: ANN401 (what a trainer logs)
    """A finite number; None for anything else."""
    return float(value) if _is_number(value) and math.isfinite(value) else None


def _is_number(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, int | float) and not isinstance(value, bool)
