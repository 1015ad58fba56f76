"""What a rule is, what it sees of a run's settings, what it finds, and when that is to be said.

History, Setup -> Sign; a Sign at or above its limit is an alarm
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from perl.recipe.sections import FIELD_OF_SETTING
from perl.trainer.alarms.history import History


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
        example: A line.
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
    example: str
    in_a_row: bool = False
    over: str = ""

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
        said = sign.what + (f": {cause}" if cause else "") + (f"; {with_values(change, setup)}" if change else "")
        return f"{said} [{self.code}]"


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
            if sign is None or sign.value < 1:  # of steps in a row: they are over, whatever the limit has become
                self._forget(rule)
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

    def _forget(self, rule: Rule) -> None:
        """Steps in a row are over; another alarm that comes and goes is one alarm."""
        if rule.in_a_row and rule.name in self._next:
            del self._next[rule.name]
            self.over.append(rule.over.format(steps=f"{self._held.pop(rule.name):g}"))


def with_values(text: str, setup: AlarmSetup) -> str:
    """A text with the present value behind each setting that has its argument's name in braces."""

    def shown(match: re.Match[str]) -> str:
        value = setup.values.get(match.group(1))
        return "" if value is None else f" (now {value:g})" if isinstance(value, int | float) else f" (now {value})"

    return re.sub(r"\{(\w+)\}", shown, text)


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
