"""Says while a policy trains what is unhealthy about it: one line each, with the number, the cause and the setting.

logs of a step -> rules -> lines, alarms.jsonl, an end of the training in order

The rules are in ``trainer/alarms/table.py``.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig

from perl.algorithms.estimators import ADVANTAGES
from perl.errors import AlarmError, RecipeError, did_you_mean
from perl.methods.registry import METHODS, Method
from perl.run.joint_work import Processes, joined
from perl.run.logs import append_row
from perl.trainer.alarms.of_policy import usual_rate
from perl.trainer.alarms.of_samples import truncated_at_once, typical
from perl.trainer.alarms.rule import AlarmSetup, Judge, Rule, Sign, as_in_a_script
from perl.trainer.alarms.table import RULES
from perl.trainer.arguments.config import own_setting, teacher_section
from perl.trainer.callbacks.run_callback import Logs, RunCallback, folder_of, reopened
from perl.trainer.sampling.given_rewards import is_rewarded

logger = logging.getLogger("perl")

FILE = "alarms.jsonl"
FLAT = "rewards_flat"
"""The alarm that ``FlatRewards`` says alone."""
FLAT_STEPS = 5
"""Flat steps in a row that are an alarm, where the arguments do not say how many."""
# Arguments whose present values stand in lines.
_SHOWN = {
    *("max_completion_length", "temperature", "num_generations", "num_generations_eval"),
    *(name for rule in RULES.values() for name in re.findall(r"\{(\w+)\}", rule.change)),
}


@dataclass(frozen=True)
class Alarm:
    """What was said once.

    Attributes:
        step: At which.
        code: As `perl explain` knows it.
        name: Of the rule.
        value: Of its statistic; None: not finite.
        limit: Where that is an alarm.
        line: The whole line.
        stopped: Whether it ends the training.
    """

    step: int
    code: str
    name: str
    value: float | None
    limit: float | None
    line: str
    stopped: bool = False


class HealthAlarms(RunCallback):
    """Warns of what is unhealthy about a training, says it again each time its steps have doubled, and may end it.

    ``PeftGRPOTrainer`` adds one by itself, unless it is given one in ``callbacks``. It works with TRL's ``GRPOTrainer``
    too; what a trainer does not log is not judged. A resumed training goes on where it was: what was said is not said
    again, since the log in the checkpoint is read again.

    Example:
        ``PeftGRPOTrainer(..., callbacks=[HealthAlarms(stop=["kl_explosion"])])``

    Attributes:
        raised: All alarms of the training, those before it was resumed too; on the main process.
        stopped: The one that has ended it; None: none has.
    """

    def __init__(
        self,
        stop: Sequence[str] = (),
        folder: str | Path | None = None,
        *,
        flat_reward_steps: int | None = None,
    ) -> None:
        """Nothing is known yet.

        Args:
            stop: Names of alarms that end the training, with a checkpoint.
            folder: Where ``alarms.jsonl`` goes, a JSON object an alarm; None: the trainer's ``output_dir``.
            flat_reward_steps: Steps in a row in which no group's rewards differ that are an alarm; 0: never; None: as
                the arguments say, else 5.

        Raises:
            RecipeError: There is no alarm of a name; says the nearest.
        """
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
        for name in self.stop:
            if name not in RULES:
                raise RecipeError(f"no alarm {name!r}", "HealthAlarms(stop)", did_you_mean(str(name), RULES))
        self.raised: list[Alarm] = []
        self.stopped: Alarm | None = None
        self._given, self._flat_reward_steps = folder, flat_reward_steps
        self._path, self._setup, self._processes = Path(FILE), AlarmSetup(), Processes()
        self._named: Callable[[str], str] = as_in_a_script
        self._judge = Judge(RULES.values(), 0)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **given: Any) -> None:  # noqa: ANN401
        """Reads what was logged before the training was resumed.

        Raises:
            AlarmError: It was resumed from the checkpoint with which an alarm has ended it, and that alarm still may.
        """
        super().on_train_begin(args, state)
        self.raised, self.stopped = [], None
        self._path = folder_of(args, self._given) / FILE
        self._named = _named_in(args)
        self._setup = self._setup_of(args, given.get("model"))
        if FLAT in self.stop and not self._setup.flat_steps:
            what = f"{FLAT} can end no training here: it is never raised"
            raise RecipeError(
                what, "alarms.stop", "leave it out, or a flat_reward_steps above 0 and no FlatRewards beside"
            )
        self._judge = Judge(RULES.values(), 0 if state.log_history else state.global_step)
        self._processes = joined() if self.stop else Processes()
        reopened(self._path, state)
        if state.is_world_process_zero:
            for logs in state.log_history:
                if logs.get("step", 0) <= state.global_step:
                    self._judged(logs["step"], logs)
            self._judge.over.clear()
        now = state.global_step
        ended = self._decided([alarm for alarm in self.raised if alarm.stopped and alarm.step == now])
        if ended is not None:
            raise self.error(ended)

    def on_log(self, _: object, state: TrainerState, control: TrainerControl, logs: Logs = None, **__: object) -> None:
        """Judges a step, or an evaluation; asks for a checkpoint and the end where an alarm is to end the training."""
        if not logs:
            return
        begin = len(self.raised)
        if state.is_world_process_zero:
            self._judged(state.global_step, logs)
            _say_over(self._judge)
            sign = truncated_at_once(self._judge.history) if "loss" in logs else None
            if sign is not None:
                rule = RULES["completions_truncated"]
                logger.warning("%s", self._named(rule.line(sign, self._setup)), extra={"code": rule.code})
        new = self.raised[begin:]
        for alarm in new:
            logger.warning("%s", alarm.line, extra={"code": alarm.code})
            append_row(self._path, asdict(alarm))
        found = self._decided([alarm for alarm in new if alarm.stopped])
        if found is not None:
            self.stopped = self.stopped or found
            control.should_save = True
            control.should_training_stop = True

    def _decided(self, found: list[Alarm]) -> Alarm | None:
        """The first of some alarms of the main process, which judges, for all; None: there is none."""
        return self._processes.by_main(lambda: found[0] if found else None) if self.stop else None

    def error(self, alarm: Alarm) -> AlarmError:
        """The error of a training that an alarm has ended."""
        hint = f"start anew with what it says; without {alarm.name} in alarms.stop the same command goes on"
        what = f"the alarm {alarm.name} has ended the training after step {alarm.step}, with a checkpoint: {alarm.line}"
        return AlarmError(what, "alarms.stop", self._named(hint))

    def _judged(self, step: int, logs: Mapping[str, Any]) -> None:
        """Adds to ``raised`` what is to be said of a log."""
        for rule, found in self._judge.due(step, logs, self._setup):
            sign = _with_completion(rule, found, self._judge, self._setup, self.trainer) if rule.name == FLAT else found
            value = sign.value if math.isfinite(sign.value) else None
            line, ends = self._named(rule.line(sign, self._setup)), rule.name in self.stop
            self.raised.append(Alarm(step, rule.code, rule.name, value, rule.limit_of(sign), line, ends))

    def _setup_of(self, args: TrainingArguments, model: nn.Module | None) -> AlarmSetup:
        """What the rules need to know of a run's settings."""
        trainer, rate, flat_steps = self.trainer, None, self._flat_reward_steps
        # The rate that is usual for what is trained; None: it is not known, or nothing is reinforced.
        if model is not None and isinstance(args, GRPOConfig):
            method = _method_of(model) if trainer is None else trainer.adaptation.method
            config = getattr(model, "config", None)
            text = config if config is None else getattr(config, "get_text_config", lambda: config)()
            rate = usual_rate(method.learning_rate, getattr(text, "hidden_size", None)) if method else None
        if flat_steps is None:
            flat_steps = getattr(args, "flat_reward_steps", FLAT_STEPS)
            # Rewards that do not differ teach nothing, but a teacher does; and a user's own callback may say it.
            if trainer is not None and (
                any(isinstance(callback, FlatRewards) for callback in trainer.callback_handler.callbacks)
                or (teacher_section(args).acts and not is_rewarded(trainer))
            ):
                flat_steps = 0
        return AlarmSetup(
            usual_rate=rate,
            by_sequence=str(getattr(args, "importance_sampling_level", "")).startswith("sequence"),
            waits=getattr(args, "critic_warmup_steps", 0),
            flat_steps=flat_steps,
            compares=trainer is None or compares_groups(args),
            masks_truncated=bool(getattr(args, "mask_truncated_completions", False)),
            values={name: getattr(args, name, None) for name in sorted(_SHOWN)},
        )


