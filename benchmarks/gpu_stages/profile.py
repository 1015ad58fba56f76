"""Where the time of a training step goes, kernel by kernel, and how far that is from what the device can do.

Setting -> rows: a step each, its kernels by kind, its roofline

A steady step is taken again and again: timed; under ``torch.profiler``; with FLOPs, then with bytes counted. Where
counting fails there is no roofline, and the row, which keeps the rest, says so. A case fails then, and where our
trainer padded rows or did not share prompts.

Idle is what the timed step took beyond the time in which some kernel ran. The roofline of a kind of kernels is the
larger of its FLOPs over the measured speed of a large product and its bytes, read and written, over the measured
bandwidth, so "roof" is the least that these operations can take; attention and products are bound by the first, all
else by the second. Operations that Triton kernels stand for are not seen by the count of bytes (the head's softmax).
On a CPU operations take the place of kernels.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from step_cases import draw_rollouts
from step_flops import counter
from step_turns import Meter, adapter_of, how_it_ran, make_trainer, take_turn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpu_stages.setting import Row, Setting, attempt
from gpu_stages.shapes import Roof, measure_roof, one_row, reasoning, scale_of, warm_up

# The first that is found in a name of a kernel or an operation decides.
_KINDS = {
    "attention": r"flash|fmha|attention|attn",
    "head": r"_forward_kernel|_backward_kernel|softmax|logsumexp|cross_entropy|nll_loss",
    "optimizer": r"multi_tensor_apply|adam|sgd|_foreach",
    "matmul": r"gemm|cutlass|cublas|nvjet|xmma|::mm\b|::addmm|::bmm|::baddbmm|::matmul|::linear|splitk|dot_kernel",
    "copies": r"copy|memcpy|memset|::cat\b|catarray|index|gather|scatter|::to\b|::stack|::fill|fillfunctor|clone"
    r"|embedding",
    "norm, rope, elementwise": r"elementwise|reduce|triton|rsqrt|norm|silu|::mul|::add|::sub|::neg|::pow|::mean|::sum"
    r"|::where|::exp|::div|::sin|::cos|sigmoid",
}
OTHER = "other"
IDLE = "idle"
_SHOWN = 12


def kind_of(name: str) -> str:
    """What a kernel, or an operation of PyTorch, does."""
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of some spans lasts.

    Args:
        spans: Begin and end of each, in one unit.
    """
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write, by kind; views move nothing.

    Attributes:
        bytes: Kind -> bytes.
    """

    def __init__(self) -> None:
        """Nothing moved yet."""
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Runs the operation and adds its arguments' and its results' bytes."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in str(func):
            read = {name: value for name, value in (kwargs or {}).items() if name != "out"}  # it is the result
            tensors = [leaf for leaf in tree_leaves((args, read, result)) if isinstance(leaf, torch.Tensor)]
            self.bytes[kind_of(str(func).replace(".", "::"))] += sum(tensor.nbytes for tensor in tensors)
        return result


def measure(setting: Setting) -> Iterator[Row]:
    """One packed row of the smaller model; the many rows of the larger one."""
    roof = measure_roof(setting.device, tiny=setting.tiny)
    setting.clear()
    cases = {
        "Qwen3-0.6B row 16384": partial(of_rows, setting, roof),
        "Qwen2.5-1.5B reasoning": partial(of_reasoning, setting, roof),
    }
    yield from setting.each(cases)


def of_rows(setting: Setting, roof: Roof) -> Row:
    """As the stage ``step`` has them: a row a pass, activations computed again."""
    tokens = 48 if setting.tiny else 16_384
    case = one_row(tokens, tiny=setting.tiny)
    options = {"gradient_checkpointing": True, "train_tokens_per_microbatch": tokens, "optim": "adamw_torch_fused"}
    scale = scale_of("Qwen3-0.6B", tiny=setting.tiny, device=setting.device, **options, learning_rate=1e-5)
    return of_step(setting, roof, case, replace(scale, rows=case.generations))


def of_reasoning(setting: Setting, roof: Roof) -> Row:
    """A few groups: enough to fill passes."""
    case = reasoning(tiny=setting.tiny)
    scale = scale_of("Qwen2.5-1.5B", tiny=setting.tiny, device=setting.device)
    return of_step(setting, roof, case, replace(scale, groups=2 if setting.tiny else 5, rows=case.generations))


def of_step(setting: Setting, roof: Roof, case: Any, scale: Any) -> Row:  # noqa: ANN401 (Case, Scale)
    """The turns, after one that warms up; each ends in the step that is looked at."""
    rollouts = warm_up(case, scale.groups) + draw_rollouts(case, scale.groups)
    trainer, meter = make_trainer("perl", case, scale, rollouts, str(setting.folder))
    start = {name: parameter.detach().clone() for name, parameter in adapter_of(trainer).items()}
    for _ in range(2):
        take_turn(trainer, meter, start)
    seconds, meter.watched = meter.seconds[-1], len(meter.seconds) - 1

    on_cuda = setting.device.type == "cuda"
    meter.watch = profiler = profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU])
    take_turn(trainer, meter, start)
    kernels = kernels_of(profiler, on_cuda=on_cuda)

    how = how_it_ran(trainer)
    counted = attempt("counts", partial(counts_of, trainer, meter, start))
    row = summary(seconds, kernels, counted.get("flops", {}), counted.get("bytes", {}), roof) | how
    if "error" in counted:
        row |= {"ok": False, "not_counted": counted["error"], "log": counted["log"]}
    return row


def counts_of(trainer: Any, meter: Meter, start: dict[str, torch.Tensor]) -> Row:  # noqa: ANN401 (a trainer)
    """FLOPs and bytes of the step that is watched, by kind."""
    flops, traffic = counter(), Traffic()
    for watch in (flops, traffic):
        meter.watch = watch
        take_turn(trainer, meter, start)
    work = Counter[str]()
    for operation, count in flops.get_flop_counts()["Global"].items():
        work[kind_of(str(operation).replace(".", "::"))] += count
    return {"flops": dict(work), "bytes": dict(traffic.bytes)}


def kernels_of(profiler: profile, *, on_cuda: bool) -> list[tuple[str, float, float]]:
    """Names, begins and ends in seconds of all kernels.

    On a CPU of operations, each as long as it ran by itself, without those that it called.
    """
    kernels = []
    for event in profiler.events():
        begin = event.time_range.start / 1e6
        if on_cuda and event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            kernels.append((event.name, begin, event.time_range.end / 1e6))
        elif not on_cuda and event.name.startswith("aten::") and event.self_cpu_time_total > 0:
            kernels.append((event.name, begin, begin + event.self_cpu_time_total / 1e6))
    return kernels


def summary(
    seconds: float,
    kernels: list[tuple[str, float, float]],
    flops: dict[str, int],
    moved: dict[str, int],
    roof: Roof,
) -> Row:
    """The row of a step.

    Args:
        seconds: Of the step, not profiled.
        kernels: Name, begin and end of each, in seconds.
        flops: By kind.
        moved: Bytes by kind.
        roof: The device's.
    """
    of_kind: dict[str, float] = defaultdict(float)
    of_name: dict[str, list[float]] = defaultdict(list)
    for name, begin, end in kernels:
        of_kind[kind_of(name)] += end - begin
        of_name[name].append(end - begin)
    running = busy((begin, end) for _, begin, end in kernels)
    of_kind[IDLE] = max(seconds - running, 0.0)
    least = {
        kind: max(flops.get(kind, 0) / roof.flops, moved.get(kind, 0) / roof.bandwidth) for kind in {*flops, *moved}
    }
    kinds = sorted({*of_kind, *least}, key=lambda kind: -of_kind.get(kind, 0.0))
    longest = sorted(of_name.items(), key=lambda item: -sum(item[1]))[:_SHOWN]
    return {
        "step_seconds": seconds,
        "busy_seconds": running,
        "roof_seconds": sum(least.values()),
        "of_roof": sum(least.values()) / seconds,
        "kinds": {
            kind: {
                "seconds": of_kind.get(kind, 0.0),
                "share": of_kind.get(kind, 0.0) / seconds,
                "roof_seconds": least.get(kind, 0.0),
                "flops": flops.get(kind, 0),
                "bytes": moved.get(kind, 0),
            }
            for kind in kinds
        },
        "kernels": [{"name": name[:120], "seconds": sum(times), "count": len(times)} for name, times in longest],
        "roof": vars(roof),
    }


def table(rows: list[Row]) -> str:
    """For each step the kinds by time, what they could take, and what most is lost on."""
    lines = []
    for row in rows:
        found = f"{row['case']}: {row['step_seconds']:.3f} s, {row['busy_seconds']:.3f} of it busy, "
        roofline = f"roofline {row['roof_seconds']:.3f} ({row['of_roof']:.0%})"
        lines.append(found + (f"not counted: {row['not_counted']}" if "not_counted" in row else roofline))
        if row["why_not"]:
            lines.append(f"  rows are {'packed, prompts not shared' if row['packed'] else 'PADDED'}: {row['why_not']}")
        lines.append(f"  {'kind':26} {'seconds':>9} {'share':>6} {'roofline':>9} {'lost':>9}")
        for kind, numbers in row["kinds"].items():
            taken, least = numbers["seconds"], numbers["roof_seconds"]
            lines.append(f"  {kind:26} {taken:>9.4f} {numbers['share']:>6.1%} {least:>9.4f} {taken - least:>9.4f}")
        lines += [f"  {one['seconds']:>9.4f} s {one['count']:>6} x {one['name'][:90]}" for one in row["kernels"]]
    return "\n".join(lines)
