"""Exact decompositions of the base's weights: once, in parallel, with progress, kept for the next run.

weights by name -> factors by name

Exact, not randomised: a randomised decomposition gives other factors in every process. The base's weights are only
read.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from perl.run.files import write_file
from perl.run.progress import live_line

Factors = dict[str, torch.Tensor]
# Below this many elements a matrix is decomposed faster than its result is found on disk.
_WORTH_KEEPING = 1 << 18


def first_triples(weight_OI: torch.Tensor, rank: int) -> Factors:
    """The first singular triples: U (out, rank), S (rank,), V (rank, in), float32."""
    U, S, V = torch.linalg.svd(weight_OI, full_matrices=False)
    return {"U": U[:, :rank].contiguous(), "S": S[:rank].contiguous(), "V": V[:rank].contiguous()}


def last_triples(weight_OI: torch.Tensor, rank: int) -> Factors:
    """The last singular triples; shapes as in :func:`first_triples`."""
    U, S, V = torch.linalg.svd(weight_OI, full_matrices=False)
    return {"U": U[:, -rank:].contiguous(), "S": S[-rank:].contiguous(), "V": V[-rank:].contiguous()}


def first_columns(weight_OI: torch.Tensor, rank: int) -> Factors:
    """The first columns of Q (out, rank) and rows of R (rank, in) of the QR decomposition."""
    Q, R = torch.linalg.qr(weight_OI)
    return {"Q": Q[:, :rank].contiguous(), "R": R[:rank].contiguous()}


Decomposition = Callable[[torch.Tensor, int], Factors]


def decompose(weights: Mapping[str, tuple[torch.Tensor, int]], decomposition: Decomposition) -> dict[str, Factors]:
    """Decomposes every weight; what it finds is kept in ``perl-rl/decompositions`` of the user's cache folder.

    Args:
        weights: Name -> (out, in) matrix of any floating type and device, and the rank wanted of it.
        decomposition: One of the functions above.

    Returns:
        Name -> factors, float32, on the weight's device.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perl-rl" / "decompositions"
    threads = torch.get_num_threads()
    results: dict[str, Factors] = {}
    torch.set_num_threads(1)  # as many matrices at once as there are threads, instead of threads on one matrix
    try:
        with ThreadPoolExecutor(threads) as pool, live_line(len(weights), "decomposing") as line:
            found = pool.map(lambda item: _one(item[1][0], item[1][1], decomposition, folder), weights.items())
            for name, factors in zip(weights, found, strict=True):
                results[name] = factors
                line.update()
    finally:
        torch.set_num_threads(threads)
    return results


def _one(weight: torch.Tensor, rank: int, decomposition: Decomposition, folder: Path) -> Factors:
    weight_OI = weight.detach().float()
    if weight_OI.numel() < _WORTH_KEEPING:
        return decomposition(weight_OI, rank)
    digest = hashlib.sha256(f"{tuple(weight.shape)} {weight.dtype}".encode())
    digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    # The device is part of the key: other libraries round and sign differently.
    path = folder / f"{decomposition.__name__}-{rank}-{weight.device.type}-{digest.hexdigest()}.safetensors"
    try:
        return load_file(path, device=str(weight.device))
    except (OSError, SafetensorError):  # not there, not readable, or cut short by a kill
        factors = decomposition(weight_OI, rank)
    with contextlib.suppress(OSError, SafetensorError):  # a cache that cannot be written is no reason to stop
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, lambda staged: save_file(factors, staged))
    return factors