class FlatRewards(RunCallback):
    """Says one of the alarms alone: why nothing is learned from rewards that do not differ within any group.

    Works with ``PeftGRPOTrainer`` and with TRL's ``GRPOTrainer``; the alarms of a ``PeftGRPOTrainer`` that is given one
    leave this to it. A resumed run counts anew.
    """

    def __init__(self, after_steps: int = 5) -> None:
        """Waits for flat steps.

        Args:
            after_steps: How many in a row are a warning; 0: never warn.

        Raises:
            RecipeError: ``after_steps`` is not a number of steps.
        """
        if not isinstance(after_steps, int) or isinstance(after_steps, bool) or after_steps < 0:
            raise RecipeError(f"must be a whole number of steps, not {after_steps!r}", "FlatRewards(after_steps)")
        self.after_steps = after_steps
        self._judge = Judge([RULES[FLAT]], 0)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        """Begins to count."""
        super().on_train_begin(args, state)
        self._judge = Judge([RULES[FLAT]], state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, _: object, logs: Logs = None, **__: object) -> None:
        """Counts the steps that were logged."""
        if not state.is_world_process_zero or not logs:
            return
        values = {name: getattr(args, name, None) for name in _SHOWN}
        compares = self.trainer is None or compares_groups(args)
        setup = AlarmSetup(flat_steps=self.after_steps, compares=compares, values=values)
        for rule, sign in self._judge.due(state.global_step, logs, setup):
            found = _with_completion(rule, sign, self._judge, setup, self.trainer)
            logger.warning("%s", _named_in(args)(rule.line(found, setup)), extra={"code": rule.code})
        _say_over(self._judge)


