"""How many tokens fit into a forward and backward pass, and whether activations must be computed again.

model, memory at hand -> MemoryPlan

Measured, not guessed: a few small passes show what the model, its adapter and its types keep for the backward pass.
A pass of T tokens whose longest row has R keeps fixed + T (kept + pair R) bytes.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from perl.methods.base_parameters import is_packed, number_count, parts_of
from perl.packing.forward import Read, score
from perl.packing.head import head_bytes, memory_of
from perl.packing.rows import Row
from perl.policy.model import base_of
from perl.policy.precision import compute_dtype

# On a CPU: enough that matrix products run at full speed, few enough that activations of a small model stay small.
CPU_TOKENS = 2048
# On an accelerator no pass is made longer than this: products are as fast as they get, and rows are balanced better.
MOST_TOKENS = 65536
# Of the memory that is free before the first step, the part that activations may take. The rest is for temporary
# results and fragmentation; gradients and the optimizer's state are counted separately.
_SHARE = 0.7
BYTES_PER_TRAINED = 12
"""Besides the float32 number itself: its gradient and Adam's two averages."""
# Tokens of the shortest row that is measured; the others have twice and four times as many.
_PROBE = 128
# Of the prompt that two completions share.
_SEEN = 512
# Of a layer's activations, what its backward pass adds: their gradients. Where activations are computed again one layer
# is most of what is held. Counted by storages that are alive: 0.25 to 0.31 (Qwen2 shapes, bfloat16 and float32).
_GRADIENTS = 0.3


@dataclass(frozen=True)
class MemoryPlan:
    """How a pass uses memory.

    Attributes:
        tokens: In one forward and backward pass.
        recompute: Whether activations are computed again in the backward pass (gradient checkpointing).
        copy_cost: In tokens of such a pass, what a token of a shared prompt costs again for each completion that sees
            it: attention copies its key and value.
    """

    tokens: int
    recompute: bool
    copy_cost: float = 0.0


@dataclass(frozen=True)
class TokenBytes:
    """Bytes that a token keeps until the backward pass, and what a pass takes besides.

    Attributes:
        kept: Without recomputation.
        recomputed: With it: the inputs of the layers, one layer's activations and their gradients.
        fixed: Bytes of a pass however many tokens it has: the tile of logits, the weights of a layer as they are
            where its base is quantised.
        kept_fixed: Such bytes without recomputation only: weights as autocast has rounded them.
        kept_pair: Bytes for each pair of tokens of a row, where attention keeps its scores or a mask.
        recomputed_pair: The same with recomputation.
        kept_copy: Bytes for each token of a shared prompt and each completion that sees it: attention keeps what a
            completion sees end to end, so a copy of the prompt's keys and values for each.
        recomputed_copy: The same with recomputation: of one layer, with their gradients.
    """

    kept: float
    recomputed: float
    fixed: float = 0.0
    kept_fixed: float = 0.0
    kept_pair: float = 0.0
    recomputed_pair: float = 0.0
    kept_copy: float = 0.0
    recomputed_copy: float = 0.0

    @classmethod
    def of_layers(
        cls, layers: int, *, inputs: float, kept: float, fixed: float, besides: float, pair: float, copy: float
    ) -> "TokenBytes":
        """Of a model whose layers can be computed again, one at a time, from what it keeps without that.

        Args:
            layers: That follow one another.
            inputs: Bytes of a token that all layers are given.
            kept: Bytes that a token keeps in all layers.
            fixed: Bytes that all layers keep however many tokens there are.
            besides: Such bytes outside of what is kept.
            pair: Bytes of a pair of tokens in all layers.
            copy: Bytes of a token of a shared prompt for each completion that sees it, in all layers.
        """
        again = (1 + _GRADIENTS) / layers  # one layer is held, and what its backward pass adds
        return cls(
            kept=kept,
            recomputed=inputs + again * kept,
            fixed=besides + fixed / layers,
            kept_fixed=fixed - fixed / layers,
            kept_pair=pair,
            recomputed_pair=again * pair,
            kept_copy=copy,
            recomputed_copy=again * copy,
        )

    def at_least(self, other: "TokenBytes") -> "TokenBytes":
        """The larger of each, for passes of two kinds."""
        return TokenBytes(*(max(pair) for pair in zip(astuple(self), astuple(other), strict=True)))

    def of_token(self, row: int, *, recompute: bool) -> float:
        """Bytes that a token of a row of so many tokens keeps."""
        return self.recomputed + self.recomputed_pair * row if recompute else self.kept + self.kept_pair * row

    def of_any_pass(self, *, recompute: bool) -> float:
        """Bytes that a pass takes however many tokens it has."""
        return self.fixed if recompute else self.fixed + self.kept_fixed

    def of_copy(self, *, recompute: bool) -> float:
        """Bytes of a token of a shared prompt for each completion that sees it."""
        return self.recomputed_copy if recompute else self.kept_copy

    def of_pass(self, tokens: int, row: int, *, recompute: bool, copies: int = 0) -> float:
        """Bytes that a pass of so many tokens takes.

        Args:
            tokens: That are run, a shared prompt's once.
            row: Of the longest row.
            recompute: Whether activations are computed again.
            copies: The sum over completions that share a prompt of its tokens.
        """
        of_tokens = tokens * self.of_token(row, recompute=recompute)
        return self.of_any_pass(recompute=recompute) + of_tokens + copies * self.of_copy(recompute=recompute)


