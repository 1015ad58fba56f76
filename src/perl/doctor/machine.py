"""What the machine has left for a run: cores, threads, accelerators, memory, folders.

machine -> findings
"""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from perl.doctor.codes import Finding
from perl.run.devices import accelerator

GIB = 2**30
_LEAST_ROOM, _LEAST_MEMORY = 2 * GIB, 1 * GIB
# A thread more than there are cores may cost nothing; this many times the time of one thread is more than chance.
_SLOWER = 1.5
_SIDE, _PRODUCTS = 256, 20
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_MEMORY = Path("/proc/meminfo")


def look_at_cores() -> Iterator[Finding]:
    """Cores, torch's threads, what those cost, and how busy the cores are already."""
    cores, threads = usable_cores(), torch.get_num_threads()
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    slower = times_slower(threads) if threads > 1 else 1.0
    what = f"torch takes {threads} thread{'s' if threads > 1 else ''} on {cores:g} core{'s' if cores > 1 else ''}"
    much = f", which is {slower:.1f} times slower than 1 thread" if slower > _SLOWER else ""
    if threads > cores:
        fix = f"export OMP_NUM_THREADS={max(1, int(cores))}, or engine.threads in the recipe"
        yield Finding("PRL108", "problem" if much else "note", f"{what}{much}", fix)
    elif much:
        fix = "wait until other processes are done, or export OMP_NUM_THREADS=1"
        yield Finding("PRL108", "note", f"{what}{much}: {busy:.1f} processes want these cores", fix)
    else:
        yield Finding("PRL108", "ok", f"{what}; {busy:.1f} processes have wanted them in the last minute")


def usable_cores() -> float:
    """Cores that this process may use: those it is bound to, or what its container may take of them."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_QUOTA.read_text(encoding="utf-8").split()
        return min(bound, float(quota) / float(period))
    except (OSError, ValueError):  # no container, or one without a bound
        return float(bound)


def times_slower(threads: int) -> float:
    """How much longer products take with so many threads than with one; measured, below 1 where threads help."""
    before, matrix, shortest = torch.get_num_threads(), torch.ones(_SIDE, _SIDE), []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            tries = []
            for _ in range(3):  # of which other processes have disturbed the shortest least
                began = time.perf_counter()
                for _ in range(_PRODUCTS):
                    matrix @ matrix
                tries.append(time.perf_counter() - began)
            shortest.append(min(tries))
    finally:
        torch.set_num_threads(before)
    return shortest[1] / shortest[0]


def look_at_accelerator() -> Iterator[Finding]:
    """Each device that torch sees, with what is free of its memory; and the attention kernel."""
    device = accelerator()
    if device is None:
        yield Finding("PRL102", "note", "none: runs compute on the CPU")
        yield Finding("PRL103", "ok", "torch's, on the CPU")
        return
    module = torch.get_device_module(device)
    for number in range(module.device_count()):
        free, whole = module.mem_get_info(number)
        name = f"{device.type}:{number} {module.get_device_name(number)}"
        message = f"{name}: {free / GIB:.1f} of {whole / GIB:.1f} GiB are free"
        taken = free < 0.9 * whole
        fix = "another process holds the rest: nvidia-smi lists them" if taken else ""
        yield Finding("PRL102", "note" if taken else "ok", message, fix)
    from transformers.utils import is_flash_attn_2_available

    if is_flash_attn_2_available():
        yield Finding("PRL103", "ok", "FlashAttention 2 can be used (model.attn_implementation: flash_attention_2)")
    else:
        yield Finding("PRL103", "note", "torch's: flash-attn is not installed", "pip install 'perl-rl[flash]'")


def look_at_memory() -> Iterator[Finding]:
    """What is free of the machine's memory; nothing where the system does not say it."""
    try:
        lines = _MEMORY.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    free, whole = found["MemAvailable"], found["MemTotal"]
    little = free < _LEAST_MEMORY
    fix = "end other processes; `perl plan RECIPE` says what a run needs" if little else ""
    message = f"{free / GIB:.1f} of {whole / GIB:.1f} GiB are free"
    yield Finding("PRL109", "problem" if little else "ok", message, fix)


def look_at_folders(runs: Path) -> Iterator[Finding]:
    """The folder of runs and the Hub's cache.

    Args:
        runs: Where runs are written.
    """
    from huggingface_hub import constants

    for what, folder, fix in (
        ("folder of runs", runs, "--output, or train.output_dir"),
        ("cache of the Hub", Path(constants.HF_HUB_CACHE), "HF_HOME"),
    ):
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        room = shutil.disk_usage(there).free
        if not os.access(there, os.W_OK):
            yield Finding("PRL107", "problem", f"{what} ({folder}) cannot be written", f"another place: {fix}")
        elif room < _LEAST_ROOM:
            message = f"{what} ({folder}): {room / GIB:.1f} GiB are left on that disk"
            yield Finding("PRL107", "problem", message, f"free some, or another place: {fix}")
        else:
            yield Finding("PRL107", "ok", f"{what} ({folder}) can be written, {room / GIB:,.0f} GiB are left")
