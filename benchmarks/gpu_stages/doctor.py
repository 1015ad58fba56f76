"""What there is: the machine, its GPU and what that reaches, the packages, which attention kernel is taken.

Setting -> a row for each fact

Rows ``matmul ...`` have ``tflops``, the row ``bandwidth`` has ``gb_per_s``: what this device reaches at all.
Other stages measure their own roof, since each can be run alone.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from gpu_wheels import INSTALL
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_stages.requirements import dependencies, not_importable, unmet
from gpu_stages.setting import Row, Setting
from gpu_stages.timing import fastest
from perl.packing.attention import packed_attention
from perl.packing.rows import Layout, Segment

CORE = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "datasets", "numpy")
OPTIONAL = ("flash_attn", "bitsandbytes", "liger_kernel", "vllm", "matplotlib", "kernels")
HEAD_SIZES = (64, 80, 96, 128, 256, 512)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_HEAD_TOLERANCE = 2e-2  # relative: bfloat16's rounding
SETUP = (
    "where there is an index: python benchmarks/gpu_wheels.py; then copy the checkout with .whl/, and there: "
    f"{INSTALL} && export PYTHONPATH=$PWD/src:$PWD/.site"
)


def measure(setting: Setting) -> Iterator[Row]:
    """All facts, the quick ones first."""
    device = setting.device
    size = 256 if setting.tiny else 8192
    cases: dict[str, Callable[[], Row]] = {
        "machine": _machine,
        "gpu": partial(_gpu, device),
        "allocator": partial(_allocator, device),
        "packages": partial(_packages, CORE),
        "optional packages": partial(_packages, OPTIONAL),
        "requirements": _requirements,
        "imports": _imports,
        "bandwidth": partial(_bandwidth, device, 2**20 if setting.tiny else 2**30),
    }
    for name in DTYPES:
        cases[f"matmul {name}"] = partial(_matmul, device, DTYPES[name], size if name != "float32" else size // 2)
    cases["matmul tf32"] = partial(_matmul, device, torch.float32, size, tf32=True)
    for name, dtype in DTYPES.items():
        for head_size in HEAD_SIZES:
            cases[f"attention {name} {head_size}"] = partial(_attention, device, dtype, head_size)
    for name in ("float32", "bfloat16"):
        cases[f"head {name}"] = partial(_head, device, DTYPES[name])
    cases["compile"] = partial(_compile, device)
    cases["set up"] = lambda: {"value": SETUP}
    yield from setting.each(cases)


def table(rows: list[Row]) -> str:
    """A line a fact; a matrix of the attention kernels."""
    lines = []
    for row in rows:
        if row["case"].startswith("attention "):
            continue
        value = row["value"]
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        lines.append(f"{row['case']:18} {shown}" + ("  FAILED" if row.get("ok") is False else ""))
    kernels = {tuple(row["case"].split()[1:]): row["value"] for row in rows if row["case"].startswith("attention ")}
    if kernels:
        lines.append("attention, forward and backward, by type and head size:")
    for dtype in DTYPES:
        found = {size: kernels[dtype, str(size)] for size in HEAD_SIZES if (dtype, str(size)) in kernels}
        for kernel in dict.fromkeys(found.values()):
            sizes = ", ".join(str(size) for size, own in found.items() if own == kernel)
            lines.append(f"  {dtype:9} {sizes}: {kernel}")
    return "\n".join(lines)


def _machine() -> Row:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    value = {"python": platform.python_version(), "system": platform.platform(), "cores": cores}
    return {"value": {**value, "memory": f"{memory / 2**30:.0f} GiB", "C compiler": shutil.which("cc") or "none"}}


def _gpu(device: torch.device) -> Row:
    if device.type != "cuda":
        return {"skipped": f"the device is a {device.type}"}
    known = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    value = {
        "name": known.name,
        "count": torch.cuda.device_count(),
        "driver": _driver(),
        "CUDA": torch.version.cuda,
        "capability": f"{known.major}.{known.minor}",
        "multiprocessors": known.multi_processor_count,
        "memory": f"{total / 2**30:.1f} GiB",
        "free": f"{free / 2**30:.1f} GiB",
        "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
    }
    return {"value": value, "free_bytes": free, "total_bytes": total}


def _driver() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown (no nvidia-smi)"
    asked = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30)  # noqa: S603 (fixed)
    return said.stdout.split("\n")[0].strip() or "unknown"


def _allocator(device: torch.device) -> Row:
    """Whether freed memory can be joined: without expandable segments passes of changing length fragment it."""
    if device.type != "cuda":
        return {"skipped": f"the device is a {device.type}"}
    asked = {name: os.environ[name] for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if name in os.environ}
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    expandable = settings.get("expandable_segments")
    return {"value": {"expandable segments": expandable, "asked for": asked or "nothing"}}


def _packages(names: tuple[str, ...]) -> Row:
    value = {}
    for name in names:
        try:
            value[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            value[name] = "none"
    return {"value": value}


def _requirements() -> Row:
    """What pip would still install; the range that we state and the versions here."""
    missing = dict(unmet(dependencies()))
    return {"value": missing or "all there", "ok": not missing}


def _imports() -> Row:
    missing = dict(not_importable())
    return {"value": missing or "all come", "ok": not missing}


def _matmul(device: torch.device, dtype: torch.dtype, size: int, *, tf32: bool = False) -> Row:
    """FLOPs a second of a product of square matrices: what a kernel can reach at all."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = fastest(lambda: left @ right, device)
    finally:
        torch.set_float32_matmul_precision(before)
    tflops = 2 * size**3 / seconds / 1e12
    return {"value": f"{tflops:.4g} TFLOP/s of {size} x {size}", "tflops": tflops}


