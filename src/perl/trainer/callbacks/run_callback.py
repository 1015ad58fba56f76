"""What the public callbacks share: one of a kind in a trainer, each told which trainer it serves.

trainer, its callbacks -> each callback bound, or one line that says what is wrong

:class:`PeftGRPOTrainer` binds them when it is made and when it trains. TRL's and transformers' own trainers do not:
there a callback has what every callback is given.
"""

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerState, TrainingArguments
from transformers.trainer_callback import TrainerCallback
from trl import GRPOTrainer

from perl.errors import RecipeError
from perl.run.logs import rewind_log

Logs = Mapping[str, Any] | None

_WHERE = "callbacks"
_IN_STATE = "_perl_callbacks"  # of a training: each begins with a state of its own


class RunCallback(TrainerCallback):
    """A callback of ours that a script may add to its trainer.

    Attributes:
        needs_ours: Whether it works with :class:`perl.PeftGRPOTrainer` only, and why.
        by_default: Whether the trainer has added it by itself; a user's own takes its place.
    """

    needs_ours = ""
    by_default = False

    _serves: "weakref.ref[GRPOTrainer] | None" = None

    def serve(self, trainer: GRPOTrainer) -> None:
        """Binds it to the trainer that it is a callback of.

        Raises:
            RecipeError: It serves another one.
        """
        mine = self.trainer
        if mine is not None and mine is not trainer:
            raise RecipeError(f"this {self} serves another trainer already", _WHERE, "make one for each trainer")
        self._serves = weakref.ref(trainer)

    @property
    def trainer(self) -> Any:  # noqa: ANN401 (a PeftGRPOTrainer, of which this module knows nothing)
        """The trainer that it serves; None: nothing has bound it."""
        return None if self._serves is None else self._serves()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **given: Any) -> None:  # noqa: ANN401, ARG002 (transformers')
        """Refuses a trainer that it cannot serve, and a second one of its kind.

        Raises:
            RecipeError: Says which.
        """
        if self.needs_ours and self.trainer is None:
            raise RecipeError(f"{self} needs perl.PeftGRPOTrainer: {self.needs_ours}", _WHERE)
        present: dict[type, RunCallback] = state.__dict__.setdefault(_IN_STATE, {})
        if present.setdefault(self.kind, self) is not self:
            raise _twice(self)

    @property
    def kind(self) -> type["RunCallback"]:
        """The public class that it is, or is derived from: a trainer has one of a kind."""
        return next(base for base in type(self).__mro__ if base.__bases__ == (RunCallback,))

    def __str__(self) -> str:
        """Its public name."""
        return self.kind.__name__


def bind_callbacks(trainer: GRPOTrainer) -> None:
    """Binds a trainer's public callbacks to it.

    Raises:
        RecipeError: Two are of a kind, or one serves another trainer or cannot serve this one.
    """
    seen: dict[type, RunCallback] = {}
    for callback in list(trainer.callback_handler.callbacks):  # one may take another's place
        if isinstance(callback, RunCallback):
            other = seen.setdefault(callback.kind, callback)
            if other is not callback:
                if not other.by_default:
                    raise _twice(callback)
                trainer.remove_callback(other)
            callback.serve(trainer)


def _twice(callback: RunCallback) -> RecipeError:
    return RecipeError(f"there are two {callback}", _WHERE, "one is enough: leave the other out")


def check_every(every: int, where: str) -> None:
    """Refuses what is no number of steps.

    Raises:
        RecipeError: Says where it stands.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise RecipeError(f"must be a whole number of at least 1, not {every!r}", where)


def folder_of(args: TrainingArguments, folder: str | Path | None) -> Path:
    """Where a callback keeps its files: the folder that it was given, else the trainer's ``output_dir``."""
    return Path(str(args.output_dir) if folder is None else folder)


def reopened(log: Path, state: TrainerState) -> None:
    """A log at the begin of a training: a run that goes on keeps the lines of the steps before, a new one has none."""
    if not state.is_world_process_zero:
        return
    if state.global_step:
        rewind_log(log, state.global_step)
    else:
        log.unlink(missing_ok=True)
