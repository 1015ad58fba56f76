"""How many bytes a piece of code holds at most, counted without an allocator's help: on a CPU, tensor by tensor.

with LiveBytes() as live: ... -> live.peak

Each storage that an operation gives out counts from then until nobody holds it, also in a backward pass. What an
operation needs inside itself is not seen, nor is what was there before.
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are alive.

    Attributes:
        now: Of those given out since the beginning that are still held.
        peak: The most at any time.
        largest: Of the largest storage.
    """

    def __init__(self) -> None:
        """Nothing given out yet."""
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Runs the operation; what it returns and was not among its arguments is new."""
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._alive or key in given:
                continue
            self.now += size
            self.largest = max(self.largest, size)
            self.peak = max(self.peak, self.now)
            self._alive[key] = weakref.ref(storage, lambda _, key=key, size=size: self._freed(key, size))
        return result

    def _freed(self, key: int, size: int) -> None:
        self._alive.pop(key, None)
        self.now -= size


def _tensors(tree: Any) -> list[torch.Tensor]:  # noqa: ANN401 (arguments and results of any operation)
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