def _bandwidth(device: torch.device, count: int) -> Row:
    """Bytes a second that a copy moves, read and written."""
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    gb_per_s = 2 * count / fastest(lambda: target.copy_(source), device) / 1e9
    return {"value": f"{gb_per_s:.4g} GB/s", "gb_per_s": gb_per_s}


class Attentions(TorchDispatchMode):
    """Notes which of PyTorch's attention operators run, whatever has chosen them."""

    def __init__(self) -> None:
        """None yet."""
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_dispatch__(  # noqa: D105 (torch's)
        self, func: object, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        name = str(func)
        if "attention" in name or "attn" in name:
            self.names[name.removesuffix(".default").split(".")[-1].split("::")[-1]] = None
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


def _attention(device: torch.device, dtype: torch.dtype, head_size: int) -> Row:
    """Which operators run packed rows of this type, found by running them."""
    layout = Layout((Segment(0, 20), Segment(20, 12), Segment(32, 7, prefix_start=20, prefix_length=12)), device)
    query, key, value = (
        torch.randn(1, heads, 39, head_size, device=device, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)
    )
    with Attentions() as seen:
        packed_attention(query, key, value, layout).float().square().sum().backward()
    return {"value": " + ".join(seen.names) or "math (matrix products)"}


def _head(device: torch.device, dtype: torch.dtype) -> Row:
    """Whether the head of a trainer runs, forward and backward: without it nothing is trained.

    On CUDA it is a Triton kernel, which needs a C compiler.
    """
    from perl.packing.head import (  # with TRL, which may be missing: that costs this row alone
        LogitSettings,
        head_log_probs,
    )

    started = time.perf_counter()
    hidden_SD = torch.randn(70, 64, device=device).to(dtype).requires_grad_()
    weight_VD = (torch.randn(1000, 64, device=device) / 8).to(dtype)
    targets_S = torch.randint(1000, (70,), device=device)
    log_probs_S, _ = head_log_probs(hidden_SD, weight_VD, None, targets_S, LogitSettings())
    found = log_probs_S, *torch.autograd.grad(log_probs_S.sum(), hidden_SD)
    seconds = time.perf_counter() - started
    exact_SD = hidden_SD.detach().double().requires_grad_()
    exact_S = (exact_SD @ weight_VD.double().t()).log_softmax(dim=-1).gather(1, targets_S[:, None])[:, 0]
    expected = exact_S, *torch.autograd.grad(exact_S.sum(), exact_SD)
    off = [float(((one - other).norm() / other.norm()).detach()) for one, other in zip(found, expected, strict=True)]
    value = f"works, off by {off[0]:.1e}, its gradient by {off[1]:.1e}; {seconds:.1f} s for a first small pass"
    return {"value": value, "off": off, "ok": all(one <= _HEAD_TOLERANCE for one in off)}


def _compile(device: torch.device) -> Row:
    """Whether torch.compile works here: it needs triton and a C compiler."""
    if device.type != "cuda":
        return {"skipped": f"the device is a {device.type}"}
    if not (os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")):
        return {"skipped": "no C compiler, which triton needs"}
    started = time.perf_counter()
    numbers = torch.randn(1000, device=device)
    found = torch.compile(lambda x: (x.sin() + x).square().sum())(numbers)
    expected = (numbers.sin() + numbers).square().sum()
    off = float((found - expected).abs() / expected)
    return {"value": f"works, {time.perf_counter() - started:.1f} s for a first small function", "ok": off < 1e-5}
