"""Unused rollouts of a checkpoint, dealt out again to another number of processes.

micro-batches of each process that wrote them -> micro-batches of one of those that go on

What counts is which rows an optimizer step trains on; which process runs a row is of no account. So the rows of each
step are put together, in the order of the processes, and divided anew.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

Window = list[dict[str, torch.Tensor]]


def redivided(windows: Sequence[Window], steps: int, *, rank: int, processes: int, micro_batches: int) -> Window | None:
    """The micro-batches of one process.

    Args:
        windows: The micro-batches of a generation batch, of each process that wrote them.
        steps: Optimizer steps that train on different parts of the generation batch.
        rank: Number of the process that goes on.
        processes: How many go on.
        micro_batches: How many each of them needs.

    Returns:
        None where it cannot be done exactly: rows that do not divide, or values of a whole generation batch that differ
        from process to process.
    """
    if not windows or micro_batches % steps or any(len(window) != len(windows[0]) for window in windows):
        return None
    if len(windows[0]) % steps:
        return None
    each, batches = len(windows[0]) // steps, [batch for window in windows for batch in window]
    shared = {name: value for name, value in batches[0].items() if value.ndim == 0}
    if any(not torch.equal(batch[name], value) for batch in batches for name, value in shared.items()):
        return None
    parts: Window = []
    for step in range(steps):
        together = _together([batch for window in windows for batch in window[step * each : (step + 1) * each]])
        rows = len(next(iter(together.values()), ()))
        count = processes * (micro_batches // steps)
        if not rows or rows % count:
            return None
        size = rows // count
        first = rank * (micro_batches // steps)
        for i in range(first, first + micro_batches // steps):
            parts.append(shared | {name: t[i * size : (i + 1) * size] for name, t in together.items()})
    return parts


def _together(batches: Window) -> dict[str, torch.Tensor]:
    """The rows of micro-batches, padded to the longest: prompts on the left, as TRL has them, all else on the right."""
    rows = {}
    for name, tensor in batches[0].items():
        tensors = [batch[name] for batch in batches]
        if tensor.ndim == 0:
            continue
        if tensor.ndim > 1:
            width = max(t.size(1) for t in tensors)
            left = name.startswith("prompt")
            tensors = [_padded(t, width, left=left) for t in tensors]
        rows[name] = torch.cat(tensors)
    return rows


def _padded(tensor: torch.Tensor, width: int, *, left: bool) -> torch.Tensor:
    """A tensor (N, T, ...) with as many columns; what is added is zero, which the masks leave out."""
    missing = width - tensor.size(1)
    return pad(tensor, (0, 0) * (tensor.ndim - 2) + ((missing, 0) if left else (0, missing)))
