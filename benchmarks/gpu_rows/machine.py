"""What there is: the GPU and what it reaches, versions, packages that are missing, the attention operator that runs.

Setting -> facts; "ok" is whether everything is there that the project needs
"""

import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_wheels import dependencies, installed, walk
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_rows.setting import GIB, Numbers, Setting

PACKAGES = ("transformers", "trl", "peft", "accelerate", "datasets", "numpy", "triton", "bitsandbytes")
SHOWN = 5  # of what is missing


def machine(setting: Setting) -> Numbers:
    """All of it; the slow parts are a large product and a copy."""
    missing = [f"{needed} ({by}): {found.version if found else 'none'}" for needed, by, found in unmet()]
    facts = {"python": platform.python_version(), "torch": torch.__version__, "missing": missing, "ok": not missing}
    facts |= {"versions": {name: found.version for name in PACKAGES if (found := installed(name))}}
    size, count = (256, 2**20) if setting.tiny else (8192, 2**30)
    left, right = (torch.randn(size, size, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.zeros(count, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    facts["matmul_tflops"] = 2 * size**3 / fastest(lambda: left @ right, setting) / 1e12
    facts["copy_gb_per_s"] = 2 * count / fastest(lambda: target.copy_(source), setting) / 1e9
    name = platform.machine()
    if setting.on_cuda:
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        facts |= {"driver": _driver(), "cuda": torch.version.cuda, "compiler": shutil.which("cc") or "none"}
        facts |= {"free_gib": free / GIB, "total_gib": total / GIB}
    facts["device"] = name
    wrong = f"; {len(missing)} packages missing or too old: {', '.join(missing[:SHOWN])}" if missing else ""
    speeds = f"{facts['matmul_tflops']:.3g} TFLOP/s in bfloat16, copies {facts['copy_gb_per_s']:.4g} GB/s"
    return {**facts, "says": f"{name}, Python {facts['python']}, torch {facts['torch']}; {speeds}{wrong}"}


def unmet() -> list[tuple[Any, str, Any]]:
    """Requirements, indirect ones too, for which there is no package or one of another version."""
    return [
        (needed, by, found)
        for needed, by, found in walk(dependencies())
        if found is None or not needed.specifier.contains(found.version, prereleases=True)
    ]


def fastest(run: Callable[[], object], setting: Setting, repeats: int = 10) -> float:
    """Seconds of the fastest of several runs, after one that warms up; the device has finished with each."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        run()
        setting.settle()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _driver() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown"
    asked = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=10)  # noqa: S603 (fixed)
    return said.stdout.split("\n")[0].strip() or "unknown"


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