def _with_completion(rule: Rule, sign: Sign, judge: Judge, setup: AlarmSetup, trainer: Any) -> Sign:  # noqa: ANN401
    """A sign of flat rewards with a typical one of the newest completions, where the trainer is ours."""
    newest = [] if trainer is None else trainer.latest_completions()
    return rule.judge(judge.history, replace(setup, completion=typical(newest))) or sign


def compares_groups(args: TrainingArguments) -> bool:
    """Whether equal rewards of a group make no advantage; with a critic or a baseline of the batch they do."""
    return ADVANTAGES[own_setting(args, "advantage_estimator")].flat == "0"


def _method_of(model: nn.Module) -> Method | None:
    """The first method of the table with the config of a model's adapter; None: there is none."""
    if not isinstance(model, PeftModel):
        return METHODS["full"]
    kinds = {type(config).__name__ for config in model.peft_config.values()}
    return next((row for row in METHODS.values() if row.config in kinds), None)


def _named_in(args: TrainingArguments) -> Callable[[str], str]:
    """Settings of a line by a recipe's keys, or by the names that a script has for them."""
    return str if getattr(args, "of_a_recipe", False) else as_in_a_script


def _say_over(judge: Judge) -> None:
    for line in judge.over:
        logger.info("%s", line)
    judge.over.clear()
