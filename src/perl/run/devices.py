"""The accelerator that a run computes on, if there is one that it may.

torch's accelerator -> a device, or None: the CPU
"""

import platform
from functools import cache
from pathlib import Path

import torch

from perl.errors import RecipeError
from perl.run.warned import warn


def accelerator() -> torch.device | None:
    """Torch's accelerator; None on a machine without one, and on Apple's, which one line reports once.

    What packing, adapters and guards rest on was never compared with a CPU's numbers on Apple's: attention with masks,
    half precision under autocast, random states that a resumed run goes on with.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is not None and found.type == "mps":
        _say_that_mps_is_not_used()
        return None
    return found


def check_device(device: torch.device) -> None:
    """Refuses Apple's accelerator for whoever asks for it.

    Raises:
        RecipeError: It is one.
    """
    if device.type == "mps":
        hint = "PeftRLConfig computes on the CPU of a Mac by itself; other arguments need use_cpu=True"
        raise RecipeError("nothing is proven on Apple's GPUs (mps)", "train.use_cpu", hint)


@cache
def _say_that_mps_is_not_used() -> None:
    warn("PRL341", "computing on the CPU: nothing is proven on Apple's GPUs (mps)")


def processor_name(device: torch.device) -> str:
    """What a device is called by its maker."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
