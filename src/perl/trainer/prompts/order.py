"""The order of prompts, the same whether or not the run was interrupted.

data set -> indices
"""

from collections.abc import Callable, Iterator

import torch
from trl.trainer.utils import RepeatSampler


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
        """See :class:`EpochSampler`; none where the order depends on no seed."""
        order = list(range(self.num_samples))
        if self.shuffle:
            if self.seed is None:
                return
            generator = torch.Generator()
            generator.manual_seed(self.seed)
            for _ in range(epoch + 1):
                drawn = torch.randperm(self.num_samples, generator=generator)
            order = drawn.tolist()
        for batch in range(self.batches):
            chosen = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield [index for index in chosen for _ in range(self.mini_repeat_count)]
