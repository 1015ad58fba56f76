"""What is measured where time is left: kernels by time, compiled layers and a fused head, an NF4 base, decoding.

Setting -> numbers
"""

import re
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import compile_and_fuse
import torch
from step_cases import Case, Scale, make_base, make_tokenizer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile
from transformers import AutoModelForCausalLM, PreTrainedModel

from gpu_rows.models import compiling_quickly
from gpu_rows.setting import GIB, Numbers, Setting
from gpu_rows.speed import LONG, planned, train, work_of
from perl.policy.quantised import quantisation_config
from perl.recipe.quantisations import QUANTISATIONS
from perl.rollouts.engine import EngineSampling, Request
from perl.rollouts.hf_engine import TransformersEngine
from perl.training.decoder import Types

# The first that is found in a name of a kernel or an operation decides.
KINDS = {
    "attention": r"flash|fmha|attention|attn",
    "head": r"_forward_kernel|_backward_kernel|softmax|logsumexp|cross_entropy|nll_loss",
    "optimizer": r"multi_tensor_apply|adam|sgd|_foreach",
    "matmul": r"gemm|cutlass|cublas|nvjet|xmma|::mm\b|::addmm|::bmm|::baddbmm|::matmul|::linear|splitk|dot_kernel",
    "copies": r"copy|memcpy|memset|::cat\b|catarray|index|gather|scatter|::to\b|::stack|::fill|fillfunctor|clone"
    r"|embedding",
    "elementwise": r"elementwise|reduce|triton|rsqrt|norm|silu|::mul|::add|::sub|::neg|::pow|::mean|::sum|::where"
    r"|::exp|::div|::sin|::cos|sigmoid",
}
KERNELS = 15  # that are kept by name
PROMPT, COMPLETIONS, COMPLETION = 64, 64, 128  # of decoding, in tokens


def kind_of(name: str) -> str:
    """What a kernel, or an operation of PyTorch, does."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of some spans lasts, each given by its begin and end."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total


def profile(setting: Setting) -> Numbers:
    """Kernels of the 4B's step at 16k by kind and by name; on a CPU operations, each by itself.

    Idle is what the step before, which was not profiled, took beyond the time in which some kernel ran.
    """
    activity = ProfilerActivity.CUDA if setting.on_cuda else ProfilerActivity.CPU
    profiler = torch_profile(activities=[activity])
    taken = train(setting, work_of(setting, "4B", LONG, "perl"), "perl", profiler)
    of_kind: dict[str, float] = defaultdict(float)
    of_name: dict[str, list[float]] = defaultdict(list)
    spans = kernels_of(profiler, on_cuda=setting.on_cuda)
    for name, begin, end in spans:
        of_kind[kind_of(name)] += end - begin
        of_name[name].append(end - begin)
    of_kind["idle"] = max(taken["step_seconds"] - busy((begin, end) for _, begin, end in spans), 0.0)
    kinds = dict(sorted(of_kind.items(), key=lambda item: -item[1]))
    longest = sorted(of_name.items(), key=lambda item: -sum(item[1]))[:KERNELS]
    kernels = [{"name": name[:120], "seconds": sum(each), "count": len(each)} for name, each in longest]
    shares = ", ".join(f"{kind} {seconds / taken['step_seconds']:.0%}" for kind, seconds in kinds.items())
    return {**taken, "kinds": kinds, "kernels": kernels, "says": f"a step of {taken['step_seconds']:.2f} s: {shares}"}


def kernels_of(profiler: torch_profile, *, on_cuda: bool) -> list[tuple[str, float, float]]:
    """Names, begins and ends in seconds."""
    kernels = []
    for event in profiler.events():
        begin = event.time_range.start / 1e6
        if on_cuda and event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            kernels.append((event.name, begin, event.time_range.end / 1e6))
        elif not on_cuda and event.name.startswith("aten::") and event.self_cpu_time_total > 0:
            kernels.append((event.name, begin, begin + event.self_cpu_time_total / 1e6))
    return kernels


def variant(setting: Setting, name: str) -> Numbers:
    """A micro-batch with compiled layers, a fused head or both, in turns with neither: ``compile_and_fuse.py``."""
    (shape,) = compile_and_fuse.shapes(setting.device, tiny=setting.tiny)
    with compiling_quickly(setting.tiny):
        row = compile_and_fuse.measure_variant(
            name, shape, lambda: compile_and_fuse.make_policies(shape, setting.device)
        )
    memory = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / GIB:.2f} GiB above what was there"
    says = f"{shape.name}: {row['pass_seconds']:.3f} s a pass, {row['ratio']:.2f} times as fast as without{memory}; "
    says += f"{row['compile_seconds']:.1f} s to compile, {row['graphs']} graphs, {row['graphs_later']} later"
    return {**row, "says": says}


def nf4(setting: Setting) -> Numbers:
    """The 4B's step at 16k on a base that was quantised to NF4 as it was loaded."""
    work = work_of(setting, "4B", LONG, "perl")
    base = quantised(work.case, work.scale, setting)
    taken = train(setting, work, "perl", base=base)
    speed = 2 * (work.case.completions[1] + 1) / taken["step_seconds"]
    expected = planned(setting, work, Types(quantised=QUANTISATIONS["nf4"])) / GIB
    says = f"{speed:,.0f} tokens/s, {taken['step_seconds']:.2f} s, peak {taken['peak_gib']:.2f} GiB"
    says += f", planned {expected:.2f}"
    return {**taken, "tokens_per_second": speed, "planned_gib": expected, "says": says}


def quantised(case: Case, scale: Scale, setting: Setting) -> PreTrainedModel:
    """The random base, written and loaded again: weights are quantised as they are read."""
    folder = setting.folder / "to_quantise"
    make_base(case, scale).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        quantization_config=quantisation_config("nf4", torch.bfloat16),
        device_map={"": 0 if setting.on_cuda else "cpu"},
    )


def decode(setting: Setting) -> Numbers:
    """Completions of the random 0.6B by transformers in this process."""
    work = work_of(setting, "0.6B", LONG, "perl")
    count, length = (4, 12) if setting.tiny else (COMPLETIONS, COMPLETION)
    engine = TransformersEngine(make_base(work.case, work.scale).eval(), make_tokenizer(work.case.vocabulary))
    generator = torch.Generator().manual_seed(2)
    prompt = tuple(torch.randint(2, work.case.vocabulary, (PROMPT,), generator=generator).tolist())

    def written(most: int) -> Any:  # noqa: ANN401
        sampling = EngineSampling(temperature=1.0, max_completion_length=most, end_token_ids=(1,))
        return engine.start([Request(prompt, count)], sampling).result()

    written(2)
    started = time.perf_counter()
    (group,) = written(length)  # tokens are lists on the CPU: the device has ended
    seconds = time.perf_counter() - started
    tokens = sum(len(sampled.token_ids) for sampled in group)
    says = f"{tokens / seconds:,.0f} tokens/s, {count} completions at a time"
    return {"tokens_per_second": tokens / seconds, "tokens": tokens, "sampling_seconds": seconds, "says": says}
