"""What hardware a plan is made for, and what programs reach there: one small table, and what this machine is.

name, or gigabytes -> Hardware; Hardware, bytes -> FLOP/s, seconds of a token

Numbers are those of the makers' data sheets, dense and not sparse: an upper bound that no program reaches. So what a
program takes is a range: from what well-tuned programs reach to what plain ones do.
"""

import os
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from perl.errors import PerlError, did_you_mean
from perl.recipe.rollout_section import Capabilities

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One device.

    Attributes:
        name: As ``--gpu`` takes it.
        peak: FLOP/s of products in half precision, dense.
        float32: The same in float32.
        bandwidth: Bytes/s between its memory and its cores.
        memory: Bytes that a program can have.
        bfloat16: Whether it multiplies bfloat16.
        source: Where the numbers are from.
    """

    name: str
    peak: float
    float32: float
    bandwidth: float
    memory: float
    bfloat16: bool = True
    source: str = "NVIDIA data sheet"

    @property
    def on_cpu(self) -> bool:
        """Whether it is a CPU: rollouts, passes and processes share it."""
        return self.name == "CPU"


# From NVIDIA's data sheets of T4, L4, A10, A100, H100 (SXM) and H200 (SXM), and the white paper of the Ada architecture
# for the RTX 4090: products in half precision and in float32 ("FP32"), where a sheet gives only sparse numbers half of
# them.
HARDWARE = {
    device.name: device
    for device in (
        Hardware("T4", 65e12, 8.1e12, 320e9, 14.7 * GIB, bfloat16=False),  # float16
        Hardware("L4", 121e12, 30.3e12, 300e9, 22.0 * GIB),
        Hardware("A10", 125e12, 31.2e12, 600e9, 22.0 * GIB),
        Hardware("RTX 4090", 165e12, 82.6e12, 1008e9, 23.5 * GIB),  # accumulating in float32
        Hardware("A100 40GB", 312e12, 19.5e12, 1555e9, 39.4 * GIB),  # SXM
        Hardware("A100 80GB", 312e12, 19.5e12, 2039e9, 79.2 * GIB),
        Hardware("H100", 989e12, 67e12, 3350e9, 79.2 * GIB),  # SXM
        Hardware("H200", 989e12, 67e12, 4800e9, 139.8 * GIB),
    )
}
# What a card of a size that is sold really has: of several the least (a T4, an L4 or A10G, an L40S or A6000, ...).
SIZES: dict[float, float] = {16: 14.7, 24: 22.0, 40: 39.4, 48: 44.4, 80: 79.2, 141: 139.8}
# Of another size: what the driver leaves.
_LEFT = 0.93
_LARGEST = 1024.0
# Words in the name of a part of a card (multi-instance GPU), or of a smaller chip that is named like a card.
_LESS = {"mig", "laptop"}
# Assumed of a CPU's core: two vector units of 8 or, with AVX-512, 16 float32, which multiply and add at 3.5 GHz.
_CORE_PEAK = 2 * 8 * 2 * 3.5e9
_CORE_BANDWIDTH = 5e9


def hardware_named(name: str | None) -> Hardware:
    """The row of a name or of the memory that a GPU is sold with; without one this machine's.

    Args:
        name: As a person writes it: ``h100``, ``A100-80GB``, ``24GB``, ``cpu``.

    Raises:
        PerlError: There is no such row.
    """
    sold = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:gi?b?)?\s*", name or "", re.IGNORECASE)
    if name is None:
        return this_machine()
    if _plain(name) == "cpu":
        return cpu()
    if not sold:
        asked = _plain(name).removesuffix("sxm")
        matching = [row for known, row in HARDWARE.items() if asked in (_plain(known), _plain(known.split()[0]))]
        if not matching:
            raise PerlError(f"no hardware {name!r}", "--gpu", did_you_mean(name.upper(), [*HARDWARE, "CPU"]))
        return matching[-1]  # of an A100 the larger
    gigabytes = float(sold[1])
    if not 1 <= gigabytes <= _LARGEST:
        raise PerlError(f"no GPU has {gigabytes:g} GB", "--gpu", "gigabytes as it is sold with, as 24")
    row = _with_memory_of(sold_as(gigabytes))
    if row.memory == sold_as(gigabytes):
        return row
    source = f"memory as given, all else that of {row.name}, {row.source}"
    return replace(row, name=f"{gigabytes:g} GB", memory=sold_as(gigabytes), source=source)


def sold_as(gigabytes: float) -> float:
    """Bytes that a program can have of a card that is sold with so many gigabytes."""
    return GIB * SIZES.get(gigabytes, _LEFT * gigabytes)


def cpu() -> Hardware:
    """This machine's CPU with the threads that torch has, assumed and not measured."""
    threads = torch.get_num_threads()
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    source = f"assumed for {threads} threads; --measure measures it"
    has: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.11 does not say it
    float32 = threads * _CORE_PEAK * (2 if has.get("avx512_f") else 1)
    # Products of bfloat16 take a quarter of float32's time by tiles (2 to 4 were measured), half of it by vectors.
    half = float32 * (4 if has.get("amx_bf16") else 2 if has.get("avx512_bf16") else 1)
    return Hardware("CPU", half, float32, threads * _CORE_BANDWIDTH, memory, source=source)


