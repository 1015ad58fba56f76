"""LookAhead: which generation batches may be sampled before their step, so that none gets too old.

data loader, prompts of later epochs, bound -> the examples of the next generation batch, or none yet

The age of a rollout is counted in optimizer steps: those that were taken between the policy that sampled it and the
policy that the update that trains on it begins with. A generation batch that several updates train on is as old as it
is for the last of them.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from perl.rollouts.engine import Sampled
from perl.trainer.live import LiveTrainer, Position, generation_interval

Inputs = list[dict[str, Any]]


@dataclass(frozen=True)
class LaterPrompts:
    """Prompts of epochs that have not begun.

    Attributes:
        batches: Generation batches of an epoch, at least 1.
        of_epoch: The examples of each, one for each completion that this process samples, by the epoch's number.
    """

    batches: int
    of_epoch: Callable[[int], Iterator[Inputs]]


class LookAhead:
    """Reads the data loader ahead, beyond the end of its epoch too. Samples nothing itself."""

    def __init__(
        self,
        live: LiveTrainer,
        position: Position,
        *,
        prefetch: int,
        bound: int | None,
        later: Callable[[], LaterPrompts | None] = lambda: None,
    ) -> None:
        """Has read nothing yet.

        Args:
            live: The training.
            position: Where it is among its micro-batches.
            prefetch: Generation batches that are sampled ahead, at most.
            bound: Age of rollouts in optimizer steps, at most; None: what prefetch gives.
            later: Gives the prompts of epochs that have not begun, when they are needed; None: they are not known.
        """
        self._live, self._position, self._find_later = live, position, later
        self._prefetch, self._bound = prefetch, bound
        self.clear()

    def clear(self) -> None:
        """Forgets what was read: another training begins."""
        self._iterator: Iterator[Any] | None = None
        self._upcoming: list[Inputs] = []  # read of the data loader, and not given yet
        self._in_sight: list[Inputs] = []  # for each micro-batch from the begin of the current step
        self._begin, self._epoch_end, self._ended = 0, math.inf, False
        self._beyond: Iterator[Inputs] = iter(())
        self._peeked: list[Inputs] = []  # of the generation batches after the epoch

    def window(self, epoch_iterator: Iterator[Any], num_batches: int) -> Iterator[Any]:
        """What an optimizer step takes from the data loader.

        Args:
            epoch_iterator: The data loader's.
            num_batches: Micro-batches of the step.
        """
        if self._iterator is not epoch_iterator:  # of another epoch
            self.clear()
            self._iterator = epoch_iterator
        wanted = num_batches + self._every * self._prefetch
        missing = max(0, wanted - len(self._upcoming))
        self._upcoming += itertools.islice(epoch_iterator, missing)
        self._ended |= len(self._upcoming) < wanted
        self._begin = self._position.micro_batch
        self._epoch_end = len(self._upcoming) if self._ended else math.inf
        after = wanted - len(self._upcoming)  # micro-batches after the end of the epoch
        self._in_sight = list(self._upcoming)
        if after > 0 and self._later is not None:
            if not self._peeked:
                epochs = itertools.count(int(self._live.state.epoch or 0) + 1)
                self._beyond = itertools.chain.from_iterable(map(self._later.of_epoch, epochs))
            batches = -(-after // self._every)
            self._peeked += itertools.islice(self._beyond, max(0, batches - len(self._peeked)))
            self._in_sight += [inputs for inputs in self._peeked for _ in range(self._every)][:after]
        now, self._upcoming = self._upcoming[:num_batches], self._upcoming[num_batches:]
        return iter(now)

    def next_inputs(self, begun: int) -> Inputs | None:
        """The examples of the first generation batch that is not begun; None: it must wait, or there is none.

        Args:
            begun: Generation batches that are begun already, after the one that is trained on.
        """
        if begun >= self._prefetch:
            return None
        first = (self._position.micro_batch // self._every + 1 + begun) * self._every - self._begin
        if first >= len(self._in_sight):
            return None
        state = self._live.state
        if state.global_step + self._updates_before(first) >= state.max_steps:
            return None
        if self._bound is not None and self._updates_before(first + self._every - 1) > self._bound:
            return None
        return self._in_sight[first]

    @cached_property
    def _later(self) -> LaterPrompts | None:
        return self._find_later()

    @property
    def _every(self) -> int:
        """Micro-batches between two generation batches."""
        return generation_interval(self._live.args)

    def _updates_before(self, index: int) -> int:
        """Optimizer steps from the current one to that of a micro-batch.

        Args:
            index: Of the micro-batch, from the begin of the current step. Each epoch's last step may be a shorter one.
        """
        accumulation = self._live.args.gradient_accumulation_steps
        if index < self._epoch_end or self._later is None:
            return index // accumulation
        end, of_epoch = int(self._epoch_end), self._later.batches * self._every
        epochs, rest = divmod(index - end, of_epoch)
        return -(-end // accumulation) + epochs * -(-of_epoch // accumulation) + rest // accumulation


class TokenSteps:
    """Of the latest completions. Several updates may have written one: of requests that continue, or of turns.

    Attributes:
        latest: By completion and token.
    """

    def __init__(self) -> None:
        """Knows no update yet."""
        self._step_of: dict[str, int] = {}
        self.latest: list[list[int]] = []

    def take(self, latest: Sequence[Sequence[int]]) -> None:
        """Completions that were put together of several requests: the steps of their tokens."""
        self.latest = [list(steps) for steps in latest]

    def loaded(self, name: str, step: int) -> None:
        """An update is of the policy after so many optimizer steps."""
        self._step_of[name] = step

    def note(self, sampled: Sequence[Sampled], step: int) -> list[int]:
        """Takes completions; the steps of all their tokens.

        Args:
            sampled: In the order of the prompts.
            step: Of the update that they were begun with, for tokens of one that is not known by its name.
        """
        self.latest = []
        for one in sampled:
            versions = one.versions or (one.version,) * len(one.token_ids)
            self.latest.append([self._step_of.get(version, step) for version in versions])
        return [step for steps in self.latest for step in steps]

    def column(self, completion_ids: torch.Tensor, now: int) -> torch.Tensor:
        """(N, T) int64, of the latest completions.

        Args:
            completion_ids: (N, T), as TRL pads them.
            now: Optimizer steps that the policy has taken.
        """
        steps_NT = torch.full_like(completion_ids, now)
        if len(self.latest) == len(steps_NT):
            for row_T, steps in zip(steps_NT, self.latest, strict=True):
                row_T[: len(steps)] = row_T.new_tensor(steps)
        return steps_NT
