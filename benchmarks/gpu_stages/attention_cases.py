"""Packed attention beside SDPA called segment by segment, both held to a dense softmax in float64.

type, head size, heads, layout -> largest deviation of a token's output or gradient, and whether the right kernel ran

The kernel for segments of different lengths runs on CUDA only; elsewhere the same cases show what runs in its place.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from gpu_stages.doctor import DTYPES, HEAD_SIZES, Attentions
from gpu_stages.setting import Row, Setting
from perl.packing.attention import KERNEL_CALL, machine_of, packed_attention, why_by_segment
from perl.packing.rows import Layout, Segment

# Deviations that rounding explains, whatever SDPA's own are: three spacings of the half types.
FLOORS = {"bfloat16": 3 * 2**-7, "float16": 3 * 2**-10, "float32": 1e-5}
TIMES_SDPA = 2.0
HEADS = {"mha": (4, 4), "gqa": (8, 2)}
# Each a segment, or a prompt with the completions that see it. Lengths around the sizes of a kernel's blocks.
LENGTHS: dict[str, list[int | tuple[int, list[int]]]] = {
    "alone": [1, 700, 64, 1, 129, 33, 512, 255, 1],
    "shared": [(200, [1, 300, 65]), 40, (1, [17, 1]), (129, [128, 1, 64]), (64, [64]), 1],
}
SHORT_LENGTHS: dict[str, list[int | tuple[int, list[int]]]] = {
    "alone": [1, 33, 17, 1],
    "shared": [(12, [1, 20, 5]), 4, (1, [7, 1])],
}
KERNEL = "_varlen_attn"  # how its operators' names begin
Tensors = list[torch.Tensor]


def attention_cases(setting: Setting) -> dict[str, Callable[[], Row]]:
    """A case for each type, head size, number of heads and layout; one under autocast."""
    lengths = SHORT_LENGTHS if setting.tiny else LENGTHS
    layouts = {name: layout_of(parts, setting.device) for name, parts in lengths.items()}
    cases: dict[str, Callable[[], Row]] = {}
    for dtype, size, heads, how in itertools.product(DTYPES, HEAD_SIZES, HEADS, layouts):
        if setting.tiny and (heads, how) not in (("gqa", "shared"), ("mha", "alone")):
            continue
        cases[f"attention {dtype} {size} {heads} {how}"] = partial(
            compare, setting.device, layouts[how], dtype, size, HEADS[heads]
        )
    for how, layout in layouts.items():
        cases[f"attention autocast 128 gqa {how}"] = partial(
            compare, setting.device, layout, "float32", 128, HEADS["gqa"], autocast=True
        )
    return cases


def layout_of(parts: list[int | tuple[int, list[int]]], device: torch.device) -> Layout:
    """The segments one after the other."""
    segments: list[Segment] = []
    place = 0
    for part in parts:
        length, completions = part if isinstance(part, tuple) else (part, [])
        prompt, place = place, place + length
        segments.append(Segment(prompt, length))
        for completion in completions:
            segments.append(Segment(place, completion, prefix_start=prompt, prefix_length=length))
            place += completion
    return Layout(tuple(segments), device)


def compare(
    device: torch.device, layout: Layout, dtype: str, size: int, heads: tuple[int, int], *, autocast: bool = False
) -> Row:
    """The row of a case.

    Args:
        device: Where it runs.
        layout: Which tokens see which.
        dtype: Of queries, keys and values.
        size: Of a head.
        heads: Of queries, of keys and values.
        autocast: Whether under autocast to bfloat16, and judged as such.
    """
    generator = torch.Generator().manual_seed(size)
    length = sum(segment.length for segment in layout.segments)

    def drawn(count: int) -> torch.Tensor:
        return torch.randn(1, count, length, size, generator=generator).to(device, DTYPES[dtype])

    tensors = [drawn(heads[0]), drawn(heads[1]), drawn(heads[1])]
    weights = drawn(heads[0]).transpose(1, 2)  # of the outputs, in the sum whose gradient is taken
    expected = _with_gradients(_dense, [tensor.double() for tensor in tensors], weights.double(), layout)
    sdpa = _with_gradients(_by_sdpa, tensors, weights, layout)
    with Attentions() as operators, torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        found = _with_gradients(packed_attention, tensors, weights, layout)
    own = [deviation(*pair) for pair in zip(found, expected, strict=True)]
    beside = [deviation(*pair) for pair in zip(sdpa, expected, strict=True)]
    judged = "bfloat16" if autocast else dtype
    why = why_by_segment(machine_of(device), DTYPES[judged], size, size, KERNEL_CALL)
    ran = any(name.startswith(KERNEL) for name in operators.names)
    # Where SDPA has no numbers of its own, rounding alone must explain what is found.
    tolerance = max(FLOORS[judged], TIMES_SDPA * max(beside) if max(beside) < math.inf else 0.0)
    return {
        "difference": max(own),
        "of": dict(zip(("output", "query", "key", "value"), own, strict=True)),
        "sdpa": max(beside),
        "tolerance": tolerance,
        "operators": list(operators.names) or ["math"],
        "by segment": why or "no",
        "ok": max(own) <= tolerance and ran == (why is None),
    }


def _with_gradients(
    attend: Callable[..., torch.Tensor], tensors: Tensors, weights: torch.Tensor, layout: Layout
) -> Tensors:
    """Output and gradients, each as (L, ...)."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output_1LHD = attend(*leaves, layout)
    gradients = torch.autograd.grad((output_1LHD * weights).sum(), leaves)
    return [output_1LHD[0].detach(), *(gradient[0].transpose(0, 1) for gradient in gradients)]


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest over tokens: norm of the error over that of the token's vector, or of a usual token's if that is more.

    Infinite where a number is none, for ``max`` leaves a NaN out that is not its first argument.
    """
    norms_L = expected.flatten(1).norm(dim=1)
    errors_L = (found.double() - expected).flatten(1).norm(dim=1)
    largest = float((errors_L / norms_L.clamp_min(float(norms_L.square().mean().sqrt()))).max())
    return math.inf if math.isnan(largest) else largest


def _dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """(1, L, H, D) from all scores and a mask that is written segment by segment."""
    length, size = query.shape[2:]
    seen_LL = torch.zeros(length, length, dtype=torch.bool, device=query.device)
    for segment in layout.segments:
        own = slice(segment.start, segment.start + segment.length)
        seen_LL[own, own] = torch.ones(segment.length, segment.length, device=query.device).tril().bool()
        seen_LL[own, segment.prefix_start : segment.prefix_start + segment.prefix_length] = True
    groups = query.size(1) // key.size(1)
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3)) / size**0.5
    weights = scores.masked_fill(~seen_LL, -torch.inf).softmax(dim=-1)
    return (weights @ value).transpose(1, 2)


def _by_sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """(1, L, H, D) in a call a segment, heads repeated."""
    groups = query.size(1) // key.size(1)
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    parts = []
    for segment in layout.segments:
        own = slice(segment.start, segment.start + segment.length)
        prompt = slice(segment.prefix_start, segment.prefix_start + segment.prefix_length)
        k, v = (torch.cat([tensor[:, :, prompt], tensor[:, :, own]], dim=2) for tensor in (key, value))
        mask = torch.ones(segment.length, k.size(2), dtype=torch.bool, device=k.device).tril(segment.prefix_length)
        parts.append(functional.scaled_dot_product_attention(query[:, :, own], k, v, attn_mask=mask))
    return torch.cat(parts, dim=2).transpose(1, 2)
