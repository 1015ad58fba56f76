"""The training half of a step with compiled layers and with a fused head, each beside neither and both.

Run as ``python benchmarks/compile_and_fuse.py``: random Qwen3-shaped models with LoRA of rank 16 on all linear layers,
packed rows of random tokens; forward, loss and backward pass of what a trainer runs, without its data and rewards.
``--device cuda`` takes the shape of Qwen2.5-1.5B in bfloat16; ``--tiny`` runs everything small and writes nothing.

* seconds: of a pass, forward and backward; on a CPU of the processor's time, which other work on the machine changes
  little. The four variants take turns on the same rows in one process; of each batch of rows the fastest repeat counts,
  and batches are averaged.
* ratio: seconds of neither over those of the variant, above 1 where it is faster.
* compile: seconds on the wall's clock of the first two passes above those of ``off``; the layers' graphs of ``both``
  are those that ``compile`` has made already, and what torch finds in its cache on disk is not compiled again.
* graphs: that torch made in these two passes; and in all others, whose rows have other lengths: 0 if none is made anew.
* memory: how far the peak of a pass lies above what was there before it: on CUDA what PyTorch's allocator has given
  out, else resident memory, with freed tensors given back to the system at once.
* difference: of the adapter's gradient to that of neither, relative (Frobenius norms).

Prints a table; writes ``results/compile_and_fuse.json`` (``compile_and_fuse_cuda.json`` on CUDA).
"""

import argparse
import contextlib
import copy
import ctypes
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

import perl.compiled
from perl.attention import use_packed_attention
from perl.compiled import compile_layers
from perl.head import LogitSettings, add_scored_forward
from perl.methods.fused_lora import fuse_lora
from perl.packing import Row
from perl.run import installed_versions
from perl.scoring import score

RESULTS = Path(__file__).parent / "results"
GENERATIONS = 8
WARM_UP = 2
M_MMAP_THRESHOLD = -3  # of malloc.h
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
        large = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "vocab_size": 151936}
        grouped = {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True}
        return [Shape("1.5B bfloat16", "qwen2", {**large, **grouped}, True, 200, (3000, 16384))]
    middle = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64, "vocab_size": 8192}
    return [
        Shape(kind, "qwen3", {**heads, **middle}, kind == "bfloat16", 64, (128, 512))
        for kind in ("float32", "bfloat16")
    ]


def make_policies(shape: Shape, device: torch.device) -> dict[str, PeftModel]:
    """The same policy for each variant, prepared as the trainer does."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.architecture, pad_token_id=0, eos_token_id=1, **shape.config)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if shape.bf16 else torch.float32)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    policy = get_peft_model(model, lora)
    fuse_lora(policy)
    policies = {}
    for name, (compiles, fuses) in VARIANTS.items():
        policies[name] = own = copy.deepcopy(policy)
        own.train()
        base = own.get_base_model()
        add_scored_forward(base, LogitSettings(), fused=fuses, compiled=compiles)
        why = use_packed_attention(base) or (compile_layers(base, packed=True) if compiles else None)
        if why:
            raise RuntimeError(why)
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


def measure_shape(shape: Shape, device: torch.device) -> list[dict[str, Any]]:
    """A row for each variant."""
    policies = make_policies(shape, device)
    batches = [draw_rows(shape, device, seed) for seed in range(WARM_UP + shape.batches)]
    graphs = {name: [0, 0] for name in policies}
    first: dict[str, float] = {}
    differences, expected = {}, torch.zeros(0)

    def counted(name: str, rows: list[Row], when: int) -> tuple[float, torch.Tensor]:
        before = counters["stats"]["unique_graphs"]
        result = run_pass(policies[name], rows, shape)
        graphs[name][when] += counters["stats"]["unique_graphs"] - before
        return result

    for name in policies:
        started = time.perf_counter()
        runs = [counted(name, rows, 0) for rows in batches[:WARM_UP]]
        first[name] = time.perf_counter() - started
        expected = runs[1][1] if name == "off" else expected
        differences[name] = float((runs[1][1] - expected).norm() / expected.norm())
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in range(shape.batches)] for name in policies}
    for _ in range(shape.repeats):
        for place, rows in enumerate(batches[WARM_UP:]):
            for name in policies:
                seconds[name][place].append(counted(name, rows, 1)[0])
    means = {name: statistics.mean(min(times) for times in every) for name, every in seconds.items()}
    tokens = sum(row.tokens for rows in batches[WARM_UP:] for row in rows) / shape.batches
    return [
        {
            "case": f"{shape.name}, {name}",
            "shape": shape.name,
            "variant": name,
            "tokens": tokens,
            "seconds": means[name],
            "ratio": means["off"] / means[name],
            "turns": seconds[name],
            "compile_seconds": max(first[name] - first["off"], 0.0),
            "graphs": graphs[name][0],
            "graphs_later": graphs[name][1],
            "peak_bytes": peak_bytes(policies[name], batches[-1], shape),
            "difference": differences[name],
        }
        for name in policies
    ]


def measure(setting: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 (a Setting of gpu_stages: device, tiny, done)
    """A row for each shape and variant, for ``benchmarks/gpu.py``; a shape all of whose rows are done is left out."""
    for shape in shapes(setting.device, tiny=setting.tiny):
        if {f"{shape.name}, {name}" for name in VARIANTS} <= set(setting.done):
            continue
        with _quick_backend() if setting.tiny else contextlib.nullcontext():
            yield from measure_shape(shape, setting.device)


@contextlib.contextmanager
def _quick_backend() -> Iterator[None]:
    """Graphs that are traced and run without code being generated, which takes seconds for each."""
    usual, perl.compiled._BACKEND = perl.compiled._BACKEND, "aot_eager"
    try:
        yield
    finally:
        perl.compiled._BACKEND = usual


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
            f"{row['shape']:14} {row['variant']:10} {row['tokens']:>6.0f} {row['seconds']:>8.3f} {row['ratio']:>6.2f} "
            f"{row['compile_seconds']:>9.1f} {row['graphs']:>4}+{row['graphs_later']:<2} {memory:>7} "
            f"{row['difference']:>10.1e}"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    device: torch.device
    tiny: bool
    done: frozenset[str] = frozenset()


def main() -> None:
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
    for row in measure(Asked(torch.device(arguments.device), arguments.tiny)):
        rows.append(row)
        if not arguments.tiny:
            facts = {"versions": installed_versions(), "threads": arguments.threads, "rows": rows}
            path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
