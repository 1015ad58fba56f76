"""What hardware a plan is made for: one small table, and what this machine is.

name, or gigabytes -> Hardware

Numbers are those of the makers' data sheets, dense and not sparse: an upper bound that no program reaches. What a
program does reach is stated where it is assumed (:mod:`perl.training.cost_time`) or measured
(:mod:`perl.training.measured_rates`).
"""

import os
import re
from dataclasses import dataclass, replace

import torch

from perl.errors import PerlError, did_you_mean

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One device.

    Attributes:
        name: As ``--gpu`` takes it.
        peak: FLOP/s of products in half precision, dense (of a CPU: in float32).
        float32: The same in float32, as torch multiplies unless it is told otherwise.
        tf32: The same in TF32, which ``train.tf32`` chooses; without tensor cores for it those of float32.
        bandwidth: Bytes/s between its memory and its cores.
        memory: Bytes that a program can have.
        link: Bytes/s that a device sends to the others of its node.
        bfloat16: Whether it multiplies bfloat16.
        source: Where the numbers are from.
    """

    name: str
    peak: float
    float32: float
    tf32: float
    bandwidth: float
    memory: float
    link: float
    bfloat16: bool = True
    source: str = "NVIDIA data sheet"

    @property
    def on_cpu(self) -> bool:
        """Whether it is a CPU: rollouts, passes and processes share it."""
        return self.name == "CPU"

    def peak_of(self, size: int, *, tf32: bool = False) -> float:
        """FLOP/s of products of numbers with so many bytes."""
        if size < torch.float32.itemsize:
            return self.peak
        return self.tf32 if tf32 else self.float32


# From NVIDIA's data sheets of T4, L4, A10, A100, H100 (SXM) and H200 (SXM), and the white paper of the Ada architecture
# for the RTX 4090: products in half precision, in float32 ("FP32") and in TF32, where a sheet gives only sparse numbers
# half of them. NVLink counts both directions; here is one. PCIe: x16 of the generation that the card has.
HARDWARE = {
    device.name: device
    for device in (
        Hardware("T4", 65e12, 8.1e12, 8.1e12, 320e9, 14.7 * GIB, 16e9, bfloat16=False),  # float16; PCIe 3
        Hardware("L4", 121e12, 30.3e12, 60e12, 300e9, 22.0 * GIB, 32e9),  # PCIe 4
        Hardware("A10", 125e12, 31.2e12, 62.5e12, 600e9, 22.0 * GIB, 32e9),
        Hardware("RTX 4090", 165e12, 82.6e12, 82.6e12, 1008e9, 23.5 * GIB, 32e9),  # accumulating in float32
        Hardware("A100 40GB", 312e12, 19.5e12, 156e12, 1555e9, 39.4 * GIB, 300e9),  # SXM, NVLink 3
        Hardware("A100 80GB", 312e12, 19.5e12, 156e12, 2039e9, 79.2 * GIB, 300e9),
        Hardware("H100", 989e12, 67e12, 494.5e12, 3350e9, 79.2 * GIB, 450e9),  # SXM, NVLink 4
        Hardware("H200", 989e12, 67e12, 494.5e12, 4800e9, 139.8 * GIB, 450e9),
    )
}
# What a card of a size that is sold really has: of several the least (a T4, an L4 or A10G, an L40S or A6000, ...).
SIZES = {16: 14.7, 24: 22.0, 40: 39.4, 48: 44.4, 80: 79.2, 141: 139.8}
# Of another size: what the driver leaves.
_LEFT = 0.93
# Assumed of a CPU until it is measured: two AVX2 units of 8 float32, multiply and add, at 2.5 GHz.
_CORE_PEAK = 2 * 8 * 2 * 2.5e9
_CORE_BANDWIDTH, _CPU_LINK = 5e9, 2e9


def hardware_named(name: str | None, gigabytes: float | None = None) -> Hardware:
    """The row of a name; without one that of the GPU which is sold with so much memory, or this machine's.

    Args:
        name: As a person writes it: ``h100``, ``A100-80GB``, ``cpu``.
        gigabytes: Memory as it is sold; where the row has other memory, it takes its place, and the name's.

    Raises:
        PerlError: There is no such row.
    """
    if name is not None and _plain(name) == "cpu":
        return cpu(gigabytes)
    if gigabytes is None:
        return this_machine() if name is None else _rows(name)[-1]  # of an A100 the larger
    rows = [HARDWARE[this_machine(gigabytes).name]] if name is None else _rows(name)
    found = next((row for row in rows if row.memory == sold_as(gigabytes)), None)
    return found or _with_memory(rows[-1], gigabytes)


def _with_memory(row: Hardware, gigabytes: float) -> Hardware:
    """A card with other memory, under another name: no data sheet is about it."""
    source = f"memory as given, all else that of {row.name}, {row.source}"
    return replace(row, name=f"{gigabytes:g} GB", memory=sold_as(gigabytes), source=source)


def sold_as(gigabytes: float) -> float:
    """Bytes that a program can have of a card that is sold with so many gigabytes."""
    return (
        GIB * SIZES.get(int(gigabytes), _LEFT * gigabytes) if gigabytes == int(gigabytes) else GIB * _LEFT * gigabytes
    )


def cpu(gigabytes: float | None = None) -> Hardware:
    """This machine's CPU with the threads that torch has, assumed and not measured.

    Args:
        gigabytes: Its memory; None: what this machine has.
    """
    threads = torch.get_num_threads()
    here = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    memory = here if gigabytes is None else GIB * gigabytes
    source = f"assumed for {threads} threads; --measure measures it"
    peak = threads * _CORE_PEAK
    return Hardware("CPU", peak, peak, peak, threads * _CORE_BANDWIDTH, memory, _CPU_LINK, source=source)


def this_machine(gigabytes: float | None = None) -> Hardware:
    """The GPU that is here; without one the smallest of the table that has the memory, else an 80 GB card."""
    if torch.cuda.is_available():
        seen, memory = torch.cuda.get_device_name(), float(torch.cuda.get_device_properties(0).total_memory)
        here = _row_of(seen)
        if here is not None:
            return replace(here, memory=memory)
        row = next((row for row in HARDWARE.values() if row.memory >= memory), HARDWARE["H200"])
        bfloat16 = torch.cuda.get_device_capability() >= (8, 0)
        return replace(row, name=seen, memory=memory, bfloat16=bfloat16, source=f"assumed as of {row.name}")
    wanted = sold_as(80.0 if gigabytes is None else gigabytes)
    return next((row for row in HARDWARE.values() if row.memory >= wanted), HARDWARE["H200"])


def _row_of(seen: str) -> Hardware | None:
    """The row of a card by the name that CUDA has for it, word for word: an L40S is no L4."""
    words = set(re.split(r"[^a-z0-9]+", seen.lower()))
    named = {name: name.lower().split() for name in HARDWARE}
    found = [name for name, own in named.items() if {word for word in own if not word.endswith("gb")} <= words]
    return HARDWARE[max(found, key=lambda name: len(words.intersection(named[name])))] if found else None


def _rows(name: str) -> list[Hardware]:
    asked = _plain(name).removesuffix("sxm")
    matching = [row for known, row in HARDWARE.items() if asked in (_plain(known), _plain(known.split()[0]))]
    if not matching:
        raise PerlError(f"no hardware {name!r}", "--gpu", did_you_mean(name.upper(), [*HARDWARE, "CPU"]))
    return matching


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum()).removeprefix("nvidia")
