"""How fast the processes of a node exchange numbers here: an all-reduce, timed.

number of processes -> bytes/s that each sends
"""

import tempfile
import time
from pathlib import Path

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing import spawn  # type: ignore[attr-defined]

# Of float32, as much as the gradient of an adapter.
_NUMBERS = 2**22
_REPEATS = 3


def link_bandwidth(processes: int, *, on_cpu: bool) -> float | None:
    """Bytes/s that each of so many processes sends in a ring, with gloo on a CPU and NCCL on GPUs.

    None: there are fewer GPUs here, or one process.

    Args:
        processes: On this machine.
        on_cpu: Whether there is no GPU.
    """
    if processes < 2 or (not on_cpu and torch.cuda.device_count() < processes):
        return None
    with tempfile.TemporaryDirectory() as folder:
        spawn(_exchange, (processes, folder, on_cpu), nprocs=processes)
        seconds = float((Path(folder) / "seconds").read_text(encoding="ascii"))
    # A ring: each sends its part of the sums around, then of the means.
    return 2 * (processes - 1) / processes * 4 * _NUMBERS / seconds


def _exchange(rank: int, processes: int, folder: str, on_cpu: bool) -> None:
    """One process; the first one writes what it took."""
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", processes)
    torch.distributed.init_process_group("gloo" if on_cpu else "nccl", store=store, rank=rank, world_size=processes)
    device = torch.device("cpu") if on_cpu else torch.device("cuda", rank)
    numbers, taken = torch.ones(_NUMBERS, device=device), []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        torch.distributed.all_reduce(numbers)
        if not on_cpu:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(min(taken[1:])), encoding="ascii")
    torch.distributed.destroy_process_group()
