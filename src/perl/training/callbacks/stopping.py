"""An orderly stop, on Ctrl-C, SIGTERM or a reward that fails too often: a last step, a checkpoint, no more."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl

from perl.recipe.recipe import is_first_process
from perl.rewards.custom import Failures
from perl.run.signals import handled
from perl.run.warned import warn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class OrderlyStop(TrainerCallback):
    """Ends training after the step in which a signal came or a reward failed once too often.

    A second signal stops at once.

    Attributes:
        requested: Whether training is to end.
        failed: Which of the rewards failed too often, on this process or another, by position; None: none did.
    """

    def __init__(self, failures: Sequence[Failures] = ()) -> None:
        """Nothing has happened.

        Args:
            failures: Of the reward functions that may fail; as many on each process.
        """
        self.requested = False
        self.failed: int | None = None
        self._failures = tuple(failures)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles signals inside the block; only the main thread can, elsewhere they stay as they are."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with handled(_SIGNALS, self._on_signal):
            yield

    def on_step_end(self, _: Any, __: Any, control: TrainerControl, **___: Any) -> None:  # noqa: ANN401 (transformers')
        """Requests a checkpoint and the end of training, on all processes at the same step."""
        if self.look():
            control.should_save = True
            control.should_training_stop = True

    def look(self) -> bool:
        """Whether training is to end, as all processes see it; each must ask at the same time."""
        too_many = [position for position, failures in enumerate(self._failures) if failures.too_many]
        requested, failed = _highest(int(self.requested), 1 + (too_many[0] if too_many else -1))
        self.failed = failed - 1 if failed else None
        self.requested = bool(requested) or failed > 0
        return self.requested

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if is_first_process():  # all have been asked
            warn("PRL313", "stopping after this step, with a checkpoint (again: stop now and lose the step)")


def _highest(*numbers: int) -> list[int]:
    """The highest of each number over all processes."""
    if not torch.distributed.is_initialized():
        return list(numbers)
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    highest = torch.tensor(numbers, device=device)
    torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX)
    return [int(number) for number in highest.tolist()]