def plan_memory(free_bytes: float, trained: int, per_token: TokenBytes, *, longest_row: int) -> MemoryPlan:
    """The longest pass that fits; activations are computed again only if rows would not fit without.

    Args:
        free_bytes: Memory at hand before the first step.
        trained: Parameters that train.
        per_token: What a token keeps.
        longest_row: Tokens of the longest row that may come; it must fit, since rows are not cut.
    """
    # fixed + T (kept + pair R) <= share * (free - gradient and Adam's averages), solved for T
    usable = _SHARE * (free_bytes - BYTES_PER_TRAINED * trained)

    def fitting(*, recompute: bool) -> int:
        rest = max(usable - per_token.of_any_pass(recompute=recompute), 0.0)
        return min(int(rest / per_token.of_token(longest_row, recompute=recompute)), max(MOST_TOKENS, longest_row))

    recompute = fitting(recompute=False) < longest_row
    copy_cost = per_token.of_copy(recompute=recompute) / per_token.of_token(longest_row, recompute=recompute)
    return MemoryPlan(max(fitting(recompute=recompute), longest_row), recompute, copy_cost)


def free_bytes(asleep: int = 0) -> int:
    """Memory of the CUDA device that passes may take.

    Args:
        asleep: Bytes that the driver calls free and another tenant of the device, an engine that sleeps, takes again.
    """
    free, _ = torch.cuda.mem_get_info()
    return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - asleep


