"""The order of prompts, the same whether or not the run was interrupted; of epochs that have not begun, too.

data set -> indices; chances, seed -> indices of laps; sampler, data -> examples of a later epoch
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from perl.trainer.sampling.rollouts_ahead import LaterPrompts


class EpochSampler(RepeatSampler):
    """TRL's sampler, which can begin in any epoch."""

    def __init__(self, sampler: RepeatSampler, epoch_of: Callable[[], int]) -> None:
        """Takes TRL's sampler and a function that gives the number of the epoch to start in."""
        super().__init__(
            data_source=sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )
        self.epoch_of = epoch_of

    @property
    def batches(self) -> int:
        """Generation batches of an epoch."""
        return int(self.num_samples // self.batch_size)

    def batches_of(self, epoch: int) -> Iterator[list[int]]:
        """The indices of each generation batch of an epoch, one for each completion; the sampler does not move.

        Args:
            epoch: Its number, of one that may not have begun.
        """
        raise NotImplementedError


class ResumableRepeatSampler(EpochSampler):
    """TRL's order of prompts, the same in every epoch whether or not the epochs before it were walked through.

    TRL draws one permutation an epoch from one generator; a resumed run would begin with the first again.
    """

    def __iter__(self) -> Iterator[int]:
        """The indices of the epoch to start in."""
        if self.shuffle and self.seed is not None:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch_of()):
                torch.randperm(self.num_samples, generator=self.generator)
        yield from super().__iter__()

    def batches_of(self, epoch: int) -> Iterator[list[int]]:
        """See :class:`EpochSampler`; the order must depend on a seed."""
        order = list(range(self.num_samples))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed)
            for _ in range(epoch + 1):
                drawn = torch.randperm(self.num_samples, generator=generator)
            order = drawn.tolist()
        for batch in range(self.batches):
            chosen = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield [index for index in chosen for _ in range(self.mini_repeat_count)]


def later_prompts(trainer: GRPOTrainer) -> LaterPrompts | None:
    """Of a trainer's data; None where its order is not known before: a stream, a subclass's sampler, no seed."""
    if not hasattr(trainer.train_dataset, "__getitem__"):
        return None
    sampler = trainer._get_train_sampler(trainer.train_dataset)
    if not isinstance(sampler, EpochSampler) or not sampler.batches or (sampler.shuffle and sampler.seed is None):
        return None
    known = sampler
    process, processes = trainer.accelerator.process_index, trainer.accelerator.num_processes

    def of_epoch(epoch: int) -> Iterator[list[dict[str, Any]]]:
        for indices in known.batches_of(epoch):
            # Each process takes the rows that accelerate gives it of a generation batch.
            each = len(indices) // processes
            own = indices[process * each : (process + 1) * each]
            rows = {index: trainer.train_dataset[index] for index in dict.fromkeys(own)}
            yield trainer.data_collator([rows[index] for index in own])

    return LaterPrompts(known.batches, of_epoch)


Floats = NDArray[np.float64]


@dataclass
class Walk:
    """A walk that depends on its seed, what it is given and how far it is, and on nothing else.

    Attributes:
        size: Prompts of the data.
        seed: Of its laps.
        shuffled: Whether a lap goes through the data in an order of its own; else in that of the data.
        lap: Number of the lap that it is in.
        place: Prompts of this lap that are behind it.
    """

    size: int
    seed: int
    shuffled: bool = True
    lap: int = 0
    place: int = 0
    _drawn: tuple[int, NDArray[np.int64], Floats] | None = field(default=None, repr=False)

    def take(self, count: int, chance_N: Floats, without: Collection[int] = ()) -> list[int]:
        """The next prompts, no two the same.

        A prompt whose number of the lap, uniform in [0, 1), is not below its chance rests in this lap; so does one that
        the same call has taken in the lap before. Where a lap and
        the rest of the one before do not give enough, those that rest are drawn too, the likeliest first.

        Args:
            count: How many; fewer are given where there are fewer.
            chance_N: Of each prompt to be drawn in a lap, 0 to 1; 0: it cannot be drawn.
            without: Prompts that are not wanted now.
        """
        taken: list[int] = []
        unwanted = np.zeros(self.size, bool)
        unwanted[list(without)] = True
        for _ in range(2):
            order_N, uniform_N = self._of_lap()
            ahead = order_N[self.place :]
            fit = np.flatnonzero((uniform_N[ahead] < chance_N[ahead]) & ~unwanted[ahead])[: count - len(taken)]
            taken += ahead[fit].tolist()
            unwanted[taken] = True
            if len(taken) == count:
                self.place += int(fit[-1]) + 1 if len(fit) else 0
                return taken
            self.lap, self.place = self.lap + 1, 0
        order_N, _ = self._of_lap()
        resting = order_N[~unwanted[order_N] & (chance_N[order_N] > 0)]
        likeliest = np.argsort(-chance_N[resting], kind="stable")[: count - len(taken)]
        return taken + resting[likeliest].tolist()

    def _of_lap(self) -> tuple[NDArray[np.int64], Floats]:
        """The order of this lap, and each prompt's number in it."""
        if self._drawn is None or self._drawn[0] != self.lap:
            random = np.random.default_rng([self.seed, self.lap])
            order_N = random.permutation(self.size)
            self._drawn = self.lap, order_N if self.shuffled else np.arange(self.size), random.random(self.size)
        return self._drawn[1:]

    def state(self) -> dict[str, int]:
        """How far it is."""
        return {"lap": self.lap, "place": self.place}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes where :meth:`state` was taken."""
        self.lap, self.place = state["lap"], state["place"]
