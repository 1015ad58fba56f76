"""Keeps processes in step whose base is in shards (FSDP2), though one of them runs out of memory in a pass.

passes, of which one fails on some process -> the same collectives on all, so that they can agree to run them again

In each pass every process takes part in gathering each layer, in one order. A process that stops in the middle of a
pass would leave the others waiting; it gathers what is left of the pass, computes nothing with it, and then tells them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

_T = TypeVar("_T")
Kind = Literal["training", "waiting", "scoring", "critic", "values"]
"""The policy's passes with gradient; those without one while a critic warms up; without gradient; a critic's two."""


class _NotedGather:
    """FSDP2's own gathering of a layer, which is noted once it has begun."""

    def __init__(self, module: FSDPModule, begun: list[FSDPModule]) -> None:
        self._module, self._begun = module, begun

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: torch.distributed.ProcessGroup,
        async_op: bool = False,
    ) -> torch.distributed.Work | None:
        gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
        work = gather(output_tensor, input_tensor, group=group, async_op=async_op)  # its new name, or its old one
        self._begun.append(self._module)
        return cast("torch.distributed.Work | None", work)


class InStep:
    """Runs passes of a base in shards. Owns what is known of the order in which its layers are gathered."""

    def __init__(self, base: nn.Module) -> None:
        """Notes from now on which layers are gathered.

        Args:
            base: In shards.
        """
        self._base: Any = base
        self._modules = [module for module in base.modules() if isinstance(module, FSDPModule)]
        self._begun: list[FSDPModule] = []
        self._orders: dict[Kind, tuple[FSDPModule, ...]] = {}
        for module in self._modules:
            module.set_custom_all_gather(_NotedGather(module, self._begun))  # type: ignore[arg-type]  # as its interface

    def rehearse(self, kind: Kind, run: Callable[[], object]) -> None:
        """Learns the order of a kind of pass, once, from a small one; all processes must ask at once.

        Random states stay as they are: a run that resumes rehearses again.
        """
        if kind not in self._orders:
            self.begin()
            with torch.random.fork_rng():
                run()
            self._orders[kind] = tuple(self._begun)

    def forget(self) -> None:
        """Orders may be others from now on, as where activations are computed again."""
        self._orders.clear()

    def begin(self) -> None:
        """Before a pass: no layer is gathered, on any process; all must ask."""
        for module in self._modules:
            module.reshard()
        self._begun.clear()

    def run(self, kind: Kind, passes: Sequence[Callable[[], _T]]) -> list[_T] | None:
        """Runs passes, as many on every process.

        Args:
            kind: Of which all of them are, and which was rehearsed.
            passes: Each may raise ``torch.OutOfMemoryError``.

        Returns:
            Their results; None: memory did not suffice for one of them on this process, and the others, whose passes
            went on, must be told.
        """
        results = []
        for number, run in enumerate(passes):
            self.begin()
            try:
                results.append(run())
                continue
            except torch.OutOfMemoryError:
                if not hasattr(self._base, "reset_iter_state"):  # older than torch 2.13
                    raise
                results.clear()
            # Out of the handler, which holds the tensors of the pass.
            order = self._orders[kind]
            left = (*order[len(self._begun) :], *order * (len(passes) - number - 1))
            self._base.reset_iter_state()
            torch.cuda.empty_cache()
            for module in left:
                module.unshard()
                module.reshard()
            return None
        return results
