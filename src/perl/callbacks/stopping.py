"""An orderly stop, on Ctrl-C, SIGTERM or a reward that fails too often: a last step, a checkpoint, no more."""

import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from perl.rewards.own import Failures

logger = logging.getLogger("perl")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Outside of training SIGTERM does what Ctrl-C does: it raises KeyboardInterrupt where the program stands."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class OrderlyStop(TrainerCallback):
    """Ends training after the step in which a signal came or a reward failed once too often.

    A second signal stops at once.

    Attributes:
        requested: Whether training is to end.
        failed: The reward that failed too often; on another process of the run than the one where it did, None.
    """

    def __init__(self, failures: Sequence[Failures] = ()) -> None:
        """Nothing has happened.

        Args:
            failures: Of the reward functions that may fail.
        """
        self.requested = False
        self.failed: Failures | None = None
        self._failures = tuple(failures)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles signals inside the block; only the main thread can, elsewhere they stay as they are."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def on_step_end(
        self,
        _args: TrainingArguments,
        _state: TrainerState,
        control: TrainerControl,
        **_: Any,  # noqa: ANN401
    ) -> None:
        """Asks for a checkpoint and the end of training, on all processes at the same step."""
        self.failed = next((failures for failures in self._failures if failures.too_many), None)
        self.requested = self.requested or self.failed is not None
        if self._requested_anywhere():
            self.requested = True
            control.should_save = True
            control.should_training_stop = True

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        logger.warning("stopping after this step, with a checkpoint (again: stop now and lose the step)")

    def _requested_anywhere(self) -> bool:
        if not torch.distributed.is_initialized():
            return self.requested
        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        flag = torch.tensor(float(self.requested), device=device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return bool(flag.item())
