"""How long a call takes.

call, device -> seconds
"""

import time
from collections.abc import Callable

import torch


def fastest(run: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Seconds of the fastest of several runs, after one that warms up; the device has finished with each."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])
