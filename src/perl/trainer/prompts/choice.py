"""PromptChoice: of which prompts each generation batch is, where they are not taken as they come.

walk, memory, curriculum -> the indices of a generation batch; its rewards -> memory

Every process makes the same choice: it depends on the seed, the number of the generation batch, and rewards that all
processes have seen.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from trl.trainer.utils import RepeatSampler

from perl.errors import BrokenPromiseError
from perl.trainer.live import generation_interval
from perl.trainer.prompts.chances import Curriculum, PromptMemory, PromptOutcome
from perl.trainer.prompts.order import EpochSampler, Floats, Walk

# Generation batches whose replacements can be found again: more than one optimizer step has.
_KEPT = 64
# Of the walk that replacements come from, so that it is another one than that of the batches.
_OTHER_SEED = 7_919


class PromptChoice:
    """Chooses prompts, remembers what they gave, and is kept in checkpoints.

    Attributes:
        memory: Of each prompt; None: all count alike.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        *,
        shuffled: bool,
        memory: PromptMemory | None = None,
        curriculum: Curriculum | None = None,
        progress: Callable[[int], float] = lambda _: 1.0,
    ) -> None:
        """Has chosen nothing yet.

        Args:
            size: Prompts of the data.
            seed: Of the training.
            shuffled: Whether they come in a random order.
            memory: What is remembered of them.
            curriculum: Which may be drawn, from easy to hard; None: all.
            progress: Share of the training that is behind at a generation batch.
        """
        self.memory, self._curriculum, self._progress = memory, curriculum, progress
        self._walk = Walk(size, seed, shuffled)
        self._others = Walk(size, seed + _OTHER_SEED)
        self._chosen: dict[int, list[int]] = {}
        self._others_at: dict[int, dict[str, int]] = {}

    def chosen(self, batch: int, count: int) -> list[int]:
        """The prompts of a generation batch, the same whenever it is asked.

        Args:
            batch: Number of the generation batch, from 0.
            count: Prompts in it.

        Raises:
            BrokenPromiseError: Rewards that the choice depends on were not seen, or there are too few prompts.
        """
        if batch not in self._chosen:
            chance_N = self._allowed(batch)
            if self.memory is not None:
                chance_N = chance_N * self.memory.chances(batch)
            self._chosen[batch] = self._walk.take(count, chance_N)
            if len(self._chosen[batch]) < count:
                raise BrokenPromiseError(
                    f"generation batch {batch} needs {count} prompts, {len(self._chosen[batch])} fit"
                )
        return self._chosen[batch]

    def begin_batch(self, batch: int) -> None:
        """A generation batch begins, or begins again: its replacements are then the same."""
        if batch in self._others_at:
            self._others.restore(self._others_at[batch])
        known = {number: at for number, at in self._others_at.items() if batch - _KEPT < number < batch}
        self._others_at = known | {batch: self._others.state()}

    def replacements(self, batch: int, count: int, without: Collection[int]) -> list[int]:
        """Prompts in the place of some of a generation batch; fewer where there are fewer.

        Args:
            batch: Number of the generation batch.
            count: How many.
            without: Prompts that are not wanted: those that it has.
        """
        chance_N = self._allowed(batch)
        if self.memory is not None:
            chance_N = chance_N * self.memory.latest()
        return self._others.take(count, chance_N, without)

    def forget_before(self, batch: int) -> None:
        """Drops what was chosen for generation batches that no data loader reads again."""
        self._chosen = {number: chosen for number, chosen in self._chosen.items() if number >= batch}

    def note(self, batch: int, seen: Sequence[PromptOutcome]) -> dict[str, float]:
        """Remembers what a generation batch has shown; gives what is logged of that."""
        if self.memory is None:
            return {}
        self.memory.note(batch, seen)
        return {f"prompts/{name}": share for name, share in self.memory.shares().items()}

    def begin(self) -> None:
        """A training begins, with its first generation batch."""
        self._chosen.clear()
        self._others_at.clear()
        for walk in (self._walk, self._others):
            walk.restore({"lap": 0, "place": 0})
        if self.memory is not None:
            self.memory.begin()

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "walks": [self._walk.state(), self._others.state()],
            "others_at": {str(batch): state for batch, state in self._others_at.items()},
            "chosen": {str(batch): list(chosen) for batch, chosen in self._chosen.items()},
            "memory": None if self.memory is None else self.memory.state(),
            "size": self._walk.size,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on as :meth:`state` was taken.

        Raises:
            BrokenPromiseError: It is of other data.
        """
        if state["size"] != self._walk.size:
            raise BrokenPromiseError(f"the checkpoint chose among {state['size']} prompts, here are {self._walk.size}")
        for walk, kept in zip((self._walk, self._others), state["walks"], strict=True):
            walk.restore(kept)
        self._chosen = {int(batch): list(chosen) for batch, chosen in state["chosen"].items()}
        self._others_at = {int(batch): dict(at) for batch, at in state["others_at"].items()}
        if self.memory is not None and state["memory"] is not None:
            self.memory.restore(state["memory"])

    def _allowed(self, batch: int) -> Floats:
        if self._curriculum is None:
            return np.ones(self._walk.size)
        return self._curriculum.allowed(self._progress(batch)).astype(np.float64)


class ChosenPrompts(EpochSampler):
    """TRL's sampler, whose generation batches are chosen instead of cut from a permutation; as many an epoch."""

    def __init__(self, sampler: RepeatSampler, epoch_of: Callable[[], int], choice: PromptChoice) -> None:
        """Takes TRL's sampler, what gives the number of the epoch to start in, and what chooses."""
        super().__init__(sampler, epoch_of)
        self._choice = choice

    def __iter__(self) -> Iterator[int]:
        """The indices of the epoch to start in."""
        epoch = self.epoch_of()
        self._choice.forget_before(epoch * self.batches)
        for indices in self.batches_of(epoch):
            for _ in range(self.repeat_count):
                yield from indices

    def batches_of(self, epoch: int) -> Iterator[list[int]]:
        """See :class:`EpochSampler`; drawn when it is asked for, after all generation batches before it."""
        for batch in range(epoch * self.batches, (epoch + 1) * self.batches):
            chosen = self._choice.chosen(batch, self.batch_size)
            yield [index for index in chosen for _ in range(self.mini_repeat_count)]


def read_ahead(args: Any, prefetch: int) -> int:  # noqa: ANN401 (TRL's arguments)
    """Generation batches between a draw and the latest whose rewards are there when it is made, at most.

    Args:
        args: Of the trainer.
        prefetch: Steps whose rollouts are sampled ahead.
    """
    each = generation_interval(args)
    # A step's micro-batches are read at once, accelerate reads one more, and workers some each.
    by_workers = args.dataloader_num_workers * (args.dataloader_prefetch_factor or 2)
    ahead = args.gradient_accumulation_steps + prefetch * each + by_workers
    return -(-(ahead + 1) // each)
