"""How the processes of a run share base and optimizer, and what each holds of them.

Sharing, sizes -> bytes of a process

The adapter and its gradient are whole in each process under every strategy; the base is whole but under FSDP2, the
optimizer's state but under ZeRO-2.
"""

from dataclasses import dataclass

from perl.recipe.sections import Strategy
from perl.training.decoder import Decoder, Types, weight_bytes

_FLOAT32 = 4
# Adam's two averages, of each trained number.
_ADAM = 8
# Of a base in shards: the layer that computes, the one that is fetched meanwhile, and the buffer that it arrives in.
_LAYERS_WHOLE = 3


@dataclass(frozen=True)
class Sharing:
    """How the processes of a run share what each would hold alone.

    Attributes:
        strategy: ``ddp``, ``zero2`` or ``fsdp2``.
        processes: How many there are.
    """

    strategy: Strategy = "ddp"
    processes: int = 1

    @property
    def shards_base(self) -> bool:
        """Whether a process keeps a part of the base only."""
        return self.strategy == "fsdp2" and self.processes > 1


ALONE = Sharing()
"""One process."""


@dataclass(frozen=True)
class TrainedBytes:
    """What a process holds of the adapter.

    Attributes:
        parameters: In float32, whole in each process under every strategy.
        gradients: Whole in each process; with DDP a second time, in the buckets in which they are averaged.
        optimizer: Adam's two averages; under ZeRO-2 a part of them, with a copy of that part of the parameters and,
            during the step, of the gradients.
    """

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer


def trained_bytes(trained: int, sharing: Sharing) -> TrainedBytes:
    """What a process holds of so many trained parameters, all of them float32.

    One process has 16 bytes of each: the parameter, its gradient, two averages. DDP's reducer keeps buckets besides,
    which are as large as the gradient. Under ZeRO-2 a process has parameter and gradient of each, and 16 bytes of its
    share: a copy of the parameter, its gradient, two averages.
    """
    whole = _FLOAT32 * trained
    if sharing.processes == 1 or sharing.strategy == "fsdp2":
        return TrainedBytes(whole, whole, _ADAM * trained)
    if sharing.strategy == "zero2":
        return TrainedBytes(whole, whole, (_ADAM + 2 * _FLOAT32) * trained / sharing.processes)
    return TrainedBytes(whole, 2 * whole, _ADAM * trained)


def base_bytes(model: Decoder, types: Types, sharing: Sharing) -> tuple[float, float]:
    """The part of the base that a process keeps, and what it holds besides while a pass runs.

    FSDP2 as transformers applies it: each layer is gathered for its turn, the next one while it computes, and both are
    copied out of the buffer that they arrive in; the head stays whole between the two passes. A world of one keeps
    nothing in shards.
    """
    weights = weight_bytes(model, types)
    if not sharing.shards_base:
        return weights, 0.0
    layer = (weights - _outside_layers(model, types)) / model.layers
    part = weights / sharing.processes
    # However few layers there are, a process never holds more than the whole.
    return part, min(_LAYERS_WHOLE * layer + model.head_parameters * types.weights, weights - part)


def _outside_layers(model: Decoder, types: Types) -> float:
    return float(model.head_parameters * (1 if model.tied else 2) * types.weights)