def measure(
    model: nn.Module, *, packed: bool, shared: bool = False, fused_head: bool | None = None, read: Read | None = None
) -> TokenBytes:
    """What a token keeps in this model, from passes of tokens that stand for nothing.

    Args:
        model: Prepared by :func:`perl.packing.head.add_scored_forward`; gradient checkpointing off.
        packed: Whether rows will be packed; else a pass has two rows of two lengths, so that there is padding.
        shared: Whether completions in a pass will share their prompt; then two do.
        fused_head: As in :func:`perl.packing.head.head_log_probs`.
        read: What is wanted in the place of log-probabilities; as in :func:`perl.packing.forward.score`.
    """
    # Where a pass begins, whatever is kept elsewhere until it is needed.
    device = next(parameter.device for parameter in model.parameters() if parameter.device.type != "meta")
    lengths = [_PROBE, 2 * _PROBE, 4 * _PROBE]
    # A layer is given the same for each token, so any pass tells what.
    inputs = _LayerInputs(model)

    def kept_of(rows: list[Row]) -> int:
        groups = [list(range(len(rows)))] if shared else [[index] for index in range(len(rows))]
        columns = max(row.completion.numel() for row in rows)
        inputs.clear()
        return kept_bytes(lambda: score(model, rows, groups, packed=packed, columns=columns, read=read), model)

    rows = 2 if shared or not packed else 1
    shorter = 0 if shared else 1
    with inputs:
        first, second, third = (
            kept_of([_row(1, length - shorter * index, device, index) for index in range(rows)]) / rows
            for length in lengths
        )
        given = inputs.bytes / inputs.tokens if inputs.layers else 0.0
        # The same tokens once with two completions that see the prompt, once with one that is part of its row.
        copy = 0.0
        if shared:
            alone, both = kept_of([_row(_SEEN, 3, device)]), kept_of([_row(_SEEN, 2, device, i) for i in (0, 1)])
            copy = max(both - alone, 0) / (2 * _SEEN)
    # f(T) = fixed + kept T + pair T^2 is measured at T, 2 T and 4 T:
    # f(2T) - f(T) = kept T + 3 pair T^2 and f(4T) - f(2T) = 2 kept T + 12 pair T^2, so half the second less the first
    # is 3 pair T^2
    pair = max(((third - second) / 2 - (second - first)) / (3 * _PROBE**2), 0.0)
    kept = (second - first) / _PROBE - 3 * _PROBE * pair
    fixed = max(first - kept * _PROBE - pair * _PROBE**2, 0.0) * rows
    outside = _dequantised_bytes(model)
    if device.type != "cpu":
        text = model.config.get_text_config()  # type: ignore[union-attr, operator]
        sizes, stored = (text.vocab_size, text.hidden_size), base_of(model).get_output_embeddings().weight.dtype
        outside += head_bytes(sizes, stored, compute_dtype(model), memory_of(device), fused=bool(fused_head))
    if not inputs.layers:  # nothing that could be computed again
        return TokenBytes(kept, kept, fixed + outside, 0.0, pair, pair, copy, copy)
    return TokenBytes.of_layers(
        inputs.layers, inputs=given, kept=kept, fixed=fixed, besides=outside, pair=pair, copy=copy
    )


class _LayerInputs:
    """Counts what the layers are given that gradient checkpointing would run again.

    Attributes:
        bytes: Of hidden states, in the type they have there, since cleared.
        layers: How many were run.
        tokens: That the last of them was given.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        self.clear()

    def clear(self) -> None:
        self.bytes = self.layers = self.tokens = 0

    def __enter__(self) -> None:
        self._hooks = [module.register_forward_pre_hook(self._count, with_kwargs=True) for module in self._modules]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _count(self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = inputs[0] if inputs else named["hidden_states"]
        self.bytes += hidden.numel() * hidden.element_size()
        self.layers += 1
        self.tokens = hidden.numel() // hidden.size(-1)


def _row(prompt: int, completion: int, device: torch.device, index: int = 0) -> Row:
    """Of so many tokens each; a completion of two rows with one prompt would be run once, so theirs differ."""
    tokens = torch.zeros(prompt + completion, dtype=torch.long, device=device)
    tokens[prompt:] = index
    return Row(tokens[:prompt], tokens[prompt:], torch.ones(completion, dtype=torch.bool))


def _dequantised_bytes(model: nn.Module) -> int:
    """Of the largest weight that is held in codes, as numbers: a layer's are there while it computes."""
    packed = [parameter for parameter in model.parameters() if is_packed(parameter)]
    states = [getattr(parameter, "quant_state", None) for parameter in packed]
    types = [p.dtype if state is None else state.dtype for p, state in zip(packed, states, strict=True)]
    sizes = [number_count(p) * kind.itemsize for p, kind in zip(packed, types, strict=True) if kind != torch.int8]
    return max(sizes, default=0)


def kept_bytes(run: Callable[[], object], model: nn.Module) -> int:
    """Bytes that autograd keeps during a forward pass, parameters not counted, each storage once.

    Args:
        run: Runs the pass, with gradients on.
        model: Whose parameters are not counted.
    """
    held = (part for name, p in model.named_parameters() for _, part in parts_of(name, p.detach()))
    own = {part.untyped_storage().data_ptr() for part in held}
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
