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