def this_machine() -> Hardware:
    """The GPU that is here; without one a card of 80 GB."""
    if not torch.cuda.is_available():
        return _with_memory_of(sold_as(80.0))
    seen, memory = torch.cuda.get_device_name(), float(torch.cuda.get_device_properties(0).total_memory)
    words = set(re.split(r"[^a-z0-9]+", seen.lower()))  # word for word: an L40S is no L4
    named = {name: name.lower().split() for name in HARDWARE}
    found = [name for name, own in named.items() if {word for word in own if not word.endswith("gb")} <= words]
    if found and not words & _LESS:
        return replace(HARDWARE[max(found, key=lambda name: len(words.intersection(named[name])))], memory=memory)
    row, bfloat16 = _with_memory_of(memory), torch.cuda.get_device_capability() >= (8, 0)
    return replace(row, name=seen, memory=memory, bfloat16=bfloat16, source=f"assumed as of {row.name}")


def _with_memory_of(memory: float) -> Hardware:
    """The smallest of the table that has so many bytes; of more than all have, the largest."""
    return next((row for row in HARDWARE.values() if row.memory >= memory), HARDWARE["H200"])


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum()).removeprefix("nvidia")


class Range(NamedTuple):
    """From the least to the most."""

    low: float
    high: float

    def times(self, factor: float) -> "Range":
        """Both ends."""
        return Range(self.low * factor, self.high * factor)

    def plus(self, other: "Range") -> "Range":
        """One after the other."""
        return Range(self.low + other.low, self.high + other.high)


# Shares of a data sheet's number that programs reach. Products of a LoRA training: 11 to 37 % are published for one
# H100 (prime-rl's benchmarks, Qwen3 of 0.6B and 4B, 16k and 65k tokens); packed passes of large models reach half.
_OF_PEAK = Range(0.10, 0.50)
_OF_CPU_PEAK = Range(0.07, 0.90)  # matrices of a real model's size reach nearly all of it, a sandbox model's little
_OF_BANDWIDTH = Range(0.45, 0.85)
# Seconds that a layer's kernels take to be started for one token: transformers without graphs and with an adapter
# beside each matrix; vLLM with graphs. Assumed.
_LAYER_EAGER = Range(0.5e-3, 2.0e-3)
_LAYER_GRAPH = Range(0.08e-3, 0.35e-3)
_LAYER_CPU = Range(0.1e-3, 1.0e-3)
# Around a measured rate: other lengths, other loads of the machine.
AROUND_MEASURED = Range(0.75, 1.35)


def product_rate(device: Hardware, *, compute: int, sharing: int) -> Range:
    """FLOP/s that a process reaches, by the data sheet.

    Args:
        device: Of the process.
        compute: Bytes of a number that is multiplied.
        sharing: Processes that share the device.
    """
    half = 2
    share = _OF_CPU_PEAK if device.on_cpu else _OF_PEAK
    return share.times((device.peak if compute <= half else device.float32) / sharing)


def token_seconds(device: Hardware, engine: Capabilities, layers: int, read: float, *, sharing: int) -> Range:
    """Seconds of a step of the engine, in which each completion grows by a token, by the data sheet.

    Args:
        device: Of the engine.
        engine: That writes.
        layers: Of the model.
        read: Bytes of the base and of the completions' keys and values, read once.
        sharing: Processes that share the device.
    """
    layer = _LAYER_CPU if device.on_cpu else _LAYER_GRAPH if engine.takes_updates else _LAYER_EAGER
    reading = taking(read, _OF_BANDWIDTH.times(device.bandwidth / sharing))
    return Range(max(layers * layer.low, reading.low), layers * layer.high + reading.high)


def taking(work: float, rate: Range) -> Range:
    """Seconds of work at a rate."""
    return Range(work / rate.high, work / rate.low)
