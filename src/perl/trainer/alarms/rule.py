"""What a rule sees of a run, its log and its settings; what a rule is, what it finds, and when that is to be said.

logs of a step -> History: training steps in order, the series of each metric, held-out scores
History, Setup -> Sign; a Sign at or above its limit is an alarm
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perl.recipe.sections import FIELD_OF_SETTING

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


@dataclass(frozen=True)
class AlarmSetup:
    """What is set in a run.

    Attributes:
        usual_rate: The learning rate that is usual for its method and the width of its model; None: not known.
        by_sequence: Whether a completion has one importance ratio, not one for each token.
        waits: Steps at the begin in which only a critic is trained.
        flat_steps: Steps in a row without a reward that differs, after which they are an alarm; 0: never.
        compares: Whether equal rewards of a group make no advantage; with a critic or a baseline of the batch they do.
        masks_truncated: Whether truncated completions are left out of the loss.
        completion: A typical one of the newest completions; None: not known.
        values: Present settings by the name of TRL's argument.
    """

    usual_rate: float | None = None
    by_sequence: bool = False
    waits: int = 0
    flat_steps: int = 5
    compares: bool = True
    masks_truncated: bool = False
    completion: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def with_values(self, text: str) -> str:
        """A text with the present value behind each setting that has its argument's name in braces."""

        def shown(match: re.Match[str]) -> str:
            value = self.values.get(match.group(1))
            return "" if value is None else f" (now {value:g})" if isinstance(value, int | float) else f" (now {value})"

        return re.sub(r"\{(\w+)\}", shown, text)


@dataclass(frozen=True)
class Sign:
    """What a rule's statistic is now.

    Attributes:
        value: The statistic; the higher the worse.
        what: The number in words, with what it is compared with.
        limit: Where the statistic is an alarm; None: the rule's own limit.
        cause: The likely cause; None: the rule's.
        change: The setting to change; None: the rule's.
    """

    value: float
    what: str
    limit: float | None = None
    cause: str | None = None
    change: str | None = None


@dataclass(frozen=True)
class Rule:
    """One kind of alarm.

    Attributes:
        code: As `perl explain` knows it.
        name: As ``alarms.stop`` names it.
        title: What is wrong, in three words.
        watches: The metrics that it reads, for people.
        limit: The statistic from which on it is an alarm.
        fires: The same in words.
        why: What the limit rests on: papers, and healthy runs.
        window: Steps that it stands for when it is first said; it is said again once they have doubled.
        measure: History, Setup -> the statistic; None: it cannot be judged yet, or never in this run.
        harm: What happens to a run otherwise.
        cause: The likely cause.
        change: The setting to change; ``{name}`` becomes the present value of TRL's argument of that name.
        sample: What a line begins with: a number in words.
        in_a_row: Whether the statistic is the number of steps in a row, which begins anew when they are over.
        over: What is said when they are; empty: nothing.
    """

    code: str
    name: str
    title: str
    watches: str
    limit: float
    fires: str
    why: str
    window: int
    measure: Callable[[History, AlarmSetup], Sign | None]
    harm: str
    cause: str
    change: str
    sample: str
    in_a_row: bool = False
    over: str = ""

    @property
    def example(self) -> str:
        """A line."""
        return self.line(Sign(self.limit, self.sample), AlarmSetup(values=_SAMPLE_VALUES))

    def judge(self, history: History, setup: AlarmSetup) -> Sign | None:
        """The sign, if it is an alarm."""
        sign = self.measure(history, setup)
        return sign if sign is not None and sign.value >= self.limit_of(sign) else None

    def limit_of(self, sign: Sign) -> float:
        """Where a sign is an alarm."""
        return self.limit if sign.limit is None else sign.limit

    def line(self, sign: Sign, setup: AlarmSetup) -> str:
        """What is said: the number, the likely cause, the setting to change, the code."""
        cause = self.cause if sign.cause is None else sign.cause
        change = self.change if sign.change is None else sign.change
        said = sign.what + (f": {cause}" if cause else "") + (f"; {setup.with_values(change)}" if change else "")
        return f"{said} [{self.code}]"


_SAMPLE_VALUES = {
    **{"max_completion_length": 512, "learning_rate": 2e-4, "beta": 0.01, "epsilon": 3e-4, "entropy_weight": 0.0},
    **{"num_iterations": 4, "steps_per_generation": 1, "rollout_check_every": 50, "rollout_prefetch": 0},
    "max_grad_norm": 1.0,
}


class Judge:
    """What is to be said of a training: a sign the first time, and each time the steps that have it have doubled.

    Attributes:
        history: All that was logged.
        over: Lines on steps in a row that have ended; whoever says them empties it.
    """

    def __init__(self, rules: Iterable[Rule], begin: int) -> None:
        """Nothing is known.

        Args:
            rules: That are looked at.
            begin: The step before the first that is logged.
        """
        self.history, self.over = History(begin), list[str]()
        self._rules, self._next = tuple(rules), dict[str, float]()
        self._held: defaultdict[str, float] = defaultdict(float)

    def due(self, step: int, logs: Mapping[str, Any], setup: AlarmSetup) -> list[tuple[Rule, Sign]]:
        """The signs that are to be said once a log was added."""
        rows = len(self.history.rows)
        if not self.history.add(step, logs):
            return []
        steps = self.history.rows[-1].steps if len(self.history.rows) > rows else 0
        found = []
        for rule in self._rules:
            sign = rule.measure(self.history, setup)
            # Steps in a row are over, whatever the limit has become; another alarm that comes and goes is one alarm.
            if (sign is None or sign.value < 1) and rule.in_a_row and rule.name in self._next:
                del self._next[rule.name]
                self.over.append(rule.over.format(steps=f"{self._held.pop(rule.name):g}"))
            if sign is not None and sign.value >= rule.limit_of(sign) and self._is_due(rule, sign, steps):
                found.append((rule, sign))
        return found

    def _is_due(self, rule: Rule, sign: Sign, steps: int) -> bool:
        begin = rule.limit_of(sign) if rule.in_a_row else float(rule.window)
        held = sign.value if rule.in_a_row else max(begin, self._held[rule.name] + steps)
        self._held[rule.name], due = held, self._next.get(rule.name, begin)
        if held < due:
            return False
        while due <= held:
            due *= 2
        self._next[rule.name] = due
        return True


# Keys of a recipe whose place in a script is another argument than a field of the trainer's arguments.
_IN_A_SCRIPT = {"data.train": "train_dataset", "data.eval": "eval_dataset", "alarms.stop": "HealthAlarms(stop=...)"}
_KEY = re.compile(r"\b(train|rollout|peft|model|engine|teacher|data|alarms)\.(\w+)")


def as_in_a_script(line: str) -> str:
    """A line with settings by the names of the trainer's arguments in the place of a recipe's keys."""

    def argument(match: re.Match[str]) -> str:
        section, key = match.groups()
        if section == "train":
            return key
        return FIELD_OF_SETTING.get((section, key), _IN_A_SCRIPT.get(match.group(), match.group()))

    return _KEY.sub(argument, line)
