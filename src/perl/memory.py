"""How many tokens fit into a forward and backward pass, and whether activations must be computed again.

model, memory at hand -> MemoryPlan

Measured, not guessed: two small passes show what the model, its adapter and its types keep for the backward pass. Knows
nothing of data or losses.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from perl.packing import Row
from perl.scoring import score

# On a CPU: enough that matrix products run at full speed, few enough that activations of a small model stay small.
CPU_TOKENS = 2048
# On an accelerator no pass is made longer than this: products are as fast as they get, and rows are balanced better.
MOST_TOKENS = 65536
# Of the memory that is free before the first step, the part that activations may take. The rest is for gradients, the
# optimizer's state (counted separately), temporary results and fragmentation.
_SHARE = 0.7
# Adapter parameters are float32, and so are their gradients and Adam's two averages.
_BYTES_PER_TRAINED = 12
# Tokens of the longer of the two rows that are measured.
_PROBE = 256


@dataclass(frozen=True)
class MemoryPlan:
    """How a pass uses memory.

    Attributes:
        tokens: In one forward and backward pass.
        recompute: Whether activations are computed again in the backward pass (gradient checkpointing).
    """

    tokens: int
    recompute: bool


@dataclass(frozen=True)
class TokenBytes:
    """Bytes that a token keeps until the backward pass.

    Attributes:
        kept: Without recomputation.
        recomputed: With it: the inputs of the layers, and one layer's activations.
        fixed: Bytes that a pass keeps however many tokens it has: weights as autocast has rounded them.
    """

    kept: float
    recomputed: float
    fixed: float = 0.0


def plan_memory(free_bytes: float, trained: int, per_token: TokenBytes, *, longest_row: int) -> MemoryPlan:
    """The longest pass that fits; activations are computed again only if rows would not fit without.

    Args:
        free_bytes: Memory at hand before the first step.
        trained: Parameters that train.
        per_token: What a token keeps.
        longest_row: Tokens of the longest row that may come; it must fit, since rows are not cut.
    """
    usable = max(_SHARE * (free_bytes - _BYTES_PER_TRAINED * trained) - per_token.fixed, 0.0)
    kept = int(usable / per_token.kept)
    if kept >= longest_row:
        return MemoryPlan(min(kept, max(MOST_TOKENS, longest_row)), recompute=False)
    recomputed = int(usable / per_token.recomputed)
    return MemoryPlan(max(min(recomputed, max(MOST_TOKENS, longest_row)), longest_row), recompute=True)


def free_bytes(asleep: int = 0) -> int:
    """Memory of the CUDA device that passes may take.

    Args:
        asleep: Bytes that the driver calls free and another tenant of the device, an engine that sleeps, takes again.
    """
    free, _ = torch.cuda.mem_get_info()
    return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - asleep


def measure(model: nn.Module, *, packed: bool) -> TokenBytes:
    """What a token keeps in this model, from passes of two rows of tokens that stand for nothing.

    Args:
        model: Prepared by :func:`perl.head.add_scored_forward`; gradient checkpointing off.
        packed: Whether rows will be packed.
    """
    parameter = next(model.parameters())

    def kept_of(count: int) -> int:
        tokens = torch.zeros(count + 1, dtype=torch.long, device=parameter.device)
        row = Row(tokens[:1], tokens[1:], torch.ones(count, dtype=torch.bool))
        return kept_bytes(lambda: score(model, [row], [[0]], packed=packed, columns=count), model)

    short, long = kept_of(_PROBE // 2), kept_of(_PROBE)
    kept = (long - short) / (_PROBE - _PROBE // 2)
    fixed = long - kept * _PROBE
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    inputs = config.num_hidden_layers * config.hidden_size * parameter.element_size()
    return TokenBytes(kept=kept, recomputed=inputs + kept / config.num_hidden_layers, fixed=max(fixed, 0.0))


def kept_bytes(run: Callable[[], object], model: nn.Module) -> int:
    """Bytes that autograd keeps during a forward pass, parameters not counted, each storage once.

    Args:
        run: Runs the pass, with gradients on.
        model: Whose parameters are not counted.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    own |= {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()  # held until the hooks have counted: a freed storage's address may be given out again
    del result
    return sum(kept.values())
