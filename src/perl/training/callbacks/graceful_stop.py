"""A graceful stop, on Ctrl-C, SIGTERM or a reward that fails too often: a last step, a checkpoint, no more."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from perl.errors import warn
from perl.recipe.recipe import is_first_process
from perl.rewards.custom import Failures
from perl.run.host import handled, host
from perl.trainer.callbacks.run_callback import RunCallback

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulStop(RunCallback):
    """Ends training after the step in which a signal came, with a checkpoint; a second signal stops at once.

    Works with any trainer of transformers or TRL, on every process. ``train()`` then returns as after the last step,
    and ``requested`` says why; ``train(resume_from_checkpoint=True)`` goes on.

    Example:
        ``stop = GracefulStop()``; ``PeftGRPOTrainer(..., callbacks=[stop]).train()``; ``if stop.requested: ...``

    Attributes:
        requested: Whether training is to end.
        failed: Which of the rewards failed too often, on this process or another, by position; None: none did.
    """

    def __init__(self, failures: Sequence[Failures] = ()) -> None:
        """Nothing has happened.

        Args:
            failures: Of the reward functions that may fail, where somebody counts them; as many on each process.
        """
        self.requested = self._heard = False
        self.failed: int | None = None
        self._leaves = False
        self._failures = tuple(failures)
        self._listens = False
        self._before: dict[int, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles signals inside the block; only the main thread can, elsewhere they stay as they are."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._listens = True
        try:
            with handled(_SIGNALS, self._on_signal):
                yield
        finally:
            self._listens = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        """Handles signals from now on, where nobody has asked for a block of code."""
        super().on_train_begin(args, state)
        if self._listens:
            return
        self.requested, self._heard, self.failed = False, False, None
        self._restore()  # where an error has ended the training before
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before |= {number: signal.signal(number, self._on_signal_of_script) for number in heard}

    def on_train_end(self, *_: object, **__: object) -> None:
        """Signals are handled as before."""
        self._restore()

    def on_step_end(self, _: object, __: object, control: TrainerControl, **___: object) -> None:
        """Requests a checkpoint and the end of training, on all processes at the same step.

        A node that is about to go, as a host may know, asks for the checkpoint alone, once.
        """
        known = self._leaves
        if self.look():
            control.should_save = True
            control.should_training_stop = True
        if self._leaves and not known:
            control.should_save = True

    def look(self) -> bool:
        """Whether training is to end, as all processes see it; each must ask at the same time."""
        too_many = [position for position, failures in enumerate(self._failures) if failures.too_many]
        asked = self.requested or host().stop_asked()
        highest = torch.tensor([int(asked), 1 + (too_many[0] if too_many else -1), int(host().leaves())])
        if torch.distributed.is_initialized():
            highest = highest.to("cuda" if torch.distributed.get_backend() == "nccl" else "cpu")
            torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX)
        requested, failed, leaves = map(int, highest.tolist())
        self._leaves = leaves > 0
        self.failed = failed - 1 if failed else None
        self.requested = bool(requested) or failed > 0
        return self.requested

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._heard:  # a signal that comes after another process has asked for the end is this one's first
            raise KeyboardInterrupt
        first, self.requested, self._heard = not self.requested, True, True
        if first and is_first_process():  # all have been asked
            warn("PRL313", "stopping after this step, with a checkpoint (again: stop now and lose the step)")

    def _on_signal_of_script(self, number: int, frame: FrameType | None) -> None:
        """As :meth:`_on_signal`, unless an error has ended the training: no event tells a callback of that."""
        above = frame
        while above is not None:
            if above.f_code is Trainer.train.__code__:  # is under way
                self._on_signal(number, frame)
                return
            above = above.f_back
        self._restore()
        signal.raise_signal(number)  # to whom it would have gone

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # Somebody else's, or of something that is not Python's (None), stays.
            if signal.getsignal(number) == self._on_signal_of_script and handler is not None:
                signal.signal(number, handler)
        self._before = {}
