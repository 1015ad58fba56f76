"""What a run computes on: the accelerator, if there is one that it may use, and CPU threads that fit its model.

torch's accelerator -> a device, or None: the CPU; model -> number of threads -> PyTorch's setting, for a while

The threads of an operation wait for each other at its end. On a small matrix that wait is most of the time, and where
other processes want the processors too it lasts until the last thread is given one.
"""

import contextlib
import os
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import nn

from perl.errors import RecipeError, warn
from perl.run.launched import own_share

# Numbers in a matrix for each thread that works on it (`benchmarks/eval_threads.py`): of two threads on two free cores
# a matrix of 2**18 gains 30 to 45 %, a smaller one less; beside busy processes all of these lose, 3 to 6 times as much.
NUMBERS_A_THREAD = 2**18
# By which a user says how many threads there are to be; torchrun does so too.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

_asked = False  # for this process, by use_threads


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


def use_threads(count: int) -> None:
    """From now on so many CPU threads, whatever the model; within :func:`threads_kept` until it ends."""
    global _asked  # noqa: PLW0603 (it describes torch's own setting, which is the process's)
    torch.set_num_threads(count)
    _asked = True


@contextlib.contextmanager
def threads_kept() -> Iterator[None]:
    """Afterwards the process has as many threads as before."""
    global _asked  # noqa: PLW0603
    count, asked = torch.get_num_threads(), _asked
    try:
        yield
    finally:
        torch.set_num_threads(count)
        _asked = asked


def fitting_threads(model: nn.Module) -> int:
    """How many of this process's CPU threads a model is large enough for; all of them where someone chose the number.

    Someone has: a recipe, ``OMP_NUM_THREADS``, ``MKL_NUM_THREADS``, or ``torch.set_num_threads`` with another number
    than PyTorch takes by itself. Else the processes of a run that share a machine share its threads. A model on an
    accelerator gets this process's whole share.
    """
    now = torch.get_num_threads()
    if now == 1 or _asked or any(os.environ.get(name) for name in _VARIABLES) or now not in _defaults():
        return now
    own = own_share(now)
    if any(p.device.type != "cpu" for p in model.parameters()):
        return own
    return min(own, max(1, _largest_matrix(model) // NUMBERS_A_THREAD))


@contextlib.contextmanager
def threads_for(model: nn.Module) -> Iterator[None]:
    """As many threads as fit the model; afterwards as many as before."""
    with threads_kept():
        torch.set_num_threads(fitting_threads(model))
        yield


def _defaults() -> set[int | None]:
    """The numbers that PyTorch may take by itself: cores or processors, the process's or the machine's."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {mine, os.cpu_count(), *((mine or 2) // 2, (os.cpu_count() or 2) // 2)}


def _largest_matrix(model: nn.Module) -> int:
    """Numbers in the largest matrix of a layer; embeddings and head, which are one operation each, do not count."""
    ends = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    whole = next((module for module in model.modules() if hasattr(module, "get_output_embeddings")), None)
    head: nn.Module | None = whole.get_output_embeddings() if whole is not None else None  # type: ignore[operator]
    ends |= {id(parameter) for parameter in (head.parameters() if head is not None else ())}
    sizes = (p.shape[-1] * p.shape[-2] for p in model.parameters() if p.ndim >= 2 and id(p) not in ends)
    return max(sizes, default=0)
