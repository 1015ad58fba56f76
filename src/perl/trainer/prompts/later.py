"""Prompts of epochs that have not begun: what the data loader will give then, without asking it.

sampler, data -> the examples of each generation batch of an epoch, on this process
"""

from collections.abc import Iterator
from typing import Any

from trl import GRPOTrainer

from perl.trainer.prompts.order import EpochSampler
from perl.trainer.rollouts_ahead import LaterPrompts


def later_prompts(trainer: GRPOTrainer) -> LaterPrompts | None:
    """Of a trainer's data; None where its order is not known before: a stream, or a sampler of a subclass."""
    if not hasattr(trainer.train_dataset, "__getitem__"):
        return None
    sampler = trainer._get_train_sampler(trainer.train_dataset)
    if not isinstance(sampler, EpochSampler) or not sampler.batches:
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
