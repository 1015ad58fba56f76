"""The training half of a step with compiled layers and with a fused head, each beside neither and both.

Run as ``python benchmarks/compile_and_fuse.py``: random Qwen3-shaped models with LoRA of rank 16 on all linear layers,
packed rows of random tokens; forward, loss and backward pass of what a trainer runs, without its data and rewards.
``--device cuda`` takes the shape of Qwen2.5-1.5B in bfloat16; ``--tiny`` runs everything small and writes nothing.

* seconds: of a pass, forward and backward; on a CPU of the processor's time, which other work on the machine changes
  little. All variants run the same tensors in one process, and each takes turns with ``off`` on the same rows; of each
  batch of rows the fastest repeat counts, and batches are averaged.
* ratio: seconds of neither in these turns over those of the variant, above 1 where it is faster.
* compile: seconds on the wall's clock of the first two passes above those of ``off``; the layers' graphs of ``both``
  are those that ``compile`` has made already, and what torch finds in its cache on disk is not compiled again.
* graphs: that torch made in these two passes; and in all others, whose rows have other lengths: 0 if none is made anew.
* memory: how far the peak of a pass lies above what was there before it: on CUDA what PyTorch's allocator has given
  out, else resident memory, with freed tensors given back to the system at once.
* difference: of the adapter's gradient to that of neither, relative (Frobenius norms); a check that no variant leaves
  something out. How right each is, tests say, which have float32 to hold it to.

Prints a table; writes ``results/compile_and_fuse.json`` (``compile_and_fuse_cuda.json`` on CUDA).
"""

import argparse
import copy
import ctypes
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from result_lines import as_lines

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
from gpu_rows.models import SHAPES, VOCABULARY, compiling_quickly, make_ready
from peft import LoraConfig, PeftModel, get_peft_model
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from perl.packing.forward import score
from perl.packing.rows import Row
from perl.run.folder import installed_versions

RESULTS = Path(__file__).parent / "results"
GENERATIONS = 8
WARM_UP = 2
M_MMAP_THRESHOLD = -3  # of malloc.h
# Of gradients, relative: with bfloat16 each variant rounds in other places, in every layer.
SAME = {"float32": 1e-4, "bfloat16": 0.1}
# Name -> whether layers are compiled, whether the head is fused.
VARIANTS = {
    "off": (False, False),
    "compile": (True, False),
    "fused head": (False, True),
    "both": (True, True),
}


@dataclass(frozen=True)
class Shape:
    """A model and the rows that go through it.

    Attributes:
        name: As it is printed.
        architecture: transformers' name.
        config: Of the model.
        bf16: Whether weights are bfloat16 and passes run under autocast, as in a trainer.
        prompt: Tokens.
        completions: Mean of a lognormal of sigma 0.8, and its largest value.
        batches: Batches of different lengths.
        repeats: Times that each is run.
    """

    name: str
    architecture: str
    config: dict[str, Any]
    bf16: bool
    prompt: int
    completions: tuple[int, int]
    batches: int = 2
    repeats: int = 3


def shapes(device: torch.device, *, tiny: bool) -> list[Shape]:
    """What is measured on a device."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    if tiny:
        small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": 64}
        return [Shape("tiny float32", "qwen3", {**heads, **small}, False, 4, (6, 12), batches=2, repeats=1)]
    if device.type == "cuda":
        architecture, width, published = SHAPES["1.5B"]
        large = {"hidden_size": width, "vocab_size": VOCABULARY, "tie_word_embeddings": True, **published}
        # About 12 thousand tokens, whose activations are all kept: half of what 80 GB hold.
        return [Shape("1.5B bfloat16", architecture, large, True, 200, (1500, 4096))]
    middle = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64, "vocab_size": 8192}
    return [
        Shape(kind, "qwen3", {**heads, **middle}, kind == "bfloat16", 64, (128, 512))
        for kind in ("float32", "bfloat16")
    ]


def make_policies(shape: Shape, device: torch.device) -> dict[str, PeftModel]:
    """A policy for each variant, prepared as the trainer does; all have their parameters in common."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.architecture, pad_token_id=0, eos_token_id=1, **shape.config)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if shape.bf16 else torch.float32)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    policy = get_peft_model(model, lora)
    shared = {id(parameter): parameter for parameter in policy.parameters()}
    policies = {}
    for name, (compiles, fuses) in VARIANTS.items():
        policies[name] = copy.deepcopy(policy, dict(shared)).train()
        make_ready(policies[name], fused=fuses, compiled=compiles)
    return policies


