"""Bytes that leave a process in a step: gathered layers, averaged gradients, the policy for its servers.

sizes, strategy, passes -> Traffic
"""

from dataclasses import dataclass, replace

from perl.training.decoder import Decoder, Types, weight_bytes
from perl.training.sharing import Sharing

_FLOAT32 = 4


@dataclass(frozen=True)
class Passes:
    """How often the base goes by in a step.

    Attributes:
        training: Forward and backward passes.
        scoring: Forward passes without gradient.
        tokens: Steps in which transformers write a token of each completion, the prompt's pass included; 0: another
            engine writes.
    """

    training: int
    scoring: int
    tokens: int


@dataclass(frozen=True)
class Traffic:
    """Bytes of a step.

    Attributes:
        gathered: That a process receives of the others' parts of the base, for training and scores.
        gathered_for_rollouts: The same while transformers write.
        averaged: That a process sends so that all have the mean gradient, and under ZeRO-2 the updated parameters.
        synced: Of the policy, for one server or engine.
    """

    gathered: float
    gathered_for_rollouts: float
    averaged: float
    synced: float

    def of_a_step(self, steps: int) -> "Traffic":
        """Of one of so many steps that a generation serves."""
        return replace(self, gathered_for_rollouts=self.gathered_for_rollouts / steps, synced=self.synced / steps)


def traffic_of(
    model: Decoder, types: Types, sharing: Sharing, passes: Passes, *, trained: int, synced: float
) -> Traffic:
    """What the processes of a run send each other.

    Args:
        model: The base.
        types: Of its numbers.
        sharing: How it is shared.
        passes: Of a process in a step.
        trained: Parameters that train.
        synced: From :func:`sync_bytes`.
    """
    others = (sharing.processes - 1) / sharing.processes
    whole = weight_bytes(model, types) if sharing.shards_base else 0.0
    # Layers once for each direction; the head stays whole between the two, the embedding has no backward pass.
    kept = model.head_parameters * (1 if model.tied else 2) * types.weights if sharing.shards_base else 0.0
    gathered = passes.training * (2 * whole - kept) + passes.scoring * whole
    # A ring: each process sends its sums once around, then the means. ZeRO-2 exchanges whole gradients in the same way,
    # then each process sends its share of the updated parameters around.
    rounds = 3 if sharing.strategy == "zero2" else 2
    averaged = rounds * others * _FLOAT32 * trained
    return Traffic(others * gathered, others * passes.tokens * whole, averaged, synced)


def sync_bytes(model: Decoder, types: Types, rank: int | None) -> float:
    """Of what an engine is given after each step.

    Args:
        model: The base.
        types: Of its numbers.
        rank: Of the LoRA that is served; None: the weights that the adapter changes, all linear layers.
    """
    return float(types.compute * (model.linear_parameters if rank is None else model.lora_parameters(rank)))