def draw_rows(shape: Shape, device: torch.device, seed: int) -> list[Row]:
    """A group: a prompt with its completions."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(2, shape.config["vocab_size"], (count,), generator=generator).to(device)

    mean, largest = shape.completions
    logs = torch.tensor(float(mean)).log() - 0.32 + 0.8 * torch.randn(GENERATIONS, generator=generator)
    prompt = tokens(shape.prompt)
    lengths = logs.exp().long().clamp(2, largest).tolist()
    return [Row(prompt, tokens(length), torch.ones(length, dtype=torch.bool)) for length in lengths]


def run_pass(policy: PeftModel, rows: list[Row], shape: Shape) -> tuple[float, torch.Tensor]:
    """Seconds of a forward and a backward pass, and the adapter's gradient."""
    device = policy.device
    policy.zero_grad(set_to_none=True)
    columns = max(row.completion.numel() for row in rows)
    signs_N1 = torch.tensor([[1.0], [-1.0]], device=device).repeat(len(rows) // 2, 1)
    _settle(device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    started = clock()
    with torch.autocast(device.type, torch.bfloat16, enabled=shape.bf16):
        log_probs_NT, _ = score(policy, rows, [list(range(len(rows)))], packed=True, columns=columns)
    (log_probs_NT * signs_N1).mean().backward()
    _settle(device)
    seconds = clock() - started
    return seconds, torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(policy: PeftModel, rows: list[Row], shape: Shape) -> int | None:
    """By how much a pass raises what is in use; None where the system does not tell."""
    if policy.device.type == "cuda":
        policy.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_pass(policy, rows, shape)
        return torch.cuda.max_memory_allocated() - before
    status, refs = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.is_file() or platform.libc_ver()[0] != "glibc":
        return None

    def resident(field: str) -> int:
        return 1024 * int(next(s.split()[1] for s in status.read_text("ascii").splitlines() if s.startswith(field)))

    library = ctypes.CDLL(None)
    library.mallopt(M_MMAP_THRESHOLD, 2**16)
    run_pass(policy, rows, shape)
    library.malloc_trim(0)  # else a pass is given what earlier ones have freed, and raises nothing
    refs.write_text("5", encoding="ascii")  # sets VmHWM to VmRSS
    before = resident("VmRSS")
    run_pass(policy, rows, shape)
    return resident("VmHWM") - before


def measure_variant(name: str, shape: Shape, policies_of: Callable[[], dict[str, PeftModel]]) -> dict[str, Any]:
    """The row of a variant, which takes turns with ``off``.

    Args:
        name: Of :data:`VARIANTS`.
        shape: What is run.
        policies_of: Makes them once.
    """
    policies = policies_of()
    device = policies[name].device
    batches = [draw_rows(shape, device, seed) for seed in range(WARM_UP + shape.batches)]
    pair = list(dict.fromkeys(["off", name]))
    graphs = [0, 0]  # in the first passes, in all others
    first, gradients = {}, {}

    def counted(which: str, rows: list[Row], when: int) -> tuple[float, torch.Tensor]:
        before = counters["stats"]["unique_graphs"]
        result = run_pass(policies[which], rows, shape)
        if which == name:
            graphs[when] += counters["stats"]["unique_graphs"] - before
        return result

    for which in pair:
        started = time.perf_counter()
        gradients[which] = [counted(which, rows, 0) for rows in batches[:WARM_UP]][1][1]
        first[which] = time.perf_counter() - started
    apart = float((gradients[name] - gradients["off"]).norm() / gradients["off"].norm())
    gradients.clear()
    turns: dict[str, list[list[float]]] = {which: [[] for _ in range(shape.batches)] for which in pair}
    for _ in range(shape.repeats):
        for place, rows in enumerate(batches[WARM_UP:]):
            for which in pair:
                turns[which][place].append(counted(which, rows, 1)[0])
    means = {which: statistics.mean(min(times) for times in every) for which, every in turns.items()}
    return {
        "shape": shape.name,
        "variant": name,
        "tokens": sum(row.tokens for rows in batches[WARM_UP:] for row in rows) / shape.batches,
        "pass_seconds": means[name],
        "ratio": means["off"] / means[name],
        "turns": turns[name],
        "turns_of_off": turns["off"],
        "compile_seconds": max(first[name] - first["off"], 0.0),
        "graphs": graphs[0],
        "graphs_later": graphs[1],
        "peak_bytes": peak_bytes(policies[name], batches[-1], shape),
        "difference": apart,
        "ok": apart <= SAME["bfloat16" if shape.bf16 else "float32"],
    }


def measure(device: torch.device, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """A row for each shape and variant, each as soon as it is measured."""
    for shape in shapes(device, tiny=tiny):
        policies_of = cache(partial(make_policies, shape, device))
        with compiling_quickly(tiny):
            for name in VARIANTS:
                yield measure_variant(name, shape, policies_of)


def table(rows: list[dict[str, Any]]) -> str:
    """What is printed."""
    head = (
        f"{'shape':14} {'variant':10} {'tokens':>6} {'seconds':>8} {'ratio':>6} {'compile s':>9} {'graphs':>7} "
        f"{'MiB':>7} {'difference':>10}"
    )
    lines = [head]
    for row in rows:
        memory = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f}"
        lines.append(
            f"{row['shape']:14} {row['variant']:10} {row['tokens']:>6.0f} {row['pass_seconds']:>8.3f} "
            f"{row['ratio']:>6.2f} {row['compile_seconds']:>9.1f} {row['graphs']:>4}+{row['graphs_later']:<2} "
            f"{memory:>7} {row['difference']:>10.1e}{'  FAILED' if row.get('ok') is False else ''}"
        )
    return "\n".join(lines)


def main() -> int:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tiny", action="store_true", help="all of it small; writes nothing")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch on a CPU")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for what is written")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    path = arguments.results / ("compile_and_fuse_cuda.json" if arguments.device == "cuda" else "compile_and_fuse.json")
    for row in measure(torch.device(arguments.device), tiny=arguments.tiny):
        rows.append(row)
        if not arguments.tiny:
            facts = {"versions": installed_versions(), "threads": arguments.threads, "rows": rows}
            path.write_text(as_lines(facts) + "\n", encoding="utf-8")
    print(table(rows))
    return 1 if any(not row["ok"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
